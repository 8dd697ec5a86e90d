"""The demo: a small generated dataset whose true contents are known."""

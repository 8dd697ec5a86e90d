"""The stage `verify`: re-reads everything that was written, and says what is wrong with it."""

"""Folders that hold a source: on a local disk or remote, and how they are listed."""

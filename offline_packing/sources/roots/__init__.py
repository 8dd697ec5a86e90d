"""Where a source lies: a local folder or a remote one, and listings of what is in it."""

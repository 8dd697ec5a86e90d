"""The stage `write`: plan and the source's bytes to shards, metadata and manifest."""

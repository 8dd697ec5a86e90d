"""The stage `verify`: re-reads all written files, and reports their faults."""

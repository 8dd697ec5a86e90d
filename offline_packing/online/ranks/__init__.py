"""Which rank trains on what at which step: as much work for each, whatever was packed how."""

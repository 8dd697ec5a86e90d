"""What is done to an output that exists: status and repair."""

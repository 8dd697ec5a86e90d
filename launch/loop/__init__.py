"""One training run: its plan, steps, loss, optimizer, log and checkpoints."""

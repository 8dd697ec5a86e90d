"""Energon's samples to rows: a sample, packed or not, to its sub-samples, and those to a row."""

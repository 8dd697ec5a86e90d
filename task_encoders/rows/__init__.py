"""Energon's samples as rows: a sample, packed or not, becomes its sub-samples, and those a row."""

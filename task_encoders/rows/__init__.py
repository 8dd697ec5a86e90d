"""Energon's samples as rows: a sample, packed or not, becomes sub-samples; they become a row."""

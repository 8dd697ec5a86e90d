"""Packs in the trainers of others: one file for each, imported only where that trainer is."""

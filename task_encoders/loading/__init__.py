"""Packs from a folder to a loader: through Energon, or by number."""

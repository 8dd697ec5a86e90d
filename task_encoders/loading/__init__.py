"""Packs from a folder to a loader: through Energon, by number, or as token ids."""

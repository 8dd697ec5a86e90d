"""Packs, token packs and online data as the micro batches of one rank."""

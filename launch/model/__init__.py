"""Families of models on megatron-core, and their checkpoints."""

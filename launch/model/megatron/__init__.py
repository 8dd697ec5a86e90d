"""The model on megatron-core's layers: its weights, its tower, its rows over several ranks."""

"""Models for packed rows: built of megatron-core's layers, or whole from transformers."""

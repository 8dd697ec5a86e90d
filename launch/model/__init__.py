"""Models for packed rows: built from megatron-core's layers, or whole from transformers."""

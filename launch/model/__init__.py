"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL on megatron-core, and their checkpoints."""

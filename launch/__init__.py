"""Training on packs: on megatron-core, through transformers, and in other training frameworks."""

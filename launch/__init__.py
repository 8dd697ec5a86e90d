"""Training on packs: on megatron-core, through transformers, and in the trainers of others."""

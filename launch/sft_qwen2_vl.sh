#!/usr/bin/env bash
# Fine-tune Qwen2-VL on packed multi-turn and mixed conversations.
#
#   bash launch/sft_qwen2_vl.sh                             # the demo's dialogues, after `make demo`
#   bash launch/sft_qwen2_vl.sh data.path=/data/sft model.checkpoint=/models/Qwen2-VL-7B \
#       parallel.tensor=2 data.micro_batch_size=1 batch.global_batch_size=256 \
#       train.epochs=1 schedule.learning_rate=1e-5 output.path=out/sft
#                                    # Megatron's TP, CP (parallel.context), MBS, GBS, lr, save
#   BLEND=1 bash launch/sft_qwen2_vl.sh data.path=launch/blend.yaml     # captions, VQA and dialogues
set -euo pipefail

VQA=0
# In a blend each pack says what it is.
BMR=$([ "${BLEND:-0}" = 1 ] && echo 0 || echo 1)
DEFAULT=sft.yaml DEMO=bmr

source "$(dirname "$0")/run_training.sh"

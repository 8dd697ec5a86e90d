#!/usr/bin/env bash
# Pretrain Qwen2-VL on packs. STAGE=1: captions, the projector only. STAGE=1.5: VQA, everything.
#
#   bash launch/pretrain_qwen2_vl.sh                        # the demo's captions, after `make demo`
#   STAGE=1.5 bash launch/pretrain_qwen2_vl.sh data.path=/data/vqa model.checkpoint=out/stage1/hf
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 NPROC_PER_NODE=8 bash launch/pretrain_qwen2_vl.sh ...
set -euo pipefail

BMR=0
case "${STAGE:=1}" in
    1)   VQA=0 DEFAULT=pretrain_stage1.yaml DEMO=captioning ;;
    1.5) VQA=1 DEFAULT=pretrain_stage1_5.yaml DEMO=vqa ;;
    *)   echo "STAGE=$STAGE is not known; set it to 1 or 1.5" >&2; exit 2 ;;
esac

source "$(dirname "$0")/run_training.sh"

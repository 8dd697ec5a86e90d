#!/usr/bin/env bash
# Pack a dataset: measure, plan, write and verify. What is complete is not done again.
#
#   bash launch/pack.sh                                     # the demo's dialogues, after `make demo`
#   CONFIG=my.yaml bash launch/pack.sh pack.seq_length=8192 engine.workers=64
set -euo pipefail
cd "$(dirname "$0")/.."

CONFIG=${CONFIG:-demo_output/bmr.yaml}

# What `make demo` installed comes first, where it is there.
export PATH=$PWD/.venv/bin:$PATH
# Two OpenMP pools that spin while they wait slow each other down many times over.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
export TOKENIZERS_PARALLELISM=false

exec offline-packing run "$CONFIG" "$@"

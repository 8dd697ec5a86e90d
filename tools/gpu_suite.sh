#!/usr/bin/env bash
# GPU tests and the training benchmarks, in under 15 minutes on one GPU.
# Needs torch >= 2.11, megatron-core, megatron-energon and transformers; neither TransformerEngine nor
# flash-attn. Results go to $OUT: tests.log, benchmark/ and neva/ with results.json, table.md.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-out/gpu_suite}
SHAPES=${SHAPES:-2b}
SEQ_LENGTH=${SEQ_LENGTH:-8192}
NUM_SAMPLES=${NUM_SAMPLES:-4000}
STEPS=${STEPS:-40}

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
mkdir -p "$OUT"

timeout 240 "$PYTHON" -m pytest tests/gpu -m gpu -q -rs -p no:cacheprovider 2>&1 | tee "$OUT/tests.log"

# Packs to train on: the demo's dialogues, at the length of a real run.
DATA=$OUT/data
"$PYTHON" -c "
import sys
from pathlib import Path
from offline_packing.demo.generate import generate_demo_dataset
generate_demo_dataset(Path(sys.argv[1]), seed=0, num_samples=int(sys.argv[2]), progress=False)
" "$DATA/source" "$NUM_SAMPLES"
cat > "$DATA/bmr.yaml" <<YAML
source: {format: pairs, path: $DATA/source/bmr, task: bmr}
model: {max_pixels: 1003520}
pack: {seq_length: $SEQ_LENGTH}
output: {path: $DATA/packed}
YAML
"$PYTHON" -m offline_packing run "$DATA/bmr.yaml" --quiet

timeout 240 "$PYTHON" tools/benchmarks/benchmark_training.py "$DATA/packed" \
    --shapes "$SHAPES" --steps "$STEPS" --workers 4 --output "$OUT/benchmark"

# The same on samples as LLaVA's, with 576 tokens an image, beside what NeVA's packing gained; and
# the same packs as token ids.
"$PYTHON" tools/benchmarks/llava_like.py "$DATA/llava" --samples "${LLAVA_SAMPLES:-1000}" --side 672
for LAYOUT in energon indexed; do
    cat > "$DATA/$LAYOUT.yaml" <<YAML
source: {format: json, path: $DATA/llava/llava.json, task: bmr, image_root: $DATA/llava/images}
model: {max_pixels: 1003520}
pack: {seq_length: $SEQ_LENGTH, strategy: first_fit_shuffle}
output: {path: $DATA/llava_$LAYOUT, layout: $LAYOUT}
YAML
    "$PYTHON" -m offline_packing run "$DATA/$LAYOUT.yaml" --quiet
done
timeout 300 "$PYTHON" tools/benchmarks/benchmark_training.py "$DATA/llava_energon" \
    --indexed "$DATA/llava_indexed/packed_seq_dataset" --at-least 0.9 \
    --shapes "$SHAPES" --steps "$STEPS" --workers 4 --output "$OUT/neva"

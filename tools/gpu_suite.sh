#!/usr/bin/env bash
# Proves and measures on one GPU, in parts that fit a call of five minutes:
#   bash tools/gpu_suite.sh smoke tests fla
#   bash tools/gpu_suite.sh train bench vqa
#
# smoke  versions; torch's varlen attention with grouped keys; NCCL; compiled fusions
# tests  tests/gpu, three processes beside each other
# fla    the stand-in of Qwen3.5's recurrent kernels against flash-linear-attention's
# train  launch.train, fused and unfused, and launch.train_transformers
# bench  padded, packed online, packed offline
# vqa    five questions a picture, with and without pack.share_prefixes
#
# Each part gets what is left of DEADLINE seconds; none ends another. Needs torch >= 2.11 and
# transformers, and on Python 3.12 the wheels that tools/gpu_wheels.sh downloads into $WHEELS. Neither
# TransformerEngine nor flash-attn is needed. Figures are printed as they come; log.txt and JSON lie
# under $OUT, eight files at most a call. Without a GPU a part ends where it would need one, or runs
# at sizes for a CPU, and says so.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-out/gpu_suite}
WORK=${WORK:-$OUT.work}
WHEELS=${WHEELS:-.whl}
DEADLINE=${DEADLINE:-280}
PATIENCE=1 # times a part's own limit
mkdir -p "$OUT" "$WORK"
exec > >(tee -a "$OUT/log.txt") 2>&1

say() { echo "== ${SECONDS} s: $*"; }
# run AT_MOST NAME COMMAND...: with what is left of the time, and its status said.
run() {
    local left=$((DEADLINE - SECONDS)) limit=$((PATIENCE * $1)) name=$2 status=0
    shift 2
    if ((left < 5)); then say "$name skipped: $left s left of $DEADLINE"; return 1; fi
    timeout -k 5 $((left < limit ? left : limit)) "$@" || status=$?
    if ((status == 124 || status == 137)); then say "$name stopped: out of time"
    elif ((status)); then say "$name failed: status $status"
    else say "$name done"; fi
    return $status
}

export PYTHONPATH=$PWD OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore TQDM_DISABLE=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export OFFLINE_PACKED_DATA=1 OFFLINE_PACKING_BMR=1
if compgen -G "$WHEELS/*.whl" > /dev/null; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$WORK/site" "$WHEELS"/*.whl && PYTHONPATH+=:$WORK/site
fi
if [[ $("$PYTHON" -c 'import torch; print(torch.cuda.is_available())') == True ]]; then
    SHAPES=${SHAPES:-2b} SEQ_LENGTH=${SEQ_LENGTH:-8192} STEPS=${STEPS:-20} WORKERS=4
    MODEL=$(PYTHONPATH=tools/benchmarks "$PYTHON" -c "
import json, training_shapes
print(json.dumps(training_shapes.SHAPES['2b'])[1:-1])")
else
    say "no CUDA device: sizes for a CPU, whose figures say nothing about a GPU"
    PATIENCE=6 SHAPES=${SHAPES:-cpu} MODEL='preset: tiny' SEQ_LENGTH=${SEQ_LENGTH:-1024} STEPS=${STEPS:-2} WORKERS=0
fi
# A pack of 8,192 tokens takes some 80 of the demo's samples, of which a quarter are dialogues; and
# 30 questions about pictures of 256 tokens, or 110 of them as branches.
NUM_SAMPLES=${NUM_SAMPLES:-$((100 + 90 * (STEPS + 4) * SEQ_LENGTH / 8192))}
NUM_QUESTIONS=${NUM_QUESTIONS:-$((100 + 140 * (STEPS + 4) * SEQ_LENGTH / 8192))}

# pack NAME SOURCE MORE: once.
pack() {
    [[ -e $WORK/$1/_packing/report ]] && return
    printf 'source: {%s}\nmodel: {max_pixels: 1003520}\npack: {seq_length: %s, max_set_aside: 1%s}\noutput: {path: %s}\n' \
        "$2" "$SEQ_LENGTH" "$3" "$WORK/$1" > "$WORK/$1.yaml"
    run 200 "packs $1" "$PYTHON" -m offline_packing run "$WORK/$1.yaml" --quiet
}
dialogues() {
    [[ -e $WORK/source/truth.json ]] || run 100 "demo data" "$PYTHON" -c "
import sys
from pathlib import Path
from offline_packing.demo.generate import generate_demo_dataset
generate_demo_dataset(Path(sys.argv[1]), seed=0, num_samples=int(sys.argv[2]), progress=False)
" "$WORK/source" "$NUM_SAMPLES"
    pack packed "format: pairs, path: $WORK/source/bmr, task: bmr" ""
}
questions() {
    [[ -e $WORK/questions/llava.json ]] || run 60 "questions" "$PYTHON" tools/benchmarks/llava_like.py \
        "$WORK/questions" --samples "$NUM_QUESTIONS" --questions 5 --side 448
    local source="format: json, path: $WORK/questions/llava.json, task: vqa, image_root: $WORK/questions/images"
    pack whole "$source" "" && pack shared "$source" ", share_prefixes: {}"
}
# launch NAME MODULE MODEL
launch() {
    printf 'model: {%s}\ndata: {path: %s, num_workers: %s}\nbatch: {global_batch_packs: 1}\ntrain: {iterations: 12}\nschedule: {learning_rate: 1.0e-5, warmup: 0.25}\nmetrics: {log_every: 6}\ncheckpoint: {every: 0, export: false}\noutput: {path: %s}\n' \
        "$3" "$WORK/packed" "$WORKERS" "$WORK/$1" > "$WORK/$1.yaml"
    # Without the checkpoint after the last step, 26 GB that no figure needs.
    run 100 "$1" "$PYTHON" -c "
import sys
from launch.loop.trainer import Trainer
from launch.start import _COMMANDS
Trainer._save = lambda trainer: trainer.iteration
_COMMANDS[sys.argv[1]][0](sys.argv[2:])
" "$2" "$WORK/$1.yaml" > "$WORK/$1.log" 2>&1
    grep -E 'needs|attention|step [0-9]+/|^(==|error)' "$WORK/$1.log"
    cp "$WORK/$1/metrics.jsonl" "$OUT/$1.jsonl" 2> /dev/null
}
bench() { # NAME PACKS OPTION...
    local name=$1 packs=$2
    shift 2
    run 230 "$name" "$PYTHON" tools/benchmarks/benchmark_training.py "$WORK/$packs" --shapes "$SHAPES" \
        --steps "$STEPS" --workers "$WORKERS" --output "$WORK/$name" "$@"
    cp "$WORK/$name/results.json" "$OUT/$name.json" 2> /dev/null
    cp "$WORK/$name/table.md" "$OUT/$name.md" 2> /dev/null
}

for part in "$@"; do
    say "part $part"
    case $part in
        smoke) run 90 smoke "$PYTHON" -m tools.gpu_smoke ;;
        tests) # beside each other on one GPU
            for name in attention training parallel; do
                run 170 "tests of $name" "$PYTHON" -m pytest -m gpu -q -rs -p no:cacheprovider --tb=short \
                    --durations=3 "tests/gpu/test_$name.py" > "$WORK/$name.txt" 2>&1 &
            done
            wait $(jobs -p)
            for name in attention training parallel; do
                cat "$WORK/$name.txt" >> "$OUT/tests.txt"
                tail -n 25 "$WORK/$name.txt"
            done ;;
        fla) run 100 fla "$PYTHON" -m tools.gpu_fla ;;
        train)
            dialogues && for name in own own_unfused transformers; do
                module=launch.train model=$MODEL
                [[ $name == own_unfused ]] && model+=", fusions: false"
                [[ $name == transformers ]] && module=launch.train_transformers
                launch "$name" "$module" "$model"
            done ;;
        bench) dialogues && bench bench packed ;;
        vqa) questions && bench vqa whole --modes offline --shared "$WORK/shared" ;;
        *) say "unknown part; choose from: smoke tests fla train bench vqa" ;;
    esac
done
say end

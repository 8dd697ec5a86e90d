# Sourced by the scripts beside it: start launch.train, or MODULE, on this node. They set VQA and
# BMR, the task of their packs, and DEFAULT and DEMO: the configuration and the demo's packs to use
# where CONFIG is not set.
# Needs bash, runs from any folder; paths in CONFIG and "$@" are relative to the caller's folder.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${CONFIG:-}" ]; then
    CONFIG=$ROOT/launch/$DEFAULT
    DATA=$ROOT/demo_output
    [ -d "$DATA" ] || DATA=$PWD/demo_output  # of an installed package
    set -- "data.path=$DATA/$DEMO" "$@"
fi

# One line per node, the same everywhere except for NODE_RANK.
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-29500}
# Processes on this node: one per GPU that the caller may use, or one on a CPU.
GPUS=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --list-gpus 2>/dev/null || true)}
NPROC_PER_NODE=${NPROC_PER_NODE:-$(tr , '\n' <<<"$GPUS" | grep -c . || true)}
[ "$NPROC_PER_NODE" -gt 0 ] || NPROC_PER_NODE=1

# What `make demo` installed comes first, if present.
export PATH=$ROOT/.venv/bin:$PATH
# Our packages, not any that happen to be in the caller's folder.
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
# What each pack is: see task_encoders/settings.py. 0 is for data that are packed here (data.online).
# Variables that the caller has set stay.
export OFFLINE_PACKED_DATA=${OFFLINE_PACKED_DATA:-1}
VQA=${VQA:-0} BMR=${BMR:-0}
[ "$OFFLINE_PACKED_DATA" = 1 ] || VQA=0 BMR=0
[ -z "${OFFLINE_PACKING_VQA:-}${OFFLINE_PACKING_BMR:-}" ] || VQA=0 BMR=0
export OFFLINE_PACKING_VQA=${OFFLINE_PACKING_VQA:-$VQA} OFFLINE_PACKING_BMR=${OFFLINE_PACKING_BMR:-$BMR}
# Two OpenMP pools that spin while they wait slow each other down many times over.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
export TOKENIZERS_PARALLELISM=false
# Rows differ in length; growing segments keep that from fragmenting the memory.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

# Ctrl-C and SIGTERM save and stop, within 30 s; SHUTDOWN_TIMEOUT=300 gives more.
exec python -m launch.start \
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    ${SHUTDOWN_TIMEOUT:+--shutdown-timeout "$SHUTDOWN_TIMEOUT"} \
    -m "${MODULE:-launch.train}" "$CONFIG" "$@"

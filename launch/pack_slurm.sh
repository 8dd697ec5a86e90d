#!/usr/bin/env bash
# Pack a dataset as a slurm array:  launch/pack_slurm.sh CONFIG.yaml [key.sub=value ...]
#
# Two arrays of $RANKS jobs measure and write; what lies between and after runs on one machine. Each
# job starts when the one before has succeeded. Ranks that failed can be submitted again by
# themselves (sbatch --array=3,7 with the same PACKING_WORLD_SIZE): finished tasks are not done again.
set -euo pipefail

RANKS=${RANKS:-8}
CPUS=${CPUS:-16}
SBATCH_ARGS=${SBATCH_ARGS:-}        # for example: --partition=cpu --time=12:00:00
LOGS=${LOGS:-slurm_logs}
(($# >= 1)) || { echo "usage: RANKS=8 CPUS=16 $0 CONFIG.yaml [key.sub=value ...]" >&2; exit 2; }
mkdir -p "$LOGS"
printf -v arguments ' %q' "$@"

submit() {  # NAME DEPENDENCY COMMAND [sbatch arguments]: prints the job's id
  local name=$1 after=$2 command=$3
  shift 3
  # shellcheck disable=SC2086
  sbatch --parsable --job-name="pack-$name" --cpus-per-task="$CPUS" --output="$LOGS/%x-%A_%a.txt" \
    ${after:+--dependency=afterok:$after} "$@" $SBATCH_ARGS --wrap "$command"
}

share() {  # VERB: the command of one rank
  echo "PACKING_RANK=\$SLURM_ARRAY_TASK_ID PACKING_WORLD_SIZE=$RANKS" \
    "offline-packing $1$arguments engine.name=slurm --quiet"
}

whole() {  # VERB [option]: the command of one machine
  echo "offline-packing $1$arguments engine.name=local --quiet ${2:-}"
}

array="--array=0-$((RANKS - 1))"
measured=$(submit measure "" "$(share measure)" "$array")
planned=$(submit plan "$measured" "$(whole measure) && $(whole plan)")
written=$(submit write "$planned" "$(share write)" "$array")
checked=$(submit verify "$written" "$(whole write) && $(whole verify)")
echo "submitted: measure $measured, plan $planned, write $written, verify $checked"

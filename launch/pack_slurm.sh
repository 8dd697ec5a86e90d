#!/usr/bin/env bash
# Pack a dataset as a slurm array:  launch/pack_slurm.sh CONFIG.yaml [key.sub=value ...]
#
# Two arrays of $RANKS jobs measure and write; the stages between and after run on one machine. Each
# job starts when the previous one has succeeded; if one fails, those after it are cancelled. Then
# run this script again, with any RANKS: completed tasks are not repeated. Slurm requeues a rank
# whose node fails; scontrol requeue JOB_RANK does so by hand.
set -euo pipefail

RANKS=${RANKS:-8}                   # at most the cluster's MaxArraySize
AT_ONCE=${AT_ONCE:-}                # how many ranks run at the same time, at most
CPUS=${CPUS:-16}
SBATCH_ARGS=${SBATCH_ARGS:-}        # for example: --partition=cpu --time=12:00:00
LOGS=${LOGS:-slurm_logs}
(($# >= 1)) || { echo "usage: RANKS=8 CPUS=16 $0 CONFIG.yaml [key.sub=value ...]" >&2; exit 2; }
mkdir -p "$LOGS"
arguments=
for argument in "$@"; do  # sbatch hands its command to sh, which does not read what %q writes
  arguments+=" '${argument//\'/\'\\\'\'}'"
done

submit() {  # NAME DEPENDENCY LOG COMMAND [sbatch arguments]: prints the job's id
  local name=$1 after=$2 log=$3 command=$4 id
  shift 4
  # shellcheck disable=SC2086
  id=$(sbatch --parsable --job-name="pack-$name" --cpus-per-task="$CPUS" --nodes=1 --ntasks=1 \
    --requeue --open-mode=append --output="$LOGS/$log.txt" \
    ${after:+--dependency=afterok:$after --kill-on-invalid-dep=yes} "$@" $SBATCH_ARGS \
    --wrap "$command")
  echo "${id%%;*}"  # with several clusters: ID;CLUSTER
}

share() {  # VERB DEPENDENCY: one rank of an array each
  submit "$1" "$2" "%x-%A_%a" "offline-packing $1$arguments engine.name=slurm --quiet" \
    "--array=0-$((RANKS - 1))${AT_ONCE:+%$AT_ONCE}"
}

whole() {  # NAME DEPENDENCY VERB VERB: two verbs on one machine
  local options="$arguments engine.name=local --quiet"
  submit "$1" "$2" "%x-%j" "offline-packing $3$options && offline-packing $4$options"
}

measured=$(share measure "")
planned=$(whole plan "$measured" measure plan)
written=$(share write "$planned")
checked=$(whole verify "$written" write verify)
echo "submitted: measure $measured, plan $planned, write $written, verify $checked"

"""Ranks share the tasks without talking to each other, and a last run completes the stage."""

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from offline_packing.engines.slurm_array import SlurmEngine, find_rank
from offline_packing.errors import ConfigError, ShareDoneError, StageError
from offline_packing.measure.measure import measure
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from tests.helpers.command import Command
from tests.helpers.datasets import (
    captioning_pairs,
    config_file,
    make_config,
    make_run,
    plan_index,
    write_planned,
)
from tests.helpers.outputs import shard_files
from tests.world import World, at


def array(index: int, first: int, last: int, count: int, step: int = 1) -> dict[str, str]:
    """Variables that slurm sets in a task of an array, and in every batch script."""
    return {
        "SLURM_ARRAY_JOB_ID": "101",
        "SLURM_ARRAY_TASK_ID": str(index),
        "SLURM_ARRAY_TASK_COUNT": str(count),
        "SLURM_ARRAY_TASK_MIN": str(first),
        "SLURM_ARRAY_TASK_MAX": str(last),
        "SLURM_ARRAY_TASK_STEP": str(step),
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
    }


def step(process: int, processes: int) -> dict[str, str]:
    """Variables that srun adds."""
    return {"SLURM_PROCID": str(process), "SLURM_STEP_NUM_TASKS": str(processes)}


def own(rank: int, world_size: int) -> dict[str, str]:
    return {"PACKING_RANK": str(rank), "PACKING_WORLD_SIZE": str(world_size)}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (array(3, 0, 7, 8), (3, 8)),  # --array=0-7, also with %2
        (array(1, 1, 8, 8), (0, 8)),  # --array=1-8
        (array(8, 1, 8, 8), (7, 8)),
        (array(5, 1, 7, 4, step=2), (2, 4)),  # --array=1-7:2
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"}, (3, 8)),
        # A part of an array that is submitted again takes all that is left:
        (array(5, 5, 5, 1), (0, 1)),
        (array(6, 5, 6, 2), (1, 2)),
        (step(2, 4), (2, 4)),  # srun --ntasks=4
        (array(3, 0, 7, 8) | step(0, 1), (3, 8)),  # srun in each array task
        (array(3, 0, 7, 8) | step(1, 2), (7, 16)),
        (own(5, 8), (5, 8)),
        (own(5, 8) | array(5, 5, 5, 1), (5, 8)),
        # No rank:
        ({}, None),
        ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "1"}, None),
        ({"SLURM_ARRAY_TASK_ID": "5"}, None),
        (array(7, 3, 7, 2), None),  # --array=3,7
        (array(4, 1, 7, 4, step=2), None),
        (array(0, 0, 0, 1, step=0), None),
        (own(-1, 2), None),
        ({"PACKING_RANK": "1"}, None),
        (step(4, 4), None),
        # A batch script that asks for tasks and starts none is a single process:
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
    ],
)
def test_rank(environment: dict[str, str], expected: tuple[int, int] | None) -> None:
    if expected is not None:
        assert find_rank(environment) == expected
        return
    with pytest.raises(ConfigError, match="PACKING_RANK and PACKING_WORLD_SIZE"):
        find_rank(environment)


def rank_engine(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> SlurmEngine:
    monkeypatch.setenv("PACKING_RANK", str(rank))
    monkeypatch.setenv("PACKING_WORLD_SIZE", str(world_size))
    return SlurmEngine(0)


def test_array_gives_the_bytes_of_one_process(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order; what a missing rank leaves, the run that completes a stage does."""
    alone = world.run("captioning")
    last = at(alone, tmp_path / "array")

    def on_ranks(verb: Callable[[Run], object]) -> int:
        """Number of ranks that ended with tasks left to others."""
        left = 0
        for rank in (2, 0):
            run = replace(last, engine=rank_engine(monkeypatch, rank, 3))
            with run.workspace.lock(shared=True):
                try:
                    verb(run)
                except ShareDoneError:
                    left += 1
        return left

    assert on_ranks(measure) == 2
    measure(last)
    plan_index(last)
    assert on_ranks(write_planned) == 2
    assert not last.workspace.manifest.exists()
    write_planned(last)
    assert shard_files(last) == shard_files(alone)
    engines = [rank_engine(monkeypatch, rank, 2) for rank in (0, 1)]
    found = [verify(replace(last, engine=engine), deep=True) for engine in engines]
    assert all(result.ok for result in found)
    assert sum(result.num_samples for result in found) == 40
    assert min(result.num_samples for result in found) > 0


def test_ranks_share_the_lock_with_each_other_only(tmp_path: Path) -> None:
    workspace = make_run(tmp_path / "data", tmp_path / "out").workspace
    refused = pytest.raises(StageError, match="another run is working on")
    with workspace.lock(shared=True), workspace.lock(shared=True), refused, workspace.lock():
        pytest.fail("the lock was taken")
    with workspace.lock(), refused, workspace.lock(shared=True):
        pytest.fail("the lock was taken")


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """A rank that has done its share exits with 0; what ranks cannot share is refused."""
    engine = {"name": "slurm", "workers": 0, "samples_per_part": 4}
    data = captioning_pairs(tmp_path / "data", 12)
    path = config_file(tmp_path / "a.yaml", make_config(data, tmp_path / "out", engine=engine))
    rank_engine(monkeypatch, 1, 2)
    assert command("measure", path, "--quiet") == (
        0,
        "",
        "this rank's share of measure is done, 2 of 3 tasks are left to other ranks; after them, "
        "run measure with engine.name=local to complete it\n",
    )
    assert len(list((tmp_path / "out/_packing/index").glob("*.parquet"))) == 1
    code, _, error = command("plan", path, "--quiet")
    assert code == 2
    assert "run plan with engine.name=local" in error


def test_script_runs_the_stages_in_turn(tmp_path: Path) -> None:
    """launch/pack_slurm.sh with another sbatch and a command that notes its place in an array and
    its call: each job waits for the one before; arrays and others have logs of their own names."""
    for name, text in (("sbatch", FAKE_SBATCH), ("offline-packing", FAKE_COMMAND)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path / "log")}
    own |= {"LOGS": str(tmp_path / "logs"), "RANKS": "2", "AT_ONCE": "1"}
    own |= {"SBATCH_ARGS": "--partition=cpu --mem=8G"}
    arguments = ["my config.yaml", "output.key_prefix=it's", "pack.seed=1", "source.name=日\t本"]
    result, usage = (
        subprocess.run(
            ["launch/pack_slurm.sh", *given],
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            check=False,
        )
        for given in (arguments, [])
    )
    assert usage.returncode == 2
    assert result.stdout == "submitted: measure 1, plan 2, write 3, verify 4\n", result.stderr

    def call(verb: str, rank: str) -> str:
        engine = "slurm" if rank else "local"
        return "|".join([rank, verb, *arguments, f"engine.name={engine}", "--quiet", ""])

    assert (tmp_path / "log").read_text().splitlines() == [
        *(call("measure", f"{rank} of 2") for rank in (0, 1)),
        *(call(verb, "") for verb in ("measure", "plan")),
        *(call("write", f"{rank} of 2") for rank in (0, 1)),
        *(call(verb, "") for verb in ("write", "verify")),
    ]
    jobs = (tmp_path / "log.jobs").read_text().splitlines()
    assert len(jobs) == 4
    for job in jobs:
        assert "--partition=cpu --mem=8G" in job
        assert "--requeue --open-mode=append" in job
    waits = [re.findall(r"--dependency=afterok:(\d+) --kill-on-invalid-dep=yes", j) for j in jobs]
    assert waits == [[], ["1"], ["2"], ["3"]]
    arrays = [re.findall(r"--array=(\S+)", job) for job in jobs]
    assert arrays == [["0-1%1"], [], ["0-1%1"], []]
    logs = [re.findall(r"--output=\S*/(\S+)", job)[0] for job in jobs]
    assert logs == ["%x-%A_%a.txt", "%x-%j.txt"] * 2


FAKE_COMMAND = """#!/bin/sh
of=${SLURM_ARRAY_TASK_COUNT:+"$SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT"}
{ printf '%s|' "$of" "$@"; echo; } >> "$LOG"
"""
#: Notes its arguments, and runs the command of --wrap as slurm's wrapper does, once for each index
#: of --array.
FAKE_SBATCH = """#!/usr/bin/env bash
set -euo pipefail
echo "$@" >> "$LOG.jobs"
last=
for argument in "$@"; do
  case $argument in
    --array=0-*) last=${argument#--array=0-} last=${last%\\%*} ;;
  esac
done
command=${!#}
export SLURM_PROCID=0 SLURM_NTASKS=1
if [ -z "$last" ]; then
  sh -c "$command" >&2
fi
for ((rank = 0; rank <= ${last:--1}; rank++)); do
  SLURM_ARRAY_TASK_ID=$rank SLURM_ARRAY_TASK_COUNT=$((last + 1)) SLURM_ARRAY_TASK_MIN=0 \\
    SLURM_ARRAY_TASK_MAX=$last SLURM_ARRAY_TASK_STEP=1 sh -c "$command" >&2
done
echo "$(wc -l < "$LOG.jobs");cluster"
"""

"""Ranks share the tasks without talking to each other, and a last run completes the stage."""

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from offline_packing.cli import main
from offline_packing.engines.local import LocalEngine
from offline_packing.engines.slurm_array import SlurmEngine, find_rank
from offline_packing.errors import ConfigError, ShareDoneError, StageError
from offline_packing.measure import measure
from offline_packing.plan_stage import plan
from offline_packing.stage import Stage
from offline_packing.verify import verify
from offline_packing.write import write
from tests.offline_packing.datasets import captioning_pairs, make_config, make_stage, pack_all


@dataclass(frozen=True)
class Numbered:
    number: int


def number_of(task: Numbered) -> int:
    return task.number


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"}, (3, 8)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (0, 1)),
        # An array task that is itself an srun step, and one array index submitted again alone:
        (
            {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_PROCID": "0"},
            (3, 8),
        ),
        (
            {
                "PACKING_RANK": "5",
                "PACKING_WORLD_SIZE": "8",
                "SLURM_ARRAY_TASK_ID": "5",
                "SLURM_ARRAY_TASK_COUNT": "1",
            },
            (5, 8),
        ),
    ],
)
def test_rank(environment: dict[str, str], expected: tuple[int, int]) -> None:
    assert find_rank(environment) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "1"},
        {"SLURM_ARRAY_TASK_ID": "5"},
        {"PACKING_RANK": "-1", "PACKING_WORLD_SIZE": "2"},
    ],
)
def test_no_rank(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="PACKING_RANK and PACKING_WORLD_SIZE"):
        find_rank(environment)


def rank_engine(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> SlurmEngine:
    monkeypatch.setenv("PACKING_RANK", str(rank))
    monkeypatch.setenv("PACKING_WORLD_SIZE", str(world_size))
    return SlurmEngine(0)


def test_each_task_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [Numbered(i) for i in range(20)]
    done: list[int] = []
    for rank in range(3):
        results = rank_engine(monkeypatch, rank, 3).run(number_of, tasks)
        with pytest.raises(ShareDoneError, match=rf"rank {rank} of 3 .* 1\d tasks are left"):
            done.extend(iter(results))
    assert sorted(done) == list(range(20))


def test_array_gives_the_bytes_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = captioning_pairs(tmp_path / "data")
    alone = make_stage(data, tmp_path / "alone")
    pack_all(alone)
    config = make_config(data, tmp_path / "array")
    last = Stage(config, LocalEngine(0))

    def on_all_ranks(verb: Callable[[Stage], object]) -> int:
        """How many ranks ended with tasks left to others."""
        left = 0
        for rank in (2, 0, 1):
            stage = Stage(config, rank_engine(monkeypatch, rank, 3))
            with stage.workspace.lock(shared=True):
                try:
                    verb(stage)
                except ShareDoneError:
                    left += 1
        return left

    assert on_all_ranks(measure) == 2
    measure(last)
    plan(last)
    assert on_all_ranks(write) == 3
    assert not last.workspace.manifest.exists()
    write(last)
    for path in (*alone.workspace.root.glob("*.tar*"), alone.workspace.manifest):
        assert (last.workspace.root / path.name).read_bytes() == path.read_bytes(), path.name
    found = [verify(Stage(config, rank_engine(monkeypatch, rank, 2)), deep=True) for rank in (0, 1)]
    assert all(result.ok for result in found)
    assert sum(result.num_samples for result in found) == 40
    assert min(result.num_samples for result in found) > 0


def test_ranks_share_the_lock_with_each_other_only(tmp_path: Path) -> None:
    workspace = make_stage(tmp_path, tmp_path / "out").workspace
    refused = pytest.raises(StageError, match="another run is working on")
    with workspace.lock(shared=True), workspace.lock(shared=True), refused, workspace.lock():
        pytest.fail("the lock was taken")
    with workspace.lock(), refused, workspace.lock(shared=True):
        pytest.fail("the lock was taken")


def test_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that has done its share exits with 0; what ranks cannot share is refused."""
    captioning_pairs(tmp_path / "data", 12)
    path = tmp_path / "config.yaml"
    path.write_text(
        f"source: {{format: pairs, path: {tmp_path}/data, task: captioning}}\n"
        f"output: {{path: {tmp_path}/out}}\n"
        "engine: {name: slurm, workers: 0, samples_per_part: 4}\n"
    )
    rank_engine(monkeypatch, 1, 2)

    def status_of(verb: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["offline-packing", verb, str(path), "--quiet"])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, capsys.readouterr().err

    assert status_of("measure") == (
        0,
        "rank 1 of 2 has done its share; 2 tasks are left to other ranks; run again when all are "
        "done\n",
    )
    assert len(list((tmp_path / "out/_packing/index").glob("*.parquet"))) == 1
    code, error = status_of("plan")
    assert code == 2
    assert "run plan with engine.name=local" in error


def test_script_runs_the_stages_in_turn(tmp_path: Path) -> None:
    """The script with an sbatch that runs each job at once, and a command that says its call."""
    log = tmp_path / "log"
    programs = {
        "sbatch": FAKE_SBATCH,
        "offline-packing": '#!/bin/sh\necho "$PACKING_RANK/$PACKING_WORLD_SIZE $*" >> "$LOG"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    result = subprocess.run(
        ["launch/pack_slurm.sh", "my config.yaml", "pack.seed=1"],
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "RANKS": "2",
            "LOGS": str(tmp_path / "logs"),
            "LOG": str(log),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"submitted: measure \d+, plan \d+, write \d+, verify \d+\n", result.stdout)
    config = "my config.yaml pack.seed=1 engine.name="
    assert [line.rstrip() for line in log.read_text().splitlines()] == [
        *(f"{rank}/2 measure {config}slurm --quiet" for rank in (0, 1)),
        *(f"/ {verb} {config}local --quiet" for verb in ("measure", "plan")),
        *(f"{rank}/2 write {config}slurm --quiet" for rank in (0, 1)),
        *(f"/ {verb} {config}local --quiet" for verb in ("write", "verify")),
    ]
    usage = subprocess.run(
        ["launch/pack_slurm.sh"], capture_output=True, text=True, check=False, cwd=Path.cwd()
    )
    assert usage.returncode == 2


#: Runs the command of --wrap, once for each index of --array.
FAKE_SBATCH = """#!/usr/bin/env bash
set -euo pipefail
last=0
for argument in "$@"; do
  case $argument in
    --array=0-*) last=${argument#--array=0-} ;;
  esac
done
command=${!#}
for ((rank = 0; rank <= last; rank++)); do
  SLURM_ARRAY_TASK_ID=$rank bash -c "$command" >&2
done
echo $$
"""

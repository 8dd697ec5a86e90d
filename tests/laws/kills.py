"""Scenarios that are packed already, and kills of a run in this process, at an advance of a task or
in front of a file."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offline_packing.engines.local import Advance, LocalEngine
from offline_packing.runs.run import Run
from offline_packing.verify.verdict import check
from task_encoders.storage.remote_paths import RemotePath
from tests.helpers.datasets import pack_all
from tests.helpers.formats import WRITERS
from tests.scenarios import FAMILIES_OF_SHORT, SCENARIOS
from tests.world import World

#: Scenarios for which workers are spawned and killed.
EIGHT = ("bmr", "refer", "cut", "trees", "parquet", "repeat", "videos", "qwen3_vl")
#: Scenarios of the samples of "bmr", of which the plan makes other packs: what measures and reads
#: "bmr" does the same for them.
PLANS = ("one kind", "locality", "few samples", "padding")
#: Scenarios of the samples of "jsonl" in other formats: once packed, they are the same.
FORMATS = tuple({*WRITERS} - {"jsonl", "pairs"})
#: Scenarios of such samples of which some are left out or repeated.
DRAWN = ("skip", "repeat", "weights", "mixture")
#: Scenarios of other families, whose files are made as those of "tools".
FAMILIES = tuple(FAMILIES_OF_SHORT)
#: A stage's function, its task, and the advance of that task.
Moment = tuple[str, str, int]
#: The functions of the stages that advance, each with the files that are written when the stage is
#: complete. Planning has no tasks.
STAGES = {
    "measure_part": ("/_packing/copies/measure.json", "/_packing/measure.json"),
    "": ("/_packing/copies/plan.json", "/_packing/plan.json"),
    "write_shard": ("/manifest.json", "/_packing/copies/write.json", "/_packing/write.json"),
    "verify_shard": ("/_packing/verify.json",),
}


def sample_of(names: Iterable[str], *left_out: str) -> list[Any]:
    """Return scenarios for a law, of which some are tested only where every case is asked for."""
    every = pytest.mark.exhaustive
    return [pytest.param(name, marks=[every] * (name in left_out)) for name in names]


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it, nothing is saved."""


class Mortal(LocalEngine):
    """Runs tasks in this process, notes every advance, and is killed at the one given."""

    def __init__(self, fatal: Moment | None = None) -> None:
        super().__init__(0)
        self.fatal = fatal
        self.moments: list[Moment] = []

    def run(
        self, function: Callable[[Any], Any], tasks: Iterable[Any], listener: Advance | None = None
    ) -> Iterator[Any]:
        for task in tasks:
            count = 0

            def advance(more: int, task: str = _name_of(task)) -> None:
                nonlocal count
                count += 1
                self.moments.append((function.__name__, task, count))
                if self.moments[-1] == self.fatal:
                    raise Killed

            yield from super().run(function, [task], advance)


def _name_of(task: Any) -> str:
    shard = getattr(task, "shard", task)  # of write, or of verify, whose task holds that of write
    return str(getattr(getattr(shard, "shard", shard), "name", getattr(task, "number", "")))


def make(run: Run) -> None:
    """Pack and verify, as the command does."""
    with run.workspace.lock():
        pack_all(run)
        assert check(run).ok


def finished_run(world: World, name: str) -> tuple[Run, list[Moment]]:
    """Return a scenario's local output, packed and verified in one go, and its moments."""
    scenario = SCENARIOS[name]

    def pack(folder: Path) -> list[Moment]:
        engine = Mortal()
        make(replace(scenario.run(world, folder), engine=engine))
        return engine.moments

    folder, moments = world.made(f"scenarios/{name}", pack)
    return scenario.run(world, folder), [tuple(moment) for moment in moments]


def fatal_moments(moments: Iterable[Moment], function: str) -> list[Moment]:
    """Return the first, the middle and the last advance of a stage, each once."""
    own = [moment for moment in moments if moment[0] == function]
    return list(dict.fromkeys(own[i] for i in (0, len(own) // 2, -1) if own))


@contextmanager
def killed_before(name: str) -> Iterator[None]:
    """Kill the process where a file whose path ends in this name would appear."""
    replace, request = os.replace, RemotePath._request

    def replaced(path: Any, target: Any) -> None:
        if str(target).endswith(name):
            raise Killed
        replace(path, target)

    def requested(path: RemotePath, done: str, *rest: Any, **options: Any) -> Any:
        if done == "written" and str(path).endswith(name):
            raise Killed
        return request(path, done, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replaced)
        patch.setattr(RemotePath, "_request", requested)
        yield

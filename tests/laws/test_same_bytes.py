"""The same source, configuration and seed give the same bytes: for parts of any size, as any
number of workers would have, however often a run was killed, and wherever the output lies."""

import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from offline_packing.engines.local import LocalEngine
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run
from tests.helpers.datasets import pack_all
from tests.helpers.outputs import files_of
from tests.laws.kills import (
    EIGHT,
    PLANS,
    STAGES,
    Killed,
    Moment,
    Mortal,
    fatal_moments,
    killed_before,
    make,
    sample_of,
)
from tests.scenarios import SCENARIOS, SLOW, Scenario
from tests.world import World, at
from tools import kill_test


def trained_files(root: Path) -> dict[str, bytes]:
    """Return the files that a trainer reads, and the plan's arrays: all that does not know of
    parts."""
    files = files_of(root)
    apart = [name for name in files if name.startswith("_packing/") and not name.endswith(".npy")]
    return {name: data for name, data in files.items() if name not in apart}


@pytest.mark.parametrize("name", sample_of(SCENARIOS, SLOW, *PLANS))
def test_parts_of_another_size(scenario: Scenario, world: World, whole: Run, place: str) -> None:
    pack_all(other := scenario.run(world, place, engine={"samples_per_part": 4}))
    found, expected = trained_files(other.workspace.root), trained_files(whole.workspace.root)
    assert len(found) > 4
    assert found == expected


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", sample_of(SCENARIOS, SLOW))
def test_killed_at_every_stage(
    name: str, every: bool, finished: tuple[Run, list[Moment]], place: str
) -> None:
    """Killed at the first, the middle and the last advance of each stage, and before the files that
    say that the stage is complete, or at one of these moments; each run goes on where the last one
    was killed."""
    (whole, moments), dice = finished, random.Random(name)
    packs = sum(require_manifest(whole.workspace.root).counts.packs.values())
    functions = Counter(function for function, *_ in moments)  # the bars advance by packs
    assert functions["write_shard"] == functions["verify_shard"] == packs
    run = at(whole, place)
    for function, files in STAGES.items():
        fatal: list[Moment | str] = [*fatal_moments(moments, function), *files]
        for moment in fatal if every else [dice.choice(fatal)]:
            is_file = isinstance(moment, str)
            dying = run if is_file else replace(run, engine=Mortal(moment))
            with killed_before(moment) if is_file else nullcontext(), pytest.raises(Killed):
                make(dying)
    make(run)
    assert files_of(run.workspace.root) == files_of(whole.workspace.root)


@pytest.fixture(scope="module")
def workers():  # type: ignore[no-untyped-def]
    with LocalEngine(2) as engine:
        yield engine


@pytest.mark.parametrize("name", EIGHT)
def test_spawned_workers(whole: Run, place: str, workers: LocalEngine) -> None:
    run = replace(at(whole, place), engine=workers)
    make(run)
    assert files_of(run.workspace.root) == files_of(whole.workspace.root)


@pytest.mark.parametrize("name", sample_of(EIGHT, *EIGHT[3:]))
def test_real_kills(name: str, whole: Run, place: str) -> None:
    """Killed with its workers at some moments of a run that takes about a second."""
    run, dice = at(whole, place), random.Random(name)

    def pack() -> None:
        with LocalEngine(2) as engine:
            make(replace(run, engine=engine))

    for _ in range(2):
        kill_test.kill_after(kill_test.start(pack), dice.uniform(0.1, 2))
    make(run)
    assert files_of(run.workspace.root) == files_of(whole.workspace.root)

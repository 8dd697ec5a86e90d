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
    FAMILIES,
    FORMATS,
    PLANS,
    STAGES,
    Killed,
    Moment,
    Mortal,
    fatal_moments,
    finished_run,
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


@pytest.mark.parametrize("name", sample_of(SCENARIOS, SLOW, *PLANS, *FAMILIES))
def test_parts_of_another_size(scenario: Scenario, world: World, whole: Run, place: str) -> None:
    """All samples in a part, or as many as the source's files allow."""
    pack_all(other := scenario.run(world, place, engine={"samples_per_part": 1000}))
    found, expected = trained_files(other.workspace.root), trained_files(whole.workspace.root)
    assert len(found) > 4
    assert found == expected


#: Scenarios whose files are made as those of others.
ALIKE = (SLOW, *PLANS, *FORMATS, *FAMILIES)


@pytest.mark.parametrize(
    ("name", "every"),
    [
        *((name, False) for name in SCENARIOS if name not in ALIKE),
        *(pytest.param(n, n not in ALIKE, marks=pytest.mark.exhaustive) for n in SCENARIOS),
    ],
)
def test_killed_at_every_stage(name: str, every: bool, world: World, place: str) -> None:
    """Killed at the first, the middle and the last advance of each stage, and before the files that
    say that the stage is complete, or at one of these moments; each run goes on where the last one
    was killed."""
    (whole, moments), dice = finished_run(world, name), random.Random(name)
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


@pytest.mark.parametrize(
    "names", [EIGHT[:-1], pytest.param(EIGHT[-1:], marks=pytest.mark.exhaustive)]
)
def test_spawned_workers(names: tuple[str, ...], world: World, tmp_path: Path) -> None:
    """The same workers for all of them: each imports for seconds; for the last, transformers."""
    with LocalEngine(2) as engine:
        for name in names:
            whole, _ = finished_run(world, name)
            make(run := replace(at(whole, tmp_path / name), engine=engine))
            assert files_of(run.workspace.root) == files_of(whole.workspace.root), name


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

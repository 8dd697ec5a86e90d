"""Every sample is packed once or set aside with a reason, as its source has it; and what is not as
it was written is found, and made again."""

import random
from collections import Counter
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run
from offline_packing.verify.verify import discard, verify
from tests.helpers.datasets import index_rows, pack_all
from tests.helpers.outputs import cut, files_of, flip
from tests.laws.kills import FAMILIES, PLANS, sample_of
from tests.scenarios import SCENARIOS, SLOW, Scenario, packs_of
from tests.world import copy_of


def set_aside(run: Run) -> list[dict[str, Any]]:
    """Return the samples set aside while measuring and while planning."""
    tables = [*run.workspace.set_aside.glob("*.parquet"), run.workspace.plan / "set_aside.parquet"]
    return [row for table in tables if table.exists() for row in pq.read_table(table).to_pylist()]


def test_each_sample_is_packed_once_or_set_aside(scenario: Scenario, whole: Run) -> None:
    keys = [key for _, pack in packs_of(whole) for key in pack.keys]
    aside = set_aside(whole)
    assert Counter(row["reason"] for row in aside) == scenario.expected.set_aside
    assert len({*keys}) == len(keys) == scenario.expected.packed
    counts = require_manifest(whole.workspace.root).counts
    assert counts.samples == counts.packed + sum(counts.set_aside.values())
    assert (counts.packed, counts.set_aside) == (len(keys), scenario.expected.set_aside)
    # Copies of a sample have its key and a number.
    measured = {row["key"] for row in index_rows(whole)}
    assert {key.partition("#")[0] for key in keys} <= measured
    assert measured <= {*(key.partition("#")[0] for key in keys), *(row["key"] for row in aside)}
    scenario.expected.check(whole)


def test_verify_finds_what_was_measured(scenario: Scenario, whole: Run, place: str) -> None:
    found = verify(copy_of(whole, place), deep=True)
    assert found.problems == []
    assert found.num_samples == scenario.expected.packed
    assert found.num_set_aside == sum(scenario.expected.set_aside.values())
    assert found.num_tokens > 0


def fold(path: Path) -> None:
    """Put a folder in the file's place."""
    path.unlink()
    (path / "inner").mkdir(parents=True)


EDITS: tuple[Callable[[Path], None], ...] = (flip, cut, methodcaller("unlink"), fold)


@pytest.mark.parametrize("name", sample_of(SCENARIOS, SLOW, *PLANS, *FAMILIES))
def test_damage_is_found_and_repaired(name: str, whole: Run, place: str) -> None:
    """Of one file, or of three at once, where the first may have recorded what the others were."""
    run, dice = copy_of(whole, place), random.Random(name)
    root, expected, count = run.workspace.root, files_of(whole.workspace.root), dice.choice((1, 3))
    # A database is compared by its rows.
    names = sorted(one for one in expected if not one.endswith(".sqlite"))
    damaged = dict(zip(dice.sample(names, count), dice.sample(EDITS, count), strict=True))
    for file, edit in damaged.items():
        edit(root / file)
    is_complete = (root / "manifest.json").exists()  # without it nothing was
    assert not (is_complete and verify(run).ok), damaged
    found = discard(run)
    assert not is_complete or any(f" {file} " in found for file in damaged), damaged
    pack_all(run)
    assert files_of(root) == expected, damaged

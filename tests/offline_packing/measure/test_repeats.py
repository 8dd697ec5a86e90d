"""Repeats and weights: how often each sample is used, and that nothing else changes."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline_packing.errors import StageError
from offline_packing.measure import repeats as blend
from offline_packing.measure.measure import measure
from offline_packing.measure.repeats import copy_key, num_copies, repeats_of_weights
from tests.helpers import accounting, formats
from tests.helpers.datasets import index_rows, make_run, outcomes, pack_all


@given(
    sizes=st.lists(st.tuples(st.floats(0.01, 100), st.integers(1, 10**6)), min_size=1, max_size=6)
)
def test_weights_are_shares_and_nothing_is_left_out(sizes: list[tuple[float, int]]) -> None:
    weights, counts = zip(*sizes, strict=True)
    repeats = repeats_of_weights(weights, counts)
    assert min(repeats) == pytest.approx(1)
    used = [repeat * count for repeat, count in zip(repeats, counts, strict=True)]
    shares = [weight / sum(weights) for weight in weights]
    assert [one / sum(used) for one in used] == pytest.approx(shares)


def test_weights_example() -> None:
    assert repeats_of_weights([1, 3], [100, 100]) == [1, 3]
    assert repeats_of_weights([1, 1], [0, 10]) == [1, 1]


@pytest.mark.parametrize("repeat", [0.25, 1, 1.5, 3])
def test_copies(repeat: float) -> None:
    copies = [num_copies(f"key{i}", repeat, seed=1) for i in range(4000)]
    assert set(copies) <= {int(repeat), int(repeat) + 1}
    assert sum(copies) / len(copies) == pytest.approx(repeat, abs=0.04)
    assert copies == [num_copies(f"key{i}", repeat, seed=1) for i in range(4000)]
    if repeat % 1:
        assert copies != [num_copies(f"key{i}", repeat, seed=2) for i in range(4000)]


def sources(root: Path, **second: Any) -> list[dict[str, Any]]:
    first = formats.jsonl(root / "first", formats.draw_samples(6))
    other = formats.webdataset(root / "other", formats.draw_samples(4, seed=1))
    return [
        {**first, "name": "first", "task": "bmr"},
        {**other, "name": "other", "task": "bmr", **second},
    ]


def test_repeated_samples_are_packed_as_often(tmp_path: Path) -> None:
    run = make_run(sources(tmp_path, repeat=2), tmp_path / "out")
    counts = pack_all(run)["counts"]
    assert counts["packed"] == 6 + 2 * 4
    copied = Counter(row["key"].partition("#")[0] for row in index_rows(run))
    assert sorted(copied.values()) == [1] * 6 + [2] * 4
    assert copy_key("other/shard-000/s0000", 1) in {row["key"] for row in index_rows(run)}


def test_samples_that_are_not_drawn_are_counted(tmp_path: Path) -> None:
    found = outcomes(make_run(sources(tmp_path, repeat=0.5), tmp_path / "out"))
    drawn = Counter(outcome for key, outcome in found.items() if key.startswith("other/"))
    assert drawn["ok"] + drawn["not_drawn"] == 4
    assert 0 < drawn["ok"] < 4
    assert [outcome for key, outcome in found.items() if key.startswith("first/")] == ["ok"] * 6


def test_weights_count_what_a_scan_cannot(tmp_path: Path) -> None:
    first, other = sources(tmp_path)
    run = make_run([{**first, "weight": 1}, {**other, "weight": 2}], tmp_path / "out")
    measure(run)
    used = Counter(row["key"].partition("/")[0] for row in index_rows(run))
    assert used == {"first": 6, "other": 12}  # 4 samples in tars, three times


def test_another_repeat_is_refused(tmp_path: Path) -> None:
    measure(make_run(sources(tmp_path), tmp_path / "out"))
    with pytest.raises(StageError, match=r"source\.1\.repeat was not set, is '2\.0'"):
        measure(make_run(sources(tmp_path, repeat=2), tmp_path / "out"))


@pytest.mark.parametrize("name", ["jsonl", "jsonl_gz", "json_array", "webdataset", "webdataset_gz"])
def test_a_dry_run_estimates_from_the_beginning_of_files(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = formats.draw_samples(60)
    source = accounting.open_one(formats.WRITERS[name](tmp_path, samples), tmp_path)
    assert blend.estimate_records(source, source.unread_parts()) == (60, True)
    monkeypatch.setattr(blend, "_SAMPLED_RECORDS", 10)
    monkeypatch.setattr(blend, "_SAMPLED_PARTS", 1)
    count, is_exact = blend.estimate_records(source, source.unread_parts())
    assert not is_exact
    # Files this small are read in one block, so that only the order of magnitude can be right.
    assert 10 <= count <= 120


def test_counts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights need exact numbers; the files are read for them once, also when measure is killed."""
    source = {**formats.webdataset_gz(tmp_path / "a", formats.draw_samples(7)), "task": "bmr"}
    pairs = {**formats.pairs(tmp_path / "b", formats.draw_samples(5)), "task": "bmr"}
    blended = [{**source, "weight": 1, "name": "a"}, {**pairs, "weight": 1, "name": "b"}]
    run = make_run(blended, tmp_path / "out")
    counted: list[object] = []
    count = blend._count
    monkeypatch.setattr(blend, "_count", lambda task: counted.append(task) or count(task))
    measured = measure(run).info
    assert len(counted) == 2
    run.workspace.index_info.unlink()
    assert measure(run).info == measured
    assert len(counted) == 2

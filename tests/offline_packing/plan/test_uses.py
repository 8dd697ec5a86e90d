"""Repeats and weights: how often each sample is used, in one split and never twice in a pack."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline_packing.config.packing import parse_config
from offline_packing.errors import StageError
from offline_packing.index.table import key_hash
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import make_plan
from offline_packing.plan.uses import choose_uses, count_uses, source_repeats
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run
from offline_packing.sources.options import MAX_REPEAT
from offline_packing.verify.verify import verify
from tests.helpers import formats
from tests.helpers.datasets import (
    captioning_pairs,
    index_rows,
    make_run,
    pack_all,
    plan_index,
    plan_summary,
)
from tests.helpers.outputs import packs_of, set_aside_in_plan

HASHES = np.array([key_hash(0, f"key{i}") for i in range(4000)], np.uint64)
SPLIT = {"split": {"train": 0.8, "val": 0.2}}


def uses_of(
    options: list[dict[str, float]],
    sizes: list[int],
    hashes: np.ndarray = HASHES,
    *,
    tokens: int = 10,
    seed: int = 1,
) -> np.ndarray:
    """Uses of samples of equal length, so many of each source."""
    named = [
        {"format": "pairs", "path": f"data/{i}", "task": "vqa", **option}
        for i, option in enumerate(options)
    ]
    pack = {"seq_length": 10, "seed": seed}
    config = parse_config({"source": named, "pack": pack, "output": {"path": "out"}})
    ids = np.repeat(np.arange(len(sizes)), sizes)
    repeats = source_repeats(config, ids, np.full(len(ids), tokens))
    return count_uses(repeats[ids], hashes[: len(ids)], seed)


@given(sources=st.lists(st.tuples(st.floats(1, 9), st.integers(200, 600)), min_size=1, max_size=6))
def test_weights_are_shares_and_nothing_is_left_out(sources: list[tuple[float, int]]) -> None:
    weights, sizes = map(list, zip(*sources, strict=True))
    uses = uses_of([{"weight": weight} for weight in weights], sizes)
    assert uses.min() == 1
    used = np.bincount(np.repeat(np.arange(len(sizes)), sizes), uses)
    shares = np.array(weights) / sum(weights)
    assert used / used.sum() == pytest.approx(shares, rel=0.1)


def test_weights_example() -> None:
    assert uses_of([{"weight": 1}, {"weight": 3}], [2, 2]).tolist() == [1, 1, 3, 3]
    assert uses_of([{"weight": 1}, {"weight": 1}], [0, 3]).tolist() == [1, 1, 1]
    too_long = uses_of([{"weight": 1}, {"weight": 3}], [2, 1], tokens=11)
    assert too_long.tolist() == [1, 1, 1]  # they fit no pack


@pytest.mark.parametrize("repeat", [0.25, 1, 1.5, 3])
def test_uses_follow_from_key_and_seed(repeat: float) -> None:
    arguments = [{"repeat": repeat}], [len(HASHES)]
    uses = uses_of(*arguments)
    assert set(uses.tolist()) <= {int(repeat), int(repeat) + 1}
    assert uses.mean() == pytest.approx(repeat, abs=0.04)
    assert np.array_equal(uses[::-1], uses_of(*arguments, HASHES[::-1]))
    if repeat % 1:
        assert not np.array_equal(uses, uses_of(*arguments, seed=2))


def sources(root: Path, **second: Any) -> list[dict[str, Any]]:
    first = formats.jsonl(root / "first", formats.draw_samples(6))
    other = formats.webdataset(root / "other", formats.draw_samples(4, seed=1))
    return [
        {**first, "name": "first", "task": "bmr"},
        {**other, "name": "other", "task": "bmr", **second},
    ]


def packed_keys(run: Run) -> Counter[str]:
    return Counter(key for _, pack in packs_of(run) for key in pack)


def test_repeated_samples_are_packed_as_often(tmp_path: Path) -> None:
    run = make_run(sources(tmp_path, repeat=2), tmp_path / "out")
    manifest = pack_all(run)
    assert manifest.counts.packed == manifest.counts.samples == 6 + 2 * 4
    assert len(index_rows(run)) == 6 + 4
    found = packed_keys(run)
    assert set(found.values()) == {1}
    assert sorted(Counter(key.partition("#")[0] for key in found).values()) == [1] * 6 + [2] * 4
    assert {"other/shard-000/s0000", "other/shard-000/s0000#2"} <= set(found)
    result = verify(run, deep=True)
    assert result.ok, result.problems
    assert result.num_samples == 14


def test_samples_that_are_not_drawn_are_counted(tmp_path: Path) -> None:
    run = make_run(sources(tmp_path, repeat=0.5), tmp_path / "out")
    counts = pack_all(run).counts
    aside = set_aside_in_plan(run)
    assert 0 < len(aside) < 4
    assert {(row["reason"], row["detail"]) for row in aside} == {("not_drawn", "repeat 0.5")}
    assert all(row["key"].startswith("other/") for row in aside)
    assert counts.packed == 10 - len(aside)
    assert verify(run).ok


def shares(run: Run, what: str) -> list[float]:
    """Share of each source in the plan, of samples or tokens."""
    samples = open_index(run)
    rows = PackPlan.load(run.workspace.plan).sample_ids
    amounts = samples.array("num_tokens")[rows] if what == "tokens" else None
    totals = np.bincount(samples.array("source_id")[rows], amounts)
    return (totals / totals.sum()).tolist()


def test_the_summary_shows_what_weights_make_of_sources(tmp_path: Path) -> None:
    captioning_pairs(tmp_path / "a", 20)
    captioning_pairs(tmp_path / "b", 60, seed=1)
    parts = [
        {"format": "pairs", "path": str(tmp_path / name), "task": "captioning"} for name in "ab"
    ]
    measure(make_run(parts, tmp_path / "out"))
    blend = [{**part, "weight": weight} for part, weight in zip(parts, (4, 1), strict=True)]
    run = make_run(blend, tmp_path / "out")
    written = run.workspace.index_info.stat().st_mtime_ns
    measure(run)
    assert run.workspace.index_info.stat().st_mtime_ns == written  # it is not measured again
    lines = plan_summary(run).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("source  "))
    assert " ".join(lines[start].split()) == "source samples times used tokens share bytes"
    measured = index_rows(run)
    ids = PackPlan.load(run.workspace.plan).sample_ids.tolist()
    for name, line in zip(("a", "b"), lines[start + 1 :], strict=False):
        shown, samples, times_used, tokens, share, num_bytes = line.split()
        rows = [row for row in measured if row["key"].startswith(f"{name}/")]
        used = [measured[i] for i in ids if measured[i]["key"].startswith(f"{name}/")]
        assert (shown, int(samples)) == (name, len(rows))
        assert float(times_used) == pytest.approx(len(used) / len(rows), abs=0.005)
        assert int(tokens.replace(",", "")) == sum(row["num_tokens"] for row in used)
        assert float(share[:-1]) == pytest.approx({"a": 80, "b": 20}[name], abs=1)
        assert int(num_bytes.replace(",", "")) == sum(
            row["json"]["size"] + sum(medium["size"] for medium in row["media"]) for row in used
        )


def test_weights_that_ask_for_too_many_copies(tmp_path: Path) -> None:
    first, other = sources(tmp_path)
    run = make_run([{**first, "weight": 1}, {**other, "weight": 1e6}], tmp_path / "out")
    measure(run)
    with pytest.raises(StageError, match=f"at most {MAX_REPEAT:,} are made; lower its weight"):
        plan_index(run)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "pack",
    [
        {},
        {"assignment": "locality"},
        {"strategy": "sequential"},
        {"strategy": "hash_bucket"},
        {"order": {"num_ranks": 2}},
        {"homogeneous": True, "max_samples": 5},
    ],
    ids=str,
)
def test_a_sample_is_in_one_split_and_once_in_a_pack(
    blend: Path, seed: int, pack: dict[str, Any]
) -> None:
    parts = [
        {"format": "pairs", "path": str(blend / name), "task": "captioning", "repeat": repeat}
        for name, repeat in (("a", 2.5), ("b", 4))
    ]
    run = make_run(
        parts,
        blend / "out",
        pack={"seq_length": 512, "seed": seed, **pack},
        output={"path": str(blend / "out"), "packs_per_shard": 20, **SPLIT},
    )
    measure(run)
    packs = make_plan(run, open_index(run)).packs
    assert list(packs.info.splits) == ["train", "val"]
    assert sum(packs.info.splits.values()) == packs.num_packs
    members = [packs.pack(i) for i in range(packs.num_packs)]
    assert all(len(np.unique(pack)) == len(pack) for pack in members)
    end = packs.info.splits["train"]
    train, val = np.concatenate(members[:end]), np.concatenate(members[end:])
    assert not set(train) & set(val)
    assert len(set(train) | set(val)) == 70
    assert len(packs.sample_ids) == 70 + packs.info.num_copies > 150
    assert 0.1 < len(val) / len(packs.sample_ids) < 0.3


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of captions."""
    root = tmp_path_factory.mktemp("blend")
    captioning_pairs(root / "a", 40)
    captioning_pairs(root / "b", 30, seed=1)
    return root


@pytest.mark.parametrize(("weight", "seed"), [(1, 3), (MAX_REPEAT * 0.8, 1)])
def test_shares_hold_in_each_split(
    blend: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, weight: float, seed: int
) -> None:
    """A split that would need too many copies has the repeats of the first one."""
    parts = [
        {"format": "pairs", "path": str(blend / name), "task": "captioning", "weight": one}
        for name, one in (("a", weight), ("b", 1))
    ]
    output = {"split": {"train": 0.8, "val": 0.2}, "split_seed": seed}
    run = make_run(parts, tmp_path / "out", output=output)
    measure(run)
    samples = open_index(run)
    sources, tokens = samples.array("source_id"), samples.array("num_tokens")
    times, shares = [], []
    for ids in choose_uses(run.config, samples, np.arange(70)).ids.values():
        held = np.bincount(sources[ids], tokens[ids])
        shares.append(held[0] / held.sum())
        times.append(np.bincount(sources[ids])[0] / len(np.unique(ids[sources[ids] == 0])))
    said = "split val keeps the first split's repeats: the weights ask for 1,212 copies"
    if weight == 1:
        assert shares == pytest.approx([0.5, 0.5], abs=0.03)
    else:
        assert times[1] == pytest.approx(times[0], abs=1)
    assert (said in caplog.text) == (weight > 1)

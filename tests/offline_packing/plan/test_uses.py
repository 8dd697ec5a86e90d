"""Repeats and weights: how often each sample is used, in one split and never twice in a pack."""

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
from offline_packing.plan.plan import make_plan, preview_plan
from offline_packing.plan.uses import choose_uses, count_uses, source_repeats
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run
from offline_packing.sources.options import MAX_REPEAT
from tests.helpers.datasets import captioning_pairs, index_rows, make_run
from tests.world import Source, World, copy_of

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


def two_folders(folder: Path) -> Source:
    """Write captions of two sources."""
    named = {"format": "pairs", "task": "captioning"}
    paths = captioning_pairs(folder / "a", 40), captioning_pairs(folder / "b", 30, seed=1)
    return [{**named, "path": str(path)} for path in paths]


@pytest.fixture(scope="module")
def blend(world: World) -> Run:
    """Return a finished run over both, whose index is read."""
    return world.run(two_folders, pack={"seq_length": 512})


def with_options(run: Run, *own: dict[str, float], **sections: dict[str, Any]) -> Run:
    """Return the run with options of each source, two splits and other sections."""
    pairs = zip(run.config.source, own, strict=True)
    sources = [one.model_dump(exclude_unset=True) | more for one, more in pairs]
    sections["output"] = SPLIT | sections.get("output", {})
    return make_run(sources, run.workspace.root, **sections)


def planned(run: Run) -> PackPlan:
    return make_plan(run, open_index(run)).packs


def test_the_summary_shows_what_weights_make_of_sources(blend: Run, tmp_path: Path) -> None:
    run = copy_of(with_options(blend, {"weight": 4}, {"weight": 1}), tmp_path / "out")
    written = run.workspace.index_info.stat().st_mtime_ns
    measure(run)
    assert run.workspace.index_info.stat().st_mtime_ns == written  # it is not measured again
    lines = preview_plan(run, open_index(run)).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("source  "))
    assert " ".join(lines[start].split()) == "source samples times used tokens share bytes"
    measured, ids = index_rows(run), planned(run).sample_ids.tolist()
    for name, line in zip(("a", "b"), lines[start + 1 :], strict=False):
        shown, count, times_used, tokens, share, num_bytes = line.split()
        rows = [row for row in measured if row["key"].startswith(f"{name}/")]
        used = [measured[i] for i in ids if measured[i]["key"].startswith(f"{name}/")]
        assert (shown, int(count)) == (name, len(rows))
        assert float(times_used) == pytest.approx(len(used) / len(rows), abs=0.005)
        assert int(tokens.replace(",", "")) == sum(row["num_tokens"] for row in used)
        assert float(share[:-1]) == pytest.approx({"a": 80, "b": 20}[name], abs=1)
        assert int(num_bytes.replace(",", "")) == sum(
            row["json"]["size"] + sum(medium["size"] for medium in row["media"]) for row in used
        )


def test_weights_that_ask_for_too_many_copies(blend: Run) -> None:
    with pytest.raises(StageError, match=f"at most {MAX_REPEAT:,} are made; lower its weight"):
        planned(with_options(blend, {"weight": 1}, {"weight": 1e6}))


@pytest.mark.parametrize(("weight", "seed"), [(1, 3), (MAX_REPEAT * 0.8, 1)])
def test_shares_hold_in_each_split(
    blend: Run, caplog: pytest.LogCaptureFixture, weight: float, seed: int
) -> None:
    """A split that would need too many copies has the repeats of the first one."""
    run = with_options(blend, {"weight": weight}, {"weight": 1}, output={"split_seed": seed})
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

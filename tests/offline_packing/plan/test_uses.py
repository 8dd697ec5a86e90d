"""Repeats, weights and splits: how often each sample is used, never twice in a pack, and what is in
one split only."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from offline_packing.errors import StageError
from offline_packing.index.table import Index, key_hash
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import make_plan, preview_plan
from offline_packing.plan.uses import choose_uses, draw_splits, draw_uses, source_repeats
from offline_packing.report.report import report
from offline_packing.runs.artifacts import open_index, open_plan
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run
from offline_packing.sources.options import MAX_REPEAT
from offline_packing.storage.receipts import receipt_path
from offline_packing.verify.shard import VerifyResult
from offline_packing.verify.verify import _check_apart, render_result, verify
from tests.helpers.datasets import (
    captioning_pairs,
    dialogue,
    image_bytes,
    make_config,
    make_run,
    pack_all,
    packed_run,
    plan_summary,
)
from tests.helpers.formats import lines, write_file
from tests.world import Source, World, copy_of

HASHES = np.array([key_hash(0, f"key{i}") for i in range(4000)], np.uint64)


def uses_of(
    options: list[dict[str, float]],
    sizes: list[int],
    hashes: np.ndarray = HASHES,
    *,
    tokens: int = 10,
    seed: int = 1,
) -> np.ndarray:
    """Uses of samples of equal length, so many of each source."""
    named = {"format": "pairs", "task": "vqa"}
    sources = [{**named, "path": f"{i}", **option} for i, option in enumerate(options)]
    config = make_config(sources, Path("out"), pack={"seq_length": 10, "seed": seed})
    ids = np.repeat(np.arange(len(sizes)), sizes)
    repeats = source_repeats(config, ids, np.full(len(ids), tokens))
    return draw_uses(repeats[ids], hashes[: len(ids)], seed)


@settings(max_examples=40)
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


def weighted(run: Run, *weights: float, **output: Any) -> Run:
    """Return the run with weights of its sources, and two splits."""
    pairs = zip(run.config.source, weights, strict=True)
    sources = [one.model_dump(exclude_unset=True) | {"weight": weight} for one, weight in pairs]
    output["split"] = {"train": 0.8, "val": 0.2}
    return make_run(sources, run.workspace.root, output=output)


def test_weights_need_no_new_index_and_are_shown(blend: Run, tmp_path: Path) -> None:
    run = copy_of(weighted(blend, 4, 1), tmp_path / "out")
    path = receipt_path(run.workspace.packing, "measure")
    written = path.stat().st_mtime_ns
    measure(run)
    assert path.stat().st_mtime_ns == written
    shown = preview_plan(run, open_index(run))
    found = re.findall(r"^  [ab] .*? (\d+\.\d)%", shown, re.MULTILINE)
    assert [float(share) for share in found] == pytest.approx([80, 20], abs=1)
    with pytest.raises(StageError, match=f"at most {MAX_REPEAT:,} are made; lower its weight"):
        make_plan(weighted(blend, 1, 1e6), open_index(blend))


@pytest.mark.parametrize(("weight", "seed"), [(1, 3), (MAX_REPEAT * 0.8, 1)])
def test_shares_hold_in_each_split(
    blend: Run, caplog: pytest.LogCaptureFixture, weight: float, seed: int
) -> None:
    """A split that would need too many copies has the repeats of the first one."""
    run = weighted(blend, weight, 1, split_seed=seed)
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


SHARES = {"train": 0.6, "val": 0.2, "test": 0.2}
NUM_PICTURES = 90


def records_of(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Questions about pictures, a few about two of them, and texts; two of each document."""
    rng = np.random.default_rng(seed)
    records: list[dict[str, Any]] = []
    for i in range(count):
        names = [f"{n}.jpg" for n in rng.integers(NUM_PICTURES, size=2 if i % 11 == 0 else 1)]
        text = {"question": f"What is {i}{' or so' * (i % 5)}?", "answer": f"It is {i}."}
        images = {"image": sorted(set(names))} if i % 9 else {}
        records.append({"id": f"{i}", "doc": f"doc {i // 2}", **images, **text})
    return records


def jsonl(path: Path, records: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """A source of records about pictures beside the file."""
    write_file(path, lines(records))
    return {"format": "jsonl", "path": str(path), "task": "bmr", **options}


def noise(seed: int, side: int = 56) -> bytes:
    picture = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(256, size=(side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(picture, "PNG")
    return picture.getvalue()


def two_sources(folder: Path) -> Source:
    """Write two sources over the same pictures; in the second, these are other files."""
    for source in "ab":
        for i in range(NUM_PICTURES):
            write_file(folder / source / f"{i}.jpg", image_bytes(56, 56 + i))
    return [jsonl(folder / one / "r.jsonl", records_of(90, ord(one)), name=one) for one in "ab"]


@pytest.fixture(scope="module")
def measured(world: World) -> tuple[Run, Index]:
    run = world.run(two_sources, output={"split": SHARES})
    return run, open_index(run)


def rows_of_splits(run: Run, samples: Index, seed: int = 0, split_seed: int = 0) -> dict[str, Any]:
    """Rows of the index in each split."""
    sources = [one.model_dump(exclude_unset=True) for one in run.config.source]
    output = {"split": SHARES, "split_seed": split_seed}
    other = make_run(sources, run.workspace.root, pack={"seed": seed}, output=output)
    return {**choose_uses(other.config, samples, np.arange(samples.info.num_samples)).ids}


def check_apart(samples: Index, splits: dict[str, Any]) -> None:
    """No picture, nor equal text, stands in two splits; by a loop over all samples."""
    rows = samples.table("media_hash", "sample_hash").to_pylist()
    side, shared = dict[int, str](), 0
    for split, own in splits.items():
        assert len(own)
        for row in own:
            for one in rows[row]["media_hash"] or [rows[row]["sample_hash"]]:
                shared += one in side
                assert side.setdefault(one, split) == split
    assert shared > 50


def test_seeds_and_shares(measured: tuple[Run, Index]) -> None:
    """Other splits by another split_seed, the same ones by another pack.seed; a larger share only
    takes samples from other splits."""
    found = []
    for seed in range(6):
        splits = rows_of_splits(*measured, split_seed=seed)
        check_apart(measured[1], splits)
        assert sum(map(len, splits.values())) == 180
        found.append(splits)
    assert len({frozenset(splits["val"]) for splits in found}) == 6
    means = {name: np.mean([len(splits[name]) for splits in found]) / 180 for name in SHARES}
    assert means == pytest.approx(SHARES, abs=0.08)
    again = rows_of_splits(*measured, seed=5)
    assert all(set(own) == set(found[0][name]) for name, own in again.items())
    small, large = (
        np.flatnonzero(draw_splits(measured[1], {"train": 1 - share, "val": share}, 3) == 1)
        for share in (0.1, 0.3)
    )
    assert 0 < len(small) < len(large)
    assert np.isin(small, large).all()


def test_they_are_proved_by_hash_and_told_of(measured: tuple[Run, Index], tmp_path: Path) -> None:
    run = copy_of(measured[0], tmp_path / "out")
    line = "splits          no groups, images or videos are in two of them, by all bytes\n"
    assert line in render_result(verify(run, deep=True), deep=True)
    packs = require_manifest(run.workspace.root).counts.packs
    told = re.findall(r"(\w+) +([\d.]+)% +[\d.]+% +(\d+) +(\d+)\n", plan_summary(run))
    assert {name: float(asked) / 100 for name, asked, *_ in told} == SHARES
    assert sum(int(samples) for *_, samples, _ in told) == 180
    assert {name: int(count) for name, *_, count in told} == packs


def test_pictures_here_and_in_remote_storage_are_the_same(tmp_path: Path) -> None:
    """Local pictures beside remote ones are hashed by as few bytes as those."""
    assert len(noise(0)) > 8192
    sources = []
    for name, root in (("here", ""), ("there", "file://")):
        for i in range(24):
            write_file(tmp_path / name / f"{i}.png", noise(i))
            write_file(tmp_path / name / f"{i}.json", orjson.dumps({"caption": f"{name} {i}"}))
        path = f"{root}{tmp_path}/{name}"
        sources.append({"format": "pairs", "path": path, "task": "captioning", "name": name})
    output = {"split": {"train": 0.5, "val": 0.5}}
    run = packed_run(sources, tmp_path / "out", pack={"seq_length": 128}, output=output)
    result = verify(run, deep=True)
    assert result.ok, result.problems
    assert result.num_images == 48


def test_a_group_counts_instead_of_pictures(world: World, tmp_path: Path) -> None:
    """Both sources name documents, which are the same; pictures in two splits are warned of."""
    sources: Any = world.source(two_sources)
    named = [{**one, "fields": {"group": "doc"}} for one in sources]
    run = packed_run(named, tmp_path / "out", output={"split": SHARES})
    samples = open_index(run)
    sides = [set(samples.array("group_hash")[own]) for own in rows_of_splits(run, samples).values()]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 45
    warned = [one for one in plan_summary(run).splitlines() if "are also in split train" in one]
    assert len(warned) == 2
    assert all(one.endswith("without source.fields.group they are on one side") for one in warned)
    result = verify(run, deep=True)
    assert result.ok, result.problems
    assert result.apart == "no groups, images or videos are in two of them"


@pytest.mark.parametrize("first", ["train", "val"])
def test_an_empty_split_is_warned_of(tmp_path: Path, first: str) -> None:
    """All samples show one picture, so that they are in one split."""
    records = [{"image": "0.jpg", "question": "?", "answer": f"{i}."} for i in range(9)]
    write_file(tmp_path / "0.jpg", image_bytes(56, 56))
    names = sorted(("train", "val"), key=lambda name: name != first)
    run = make_run(
        jsonl(tmp_path / "r.jsonl", records, task="vqa"),
        tmp_path / "out",
        output={"split": dict.fromkeys(names, 0.5)},
        pack={"seq_length": 128, "order": {"num_ranks": 2, "uniform": True}},
    )
    packs = pack_all(run).counts.packs
    assert set(open_plan(run).packs.info.settings["uniform"]) == {"halved", "repeated"}
    (empty,) = [name for name, count in packs.items() if not count]
    (line,) = [one for one in plan_summary(run).splitlines() if "is empty" in one]
    assert f"split {empty} is empty: " in line
    assert "set another output.split_seed, a larger share in output.split, or source" in line
    assert verify(run, deep=True).problems == []
    report(run)


def test_parts_of_a_conversation_go_by_its_pictures(tmp_path: Path) -> None:
    """Cut in two ways, or not at all: each conversation is in the same split, parts without its
    picture included; so are conversations without any."""
    said, records = ["human " * 30, "gpt " * 30] * 8, list[dict[str, Any]]()
    for i in range(30):
        write_file(tmp_path / f"{i}.png", noise(i))
        first = "<image>What is this?" if i % 3 else "Hello."
        record = {"id": f"{i}", "messages": dialogue(first, f"This is {i}.", *said)}
        records.append(record | ({"image": f"{i}.png"} if i % 3 else {}))
    source = jsonl(tmp_path / "r.jsonl", records)
    sides = []
    for seq_length in (200, 400, 2048):
        pack = {"seq_length": seq_length, "on_overlong": "split_turns"}
        samples = measure(make_run(source, tmp_path / f"{seq_length}", pack=pack))
        assert bool(samples.info.split) == (seq_length < 2048)
        splits = draw_splits(samples, {"train": 0.5, "val": 0.5}, 0).tolist()
        names = [key.partition("[")[0] for key in samples.table("key")["key"].to_pylist()]
        of_records = set(zip(names, splits, strict=True))
        assert len(of_records) == 30
        sides.append(dict(of_records))
    assert sides[0] == sides[1] == sides[2]
    assert set(sides[0].values()) == {0, 1}


def test_verify_finds_what_stands_in_two_splits() -> None:
    one, other = np.array([4, 1, 2], np.uint64), np.array([2, 3, 0], np.uint64)
    result = VerifyResult(apart="none")
    _check_apart({"train": [one], "val": [other], "test": []}, "images", result)
    assert result.problems == ["1 images are in splits train and val"]
    assert result.apart == ""

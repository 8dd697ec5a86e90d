"""output.split_by: what stands in one split only."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from offline_packing.config.packing import parse_config
from offline_packing.errors import ConfigError, StageError
from offline_packing.index.table import Index
from offline_packing.layouts.shards import splits_of_plan
from offline_packing.measure.measure import measure
from offline_packing.plan.make_plan import make_plan
from offline_packing.plan.splits import connected, deal_groups
from offline_packing.planner.strategies import STRATEGIES
from offline_packing.report.report import report
from offline_packing.runs.artifacts import open_plan
from offline_packing.runs.run import Run
from offline_packing.storage.files import read_json
from offline_packing.verify.render import render_result
from offline_packing.verify.shard import VerifyResult
from offline_packing.verify.verify import _check_apart, verify
from tests.helpers.datasets import image_bytes, make_run, pack_all, plan_index, plan_summary
from tests.helpers.formats import lines, write_file
from tests.helpers.outputs import samples_of

SHARES = {"train": 0.7, "val": 0.2, "test": 0.1}
NUM_PICTURES = 24


def records_of(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Questions about pictures, a few about two of them, and texts; two of each document."""
    rng = np.random.default_rng(seed)
    records: list[dict[str, Any]] = []
    for i in range(count):
        names = [f"{n}.jpg" for n in rng.integers(NUM_PICTURES, size=2 if i % 17 == 0 else 1)]
        text = {"question": f"What is {i}{' or so' * (i % 5)}?", "answer": f"It is {i}."}
        images = {"image": sorted(set(names))} if i % 9 else {}
        records.append({"id": f"{i}", "doc": f"doc {i // 2}", **images, **text})
    return records


def run_of(
    folder: Path, records: list[dict[str, Any]] | None = None, name: str = "out", **sections: Any
) -> Run:
    """Two sources over the same pictures; in the second, these are other files."""
    for source in "ab":
        for i in range(NUM_PICTURES):
            write_file(folder / source / f"{i}.jpg", image_bytes(56, 56 + 7 * i))
        write_file(folder / source / "r.jsonl", lines(records or records_of(90, ord(source))))
    sources = [
        {"format": "jsonl", "path": str(folder / one / "r.jsonl"), "task": "bmr", "name": one}
        | {"fields": {"group": "doc"}}
        for one in "ab"
    ]
    output = {"split": SHARES, **sections.pop("output", {})}
    return make_run(sources, folder / name, output=output, **sections)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Index]:
    run = run_of(tmp_path_factory.mktemp("splits"))
    return run, measure(run)


PACKS = [
    *({"strategy": name} for name in STRATEGIES),
    {"assignment": "balance"},
    {"assignment": "locality"},
    {"budgets": {"images": 3}},
    {"order": {"num_ranks": 2, "uniform": True}},
]


def planned(run: Run, samples: Index, **sections: dict[str, Any]) -> dict[str, list[int]]:
    """Rows of the index in each split, once for each use."""
    content = run.config.model_dump(mode="json", exclude_none=True)
    for name, own in sections.items():
        content[name] = {**content[name], **own}
    plan = make_plan(replace(run, config=parse_config(content)), samples).packs
    return {
        name: plan.sample_ids[plan.pack_offsets[own.start] : plan.pack_offsets[own.stop]].tolist()
        for name, own in splits_of_plan(plan, SHARES).items()
    }


def check_apart(samples: Index, splits: dict[str, list[int]]) -> None:
    """No picture, nor equal text, stands in two splits; by a loop over all samples."""
    rows = samples.table("media_hash", "sample_hash").to_pylist()
    side: dict[int, str] = {}
    shared = 0
    for split, own in splits.items():
        assert own
        for row in own:
            for one in rows[row]["media_hash"] or [rows[row]["sample_hash"]]:
                shared += one in side
                assert side.setdefault(one, split) == split
    assert shared > 50


@pytest.mark.parametrize("pack", PACKS, ids=str)
def test_no_picture_in_two_splits(measured: tuple[Run, Index], pack: dict[str, Any]) -> None:
    check_apart(measured[1], planned(*measured, pack=pack))


def test_ten_seeds(measured: tuple[Run, Index]) -> None:
    """Different groups, sizes within one group of what was asked; all uses on one side."""
    found = []
    for seed in range(10):
        splits = planned(*measured, pack={"seed": seed}, output={"split_by": "media"})
        check_apart(measured[1], splits)
        found.append(frozenset(splits["val"]))
        assert sum(map(len, splits.values())) == 180
        for name, share in SHARES.items():
            assert abs(len(splits[name]) - 180 * share) < 20
    assert len(set(found)) > 8


def test_packs_of_every_kind_are_proved_by_hash(tmp_path: Path) -> None:
    """Epochs of references, token packs, and by default; where samples show no picture together,
    splits are cut from the packs as ever."""
    kinds: list[dict[str, Any]] = [
        {"pack": {"epochs": 2, "seq_length": 512}, "output": {"layout": "references"}},
        {"output": {"pretokenize": True}},
    ]
    for i, kind in enumerate(kinds):
        run = run_of(tmp_path, name=f"out{i}", **kind)
        pack_all(run)
        result = verify(run, deep=True)
        assert result.ok, result.problems
        line = "splits          no images and videos stand in two of them, by all bytes\n"
        assert line in render_result(result, deep=True)
        assert "\nsplit by media          train " in plan_summary(run)
        assert "stand in split" not in plan_summary(run)
        report(run)
        shown = read_json(run.workspace.report / "report.json")["plan"]["splits"]
        assert shown["by"] == "media"
        assert [one["asked"] for one in shown["splits"]] == list(SHARES.values())
        groups = open_plan(run).packs.info.settings["splits"]["groups"]
        assert {one["split"]: one["groups"] for one in shown["splits"]} == groups
        assert sum(one["samples"] for one in shown["splits"]) == 180
        page = (run.workspace.report / "report.html").read_text()
        assert "are one group, in one split." in page
    sides: dict[bytes, set[str]] = {}
    for split, _, media in samples_of(run):
        for data in media:
            sides.setdefault(data, set()).add(split)
    assert len(sides) == NUM_PICTURES
    assert all(len(one) == 1 for one in sides.values())
    apart = [
        {"id": f"{i}", "question": "?", "answer": f"{i}.", "image": f"{i}.jpg"} for i in range(9)
    ]
    write_file(tmp_path / "a" / "r.jsonl", lines(apart))
    alone = make_run(
        {"format": "jsonl", "path": str(tmp_path / "a" / "r.jsonl"), "task": "vqa"},
        tmp_path / "alone",
        output={"split": SHARES},
        pack={"seq_length": 128},
    )
    pack_all(alone)
    assert "split by" not in plan_summary(alone)
    assert verify(alone, deep=True).apart == ""


def test_pictures_here_and_in_remote_storage_are_the_same(tmp_path: Path) -> None:
    """Local pictures beside remote ones are hashed by as few bytes as those."""
    rng = np.random.default_rng(0)
    for i in range(24):
        picture = io.BytesIO()
        Image.fromarray(rng.integers(256, size=(56, 56, 3), dtype=np.uint8)).save(picture, "PNG")
        for folder in (tmp_path / "here", tmp_path / "there"):
            write_file(folder / f"{i}.png", picture.getvalue())
            write_file(folder / f"{i}.json", orjson.dumps({"caption": f"{folder.name} {i}"}))
    assert len(picture.getvalue()) > 8192
    there = f"file://{tmp_path}/there"
    sources = [
        {"format": "pairs", "path": path, "task": "captioning", "name": name}
        for name, path in {"here": str(tmp_path / "here"), "there": there}.items()
    ]
    output = {"split": {"train": 0.5, "val": 0.5}, "split_by": "media"}
    run = make_run(sources, tmp_path / "out", pack={"seq_length": 128}, output=output)
    pack_all(run)
    result = verify(run, deep=True)
    assert result.ok, result.problems
    assert result.num_images == 48


def test_by_sample_and_what_is_said_of_it(measured: tuple[Run, Index], tmp_path: Path) -> None:
    run = run_of(tmp_path, output={"split_by": "sample"})
    pack_all(run)
    (line,) = [one for one in plan_summary(run).splitlines() if "split val" in one]
    assert line.endswith("stand in split train, too; output.split_by=media keeps them on one side")
    assert verify(run, deep=True).ok


def test_by_a_field(tmp_path: Path) -> None:
    """Both sources name documents, which are the same."""
    run = run_of(tmp_path, output={"split_by": "group"})
    samples = measure(run)
    plan = plan_index(run)
    splits = planned(run, samples)
    hashes = samples.array("group_hash")
    sides = [set(hashes[own].tolist()) for own in splits.values()]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 45
    assert plan.packs.info.settings["splits"]["by"] == "group"
    assert sum(plan.packs.info.settings["splits"]["groups"].values()) == 45


def test_what_is_refused(tmp_path: Path) -> None:
    source = {"format": "jsonl", "path": str(tmp_path / "data"), "task": "bmr"}
    output = {"path": str(tmp_path / "out"), "split": SHARES}
    with pytest.raises(ConfigError, match=r"group needs the field .* set source.fields: {group"):
        parse_config({"source": source, "output": {**output, "split_by": "group"}})
    records = [{**one, "image": "0.jpg"} for one in records_of(12)]
    run = run_of(tmp_path, records, output={"split_by": "media"})
    with pytest.raises(StageError, match="1 of images or videos that lead to each other; set out"):
        pack_all(run)
    pack_all(run_of(tmp_path, records, "default"))


def test_verify_finds_what_stands_in_two_splits() -> None:
    one, other = np.array([0, 1, 2], np.uint64), np.array([2, 3, 0], np.uint64)
    result = VerifyResult(apart="none")
    _check_apart({"train": [one], "val": [other], "test": []}, "images", result)
    assert result.problems == ["1 images stand in splits train and val"]
    assert result.apart == ""


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=3, max_size=60),
    shares=st.lists(st.floats(0.05, 1), min_size=2, max_size=3),
    seed=st.integers(0, 99),
)
def test_sizes_within_one_group(sizes: list[int], shares: list[float], seed: int) -> None:
    names = {str(i): share / sum(shares) for i, share in enumerate(shares)}
    groups = np.repeat(np.arange(len(sizes)), sizes)
    drawn = np.random.default_rng(seed).random(len(groups))
    found = deal_groups(groups, drawn, names)
    assert sorted(np.concatenate(list(found.values())).tolist()) == list(range(len(groups)))
    sides = [set(groups[own].tolist()) for own in found.values()]
    assert sum(map(len, sides)) == len(sizes)
    assert all(sides)
    # A split whose share is less than a group takes one from another.
    too_small = sum(share * len(groups) < max(sizes) for share in names.values())
    for own, share in zip(found.values(), names.values(), strict=True):
        assert abs(len(own) - share * len(groups)) <= max(sizes) * (1 + too_small)


def test_a_picture_of_most_samples_does_not_fill_the_smallest_split() -> None:
    groups = np.concatenate([np.zeros(600, np.int64), 1 + np.arange(400)])
    for seed in range(20):
        drawn = np.random.default_rng(seed).random(len(groups))
        found = deal_groups(groups, drawn, {"train": 0.99, "val": 0.01})
        assert [len(own) for own in found.values()] == [990, 10]


def test_groups_follow_chains() -> None:
    owners, media = np.array([0, 1, 1, 2, 4, 5]), np.array([0, 0, 1, 1, 2, 2])
    assert connected(6, owners, media).tolist() == [0, 0, 0, 1, 2, 2]
    assert connected(3, owners[:0], media[:0]).tolist() == [0, 1, 2]

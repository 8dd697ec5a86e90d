"""Splits and shards of every layout, shards in folders, and files that are not ours; and Energon's
metadata: equal to what `energon prepare` makes of the same shards."""

import json
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from packaging.specifiers import SpecifierSet

from offline_packing.errors import DiskFullError, StageError
from offline_packing.layouts import energon_metadata
from offline_packing.layouts.energon_metadata import ENERGON_VERSION, index_pack_folder
from offline_packing.layouts.shards import lay_out_shards
from offline_packing.online.ranks.pack_costs import pack_costs
from offline_packing.runs.manifest import require_manifest
from offline_packing.storage.tars import TarShardWriter, tar_size
from offline_packing.verify.verify import verify
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.versions import SUPPORTED
from tests.helpers.datasets import image_bytes, packed_run
from tests.helpers.outputs import copy_tars, sqlite_rows
from tests.world import World, copy_of


@pytest.mark.parametrize("media", ["copy", "refer"])
def test_what_is_not_ours_stays_when_packs_are_overwritten(
    world: World, tmp_path: Path, media: str
) -> None:
    copy_of(world.run("captioning", output={"media": media}), tmp_path / "out")
    others = [tmp_path / "out" / name for name in ("notes.jsonl", "my-00000.tar")]
    for path in others:
        path.write_text("mine")
    output = {"media": media, "key_prefix": "new-", "overwrite": True}
    again = packed_run(world.source("captioning"), tmp_path / "out", output=output)
    assert verify(again).ok
    assert [path.read_text() for path in others] == ["mine", "mine"]


@given(
    pack_bytes=st.lists(st.integers(512, 100_000), min_size=1, max_size=60),
    packs_per_shard=st.integers(1, 20),
    max_shard_bytes=st.none() | st.integers(1, 300_000),
    val_share=st.floats(0.05, 0.5),
)
def test_lay_out_shards(
    pack_bytes: list[int], packs_per_shard: int, max_shard_bytes: int | None, val_share: float
) -> None:
    first = round(len(pack_bytes) * (1 - val_share))
    splits = {"train": range(first), "val": range(first, len(pack_bytes))}
    sizes = np.array(pack_bytes, dtype=np.int64)
    shards = lay_out_shards(sizes, splits, packs_per_shard, max_shard_bytes)
    held = [pack for s in shards for pack in range(s.first_pack, s.first_pack + s.num_packs)]
    assert held == list(range(len(pack_bytes)))
    assert len({shard.name for shard in shards}) == len(shards)
    for name, packs in splits.items():
        of_split = [shard for shard in shards if shard.split == name]
        assert sum(shard.num_packs for shard in of_split) == len(packs)
        assert [s.name for s in of_split] == [f"{name}-{i:06d}" for i in range(len(of_split))]
    for shard in shards:
        size = sum(pack_bytes[shard.first_pack : shard.first_pack + shard.num_packs])
        assert 1 <= shard.num_packs <= packs_per_shard
        assert shard.num_packs == 1 or tar_size(size) <= (max_shard_bytes or np.inf)


OUTPUT: dict[str, Any] = {"packs_per_shard": 2, "split": {"train": 0.7, "val": 0.3}}
FOLDERS = {**OUTPUT, "shards_per_folder": 2}


def files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.rglob("*.tar*")}


def test_shards_in_folders_have_the_same_bytes(world: World) -> None:
    flat, run = (
        world.run("captioning", pack={"seq_length": 256}, output=output)
        for output in (OUTPUT, FOLDERS)
    )
    roots = flat.workspace.root, run.workspace.root
    names = {str(path.parent.relative_to(roots[1])) for path in roots[1].rglob("*.tar")}
    assert names >= {"train-0000", "train-0001", "val-0000"}
    assert files(roots[1]) == files(roots[0])
    packs = [PackedFolder(root) for root in roots]
    assert [pack.key for pack in packs[1]] == [pack.key for pack in packs[0]]
    assert all(map(np.array_equal, *map(pack_costs, packs)))
    assert all(map(np.array_equal, *(one.columns() for one in packs)))


@pytest.fixture
def packed(world: World) -> Path:
    return world.packed("captioning", output={"split": {"train": 0.6, "val": 0.4}})


def files_of(folder: Path, tars: list[str]) -> dict[str, Any]:
    """Return what Energon reads of a folder: bytes of indices, and contents of the database, whose
    statements are put into one spelling."""
    found: dict[str, Any] = {name: (folder / f"{name}.idx").read_bytes() for name in tars}
    found |= {table: sqlite_rows(folder, table) for table in ("samples", "sample_parts")}
    with sqlite3.connect(folder / ".nv-meta" / "index.sqlite") as database:
        rows = database.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall()
    found["schema"] = sorted((*names, re.sub(r"\s+", "", sql or "")) for *names, sql in rows)
    info = json.loads((folder / ".nv-meta/.info.json").read_text())
    return found | {"info": info.keys(), "counts": info["shard_counts"]}


def test_equal_to_energon_prepare_and_to_index(packed: Path, tmp_path: Path) -> None:
    """Of the same tars."""
    for name in ("prepared", "indexed"):
        names = copy_tars(packed, tmp_path / name)
    WebdatasetPreparator.prepare_dataset(
        tmp_path / "prepared", names, split_parts_ratio=[("train", 1)], shuffle_seed=None, workers=1
    )
    found = files_of(packed, names)
    assert found == files_of(tmp_path / "prepared", names)
    assert len(found["samples"]) >= 5
    manifest = require_manifest(packed)
    assert index_pack_folder(tmp_path / "indexed") == sum(manifest.counts.packs.values())
    assert found == files_of(tmp_path / "indexed", names)
    indexed, dataset = (
        yaml.safe_load((folder / ".nv-meta/dataset.yaml").read_text())
        for folder in (tmp_path / "indexed", packed)
    )
    assert dataset["subflavors"].pop("generation") == manifest.generation  # packs of others: none
    assert indexed == dataset
    assert dataset["sample_type"] == {
        "__module__": "task_encoders.energon_samples",
        "__class__": "PackedCaptioningSample",
    }
    assert SpecifierSet(SUPPORTED["megatron-energon"]).contains(ENERGON_VERSION)
    assert dataset["subflavors"] == {"offline_packing": "captioning"}
    split = yaml.safe_load((packed / ".nv-meta/split.yaml").read_text())["split_parts"]
    assert [split["train"][0], split["val"][0]] == ["train-000000.tar", "val-000000.tar"]
    assert split["test"] == []


def test_a_full_disk(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "copy"
    copy_tars(packed, folder)
    meta = folder / ".nv-meta"
    meta.mkdir()
    (meta / "index.sqlite.0123456789ab.tmp").write_bytes(b"of a run that was killed")
    small = f"PRAGMA max_page_count = 4; {energon_metadata._TABLES}"
    monkeypatch.setattr(energon_metadata, "_TABLES", small)
    with pytest.raises(DiskFullError, match=r"index\.sqlite cannot be written: No space left"):
        index_pack_folder(folder, "captioning")
    assert not list(meta.iterdir())


def test_uuid_follows_the_content(world: World) -> None:
    folders = (world.packed("captioning", pack={"seed": seed}) for seed in (0, 1))
    assert len({(folder / ".nv-meta/index.uuid").read_text() for folder in folders}) == 2


def legacy_pack(index: int) -> tuple[str, list[tuple[str, bytes]]]:
    """The layout that people already have: `prompts`, `img0.jpg`, no `meta`."""
    record = {"images": ["img0.jpg"], "prompts": ["Colour?"], "captions": [f"Blue {index}."]}
    return f"ps_{index:08d}", [("img0.jpg", image_bytes()), ("json", json.dumps(record).encode())]


def write_shard(path: Path, packs: list[tuple[str, list[tuple[str, bytes]]]]) -> None:
    with open(path, "wb") as file:
        writer = TarShardWriter(file)
        for key, members in packs:
            writer.add(key, members)
        writer.finish()


def test_index_of_a_folder_by_others(tmp_path: Path) -> None:
    write_shard(tmp_path / "b.tar", [legacy_pack(2)])
    write_shard(tmp_path / "a.tar", [legacy_pack(0), ("lost", LOST)])
    with pytest.raises(StageError, match=r"do not name their task; pass --task captioning\|vqa"):
        index_pack_folder(tmp_path)
    assert index_pack_folder(tmp_path, "captioning") == 3
    counts = json.loads((tmp_path / ".nv-meta/.info.json").read_text())["shard_counts"]
    assert counts == {"a.tar": 2, "b.tar": 1}


JSON: Any = [("json", b"{")]
NO_IMAGES: Any = [("json", b'{"captions": ["a"], "images": []}')]
#: As upstream's converter writes packs of files with `prompt`.
LOST: Any = [("img0.jpg", image_bytes()), ("json", b'{"captions": ["a"], "images": ["img0.jpg"]}')]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([], r"holds no \*\.tar"),
        ([[]], "holds no pack"),
        ([[("ps_0", [("img0.jpg", b"")])]], r"a\.tar: 'ps_0' has no json"),
        ([[("ps_0", JSON)]], "JSON cannot be parsed"),
        ([[("ps_0", NO_IMAGES)]], "0 images for 1 captions"),
        ([[legacy_pack(0)]] * 2, r"key 'ps_00000000' is in a\.tar and in b\.tar"),
        ([[("a", LOST), legacy_pack(1), ("b", LOST)]], "2 of 3 sub-samples have no prompt"),
        ([None], "is cut off|cannot be read"),
        ("ours", "ps_00000000' is a captioning pack, not vqa"),
    ],
)
def test_index_refuses(shards: Any, message: str, packed: Path, tmp_path: Path) -> None:
    if shards == "ours":
        shutil.copy(packed / "train-000000.tar", tmp_path / "a.tar")
        shards = []
    for name, packs in zip("ab", shards, strict=False):
        path = tmp_path / f"{name}.tar"
        write_shard(path, [legacy_pack(0)] if packs is None else packs)
        if packs is None:
            path.write_bytes(path.read_bytes()[:1536])
    with pytest.raises(StageError, match=message):
        index_pack_folder(tmp_path, "vqa")
    assert not (tmp_path / ".nv-meta").exists()

"""Energon's metadata: equal to what `energon prepare` makes of the same shards."""

import json
import re
import sqlite3
from pathlib import Path

import pytest
import yaml
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from packaging.specifiers import SpecifierSet

from offline_packing.errors import DiskFullError, StageError
from offline_packing.layouts import energon_metadata
from offline_packing.layouts.energon_metadata import ENERGON_VERSION, index_pack_folder
from offline_packing.runs.run import Run
from offline_packing.storage.tars import TarShardWriter
from offline_packing.verify.verify import verify
from task_encoders.packs.manifest import read_manifest
from task_encoders.versions import SUPPORTED
from tests.helpers.datasets import captioning_pairs, image_bytes, make_run, pack_all, packed_run
from tests.helpers.outputs import copy_tars, sqlite_rows


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    base = tmp_path_factory.mktemp("packed")
    output = {"split": {"train": 0.6, "val": 0.4}, "packs_per_shard": 2}
    return packed_run(captioning_pairs(base / "data"), base / "out", output=output)


def test_equal_to_energon_prepare(packed: Run, tmp_path: Path) -> None:
    root = packed.workspace.root
    names = copy_tars(root, tmp_path / "prepared")
    WebdatasetPreparator.prepare_dataset(
        tmp_path / "prepared", names, split_parts_ratio=[("train", 1)], shuffle_seed=None, workers=1
    )
    for name in names:
        ours = (root / name).with_suffix(".tar.idx").read_bytes()
        assert ours == (tmp_path / "prepared" / name).with_suffix(".tar.idx").read_bytes()
    for table in ("samples", "sample_parts"):
        rows = sqlite_rows(root, table)
        assert rows == sqlite_rows(tmp_path / "prepared", table)
        assert len(rows) >= 5
    infos = [
        json.loads((p / ".nv-meta/.info.json").read_text()) for p in (root, tmp_path / "prepared")
    ]
    assert infos[0].keys() == infos[1].keys()
    assert infos[0]["shard_counts"] == infos[1]["shard_counts"]
    assert schema(root) == schema(tmp_path / "prepared")


def test_a_full_disk(packed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "copy"
    copy_tars(packed.workspace.root, folder)
    meta = folder / ".nv-meta"
    meta.mkdir()
    (meta / "index.sqlite.0123456789ab.tmp").write_bytes(b"of a run that was killed")
    small = f"PRAGMA max_page_count = 4; {energon_metadata._TABLES}"
    monkeypatch.setattr(energon_metadata, "_TABLES", small)
    with pytest.raises(DiskFullError, match=r"index\.sqlite cannot be written: No space left"):
        index_pack_folder(folder, "captioning")
    assert not list(meta.iterdir())


def schema(folder: Path) -> list[tuple[str, ...]]:
    """Tables and indices of Energon's index, with their SQL in one spelling."""
    with sqlite3.connect(folder / ".nv-meta" / "index.sqlite") as database:
        rows = database.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall()
    return sorted((*names, re.sub(r"\s+", "", sql or "")) for *names, sql in rows)


def test_files(packed: Run) -> None:
    meta = packed.workspace.nv_meta
    dataset = yaml.safe_load((meta / "dataset.yaml").read_text())
    assert dataset["sample_type"] == {
        "__module__": "task_encoders.energon_samples",
        "__class__": "PackedCaptioningSample",
    }
    assert SpecifierSet(SUPPORTED["megatron-energon"]).contains(ENERGON_VERSION)
    manifest = read_manifest(packed.workspace.root)
    assert manifest is not None
    generation = manifest.generation
    assert dataset["subflavors"] == {"offline_packing": "captioning", "generation": generation}
    split = yaml.safe_load((meta / "split.yaml").read_text())["split_parts"]
    assert split["train"][0] == "train-000000.tar"
    assert split["val"][0] == "val-000000.tar"
    assert split["test"] == []


def test_uuid_follows_the_content(packed: Run, tmp_path: Path) -> None:
    data = captioning_pairs(tmp_path / "data", 10)
    stages = [
        make_run(data, tmp_path / str(n), pack={"seed": seed}) for n, seed in enumerate([0, 0, 1])
    ]
    for run in stages:
        pack_all(run)
    uuids = [(run.workspace.nv_meta / "index.uuid").read_text() for run in stages]
    assert uuids[0] == uuids[1] != uuids[2]


def legacy_pack(index: int) -> tuple[str, list[tuple[str, bytes]]]:
    """The layout that people already have: `prompts`, `img0.jpg`, no `meta`."""
    record = {"images": ["img0.jpg"], "prompts": ["Colour?"], "captions": [f"Blue {index}."]}
    return f"ps_{index:08d}", [("img0.jpg", image_bytes()), ("json", json.dumps(record).encode())]


def test_vqa_packs_that_lost_their_prompts_stop(tmp_path: Path) -> None:
    """As upstream's converter writes them of files with `prompt`."""
    packs = [legacy_pack(i) for i in range(3)]
    for number in (0, 2):
        key, (image, (name, data)) = packs[number]
        emptied = json.dumps({**json.loads(data), "prompts": []}).encode()
        packs[number] = (key, [image, (name, emptied)])
    write_shard(tmp_path / "a.tar", packs)
    with pytest.raises(StageError, match=r"2 of 3 sub-samples have no prompt .* export writes"):
        index_pack_folder(tmp_path, "vqa")
    assert not (tmp_path / ".nv-meta").exists()
    assert index_pack_folder(tmp_path, "captioning") == 3


def write_shard(path: Path, packs: list[tuple[str, list[tuple[str, bytes]]]]) -> None:
    with open(path, "wb") as file:
        writer = TarShardWriter(file)
        for key, members in packs:
            writer.add(key, members)
        writer.finish()


def test_index_of_our_own_tars_is_the_same(packed: Run, tmp_path: Path) -> None:
    root, copy = packed.workspace.root, tmp_path / "copy"
    names = copy_tars(root, copy)
    manifest = json.loads(packed.workspace.manifest.read_text())
    assert index_pack_folder(copy) == sum(manifest["counts"]["packs"].values())
    for name in names:
        index_name = f"{name}.idx"
        assert (copy / index_name).read_bytes() == (root / index_name).read_bytes()
    assert sqlite_rows(copy, "sample_parts") == sqlite_rows(root, "sample_parts")
    ours, theirs = (
        yaml.safe_load((folder / ".nv-meta/dataset.yaml").read_text()) for folder in (root, copy)
    )
    del ours["subflavors"]["generation"]  # packs of others have none
    assert theirs == ours
    assert verify(packed).ok


def test_index_of_a_folder_by_others(tmp_path: Path) -> None:
    write_shard(tmp_path / "b.tar", [legacy_pack(2)])
    write_shard(tmp_path / "a.tar", [legacy_pack(0), legacy_pack(1)])
    with pytest.raises(StageError, match=r"do not say what they are; pass --task captioning\|vqa"):
        index_pack_folder(tmp_path)
    assert index_pack_folder(tmp_path, "vqa") == 3
    counts = json.loads((tmp_path / ".nv-meta/.info.json").read_text())["shard_counts"]
    assert counts == {"a.tar": 2, "b.tar": 1}


def test_index_refuses(packed: Run, tmp_path: Path) -> None:
    def refused(message: str, task: str | None = "vqa") -> None:
        with pytest.raises(StageError, match=message):
            index_pack_folder(tmp_path, task)
        assert not (tmp_path / ".nv-meta").exists()

    refused(r"holds no \*\.tar")
    path = tmp_path / "a.tar"
    write_shard(path, [])
    refused("holds no pack")
    write_shard(path, [("ps_0", [("img0.jpg", b"")])])
    refused(r"a\.tar: 'ps_0' has no json")
    write_shard(path, [("ps_0", [("json", b"{")])])
    refused("JSON cannot be parsed")
    write_shard(path, [("ps_0", [("json", b'{"captions": ["a"], "images": []}')])])
    refused("0 images for 1 captions")
    write_shard(path, [legacy_pack(0)])
    write_shard(tmp_path / "b.tar", [legacy_pack(0)])
    refused(r"key 'ps_00000000' is in a\.tar and in b\.tar")
    (tmp_path / "b.tar").unlink()
    path.write_bytes(path.read_bytes()[:1536])
    refused("is cut off|cannot be read")
    path.write_bytes((packed.workspace.root / "train-000000.tar").read_bytes())
    refused("ps_00000000' is a captioning pack, not vqa")

"""Splits and shards of every layout, shards in folders, and files that are not ours."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offline_packing.errors import ConfigError
from offline_packing.layouts.shards import lay_out_shards
from offline_packing.online.ranks.pack_costs import pack_costs
from offline_packing.report.preview import preview
from offline_packing.storage.tars import tar_size
from offline_packing.upkeep.status import status
from offline_packing.verify.verify import verify
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.datasets import make_run, pack_all, packed_run
from tests.helpers.outputs import sqlite_rows
from tests.world import World, copy_of


@pytest.mark.parametrize("layout", ["energon", "references"])
def test_what_is_not_ours_stays_when_packs_are_overwritten(
    world: World, tmp_path: Path, layout: str
) -> None:
    """Though other layouts, or other splits, would give their files such names."""
    copy_of(world.run("captioning", output={"layout": layout}), tmp_path / "out")
    others = [tmp_path / "out" / name for name in ("notes.jsonl", "packed_seq_dataset_my.bin")]
    for path in others:
        path.write_text("mine")
    output = {"layout": layout, "key_prefix": "new-", "overwrite": True}
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


@pytest.mark.parametrize("layout", ["energon", "llava_onevision", "loongforge"])
def test_the_bytes_are_the_same(world: World, layout: str) -> None:
    flat, run = (
        world.run("captioning", pack={"seq_length": 256}, output={**output, "layout": layout})
        for output in (OUTPUT, FOLDERS)
    )
    roots = flat.workspace.root, run.workspace.root
    names = {str(path.parent.relative_to(roots[1])) for path in roots[1].rglob("*.tar")}
    assert names >= {"train-0000", "train-0001", "val-0000"}
    assert files(roots[1]) == files(roots[0])
    if layout == "energon":
        rows = [sqlite_rows(root, "samples") for root in roots]
        assert rows[0] == rows[1]
        shown = [[one.key for one in preview(of, packs=("0",))] for of in (flat, run)]
        assert shown[0] == shown[1]
    packs = [PackedFolder(root) for root in roots]
    assert [pack.key for pack in packs[1]] == [pack.key for pack in packs[0]]
    assert all(map(np.array_equal, *map(pack_costs, packs)))
    assert all(map(np.array_equal, *(one.columns() for one in packs)))


@pytest.mark.parametrize("layout", ["references", "indexed"])
def test_other_layouts_refuse_them(tmp_path: Path, layout: str) -> None:
    with pytest.raises(ConfigError, match=f"layout {layout} has no file per shard"):
        make_run(tmp_path, tmp_path / "out", output={"layout": layout, "shards_per_folder": 2})


def test_a_shard_that_was_not_finished_is_written(world: World, tmp_path: Path) -> None:
    run = world.run("captioning", pack={"seq_length": 256}, output=FOLDERS)
    run = copy_of(run, tmp_path / "out")
    root, workspace, before = run.workspace.root, run.workspace, files(run.workspace.root)
    shard = "train-0000/train-000001"
    for path in (workspace.manifest, workspace.fragment(shard), root / f"{shard}.tar"):
        path.unlink()
    left = root / f"{shard}.tar.0123456789ab.tmp"
    left.write_bytes(b"half")
    number = len(list(workspace.write.rglob("*-??????.json")))
    assert f"in {number} shards" in status(run)
    pack_all(run)
    assert not left.exists()
    assert files(root) == before
    run.discard_shards()
    assert not list(root.glob("train*"))

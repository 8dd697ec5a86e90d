"""Shards in folders hold the same bytes, and whatever reads an output finds them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offline_packing.errors import ConfigError
from offline_packing.online.ranks.pack_costs import pack_costs
from offline_packing.report.preview import preview
from offline_packing.upkeep.status import status
from offline_packing.verify.verify import verify
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.datasets import make_run, pack_all
from tests.helpers.outputs import flip_byte, repair, sqlite_rows
from tests.world import World, copy_of

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


def test_what_is_damaged_or_was_not_written_is_written(world: World, tmp_path: Path) -> None:
    run = world.run("captioning", pack={"seq_length": 256}, output=FOLDERS)
    run = copy_of(run, tmp_path / "out")
    root, workspace = run.workspace.root, run.workspace
    before = files(root)
    flip_byte(root / "train-0001/train-000002.tar", 700)
    workspace.fragment("val-0000/val-000000").unlink()
    problems = verify(run).problems
    for name in ("train-0001/train-000002.tar", "val-0000"):
        assert any(name in problem for problem in problems)
    assert repair(run).startswith("2 files")
    assert files(root) == before
    shard = "train-0000/train-000001"  # the next was killed while it wrote this one
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

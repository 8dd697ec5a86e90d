"""Shards in folders hold the same bytes, and whatever reads an output finds them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.energon import WorkerConfig, get_loader, get_val_dataset
from megatron.energon.task_encoder import DefaultTaskEncoder

from offline_packing.errors import ConfigError
from offline_packing.online.ranks.pack_costs import pack_costs
from offline_packing.report.preview import preview
from offline_packing.runs.run import Run
from offline_packing.upkeep.status import status
from offline_packing.verify.verify import verify
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.datasets import captioning_pairs, make_run, pack_all
from tests.helpers.outputs import flip_byte, repair, sqlite_rows

LAYOUTS = ("energon", "llava_onevision", "loongforge")


class RawPacks(DefaultTaskEncoder):  # type: ignore[type-arg]
    decoder = None


def make_runs(folder: Path, layout: str = "energon", **output: Any) -> list[Run]:
    """One source in a folder of shards, and in several."""
    output |= {"packs_per_shard": 2, "split": {"train": 0.7, "val": 0.3}, "layout": layout}
    data = captioning_pairs(folder / "data")
    runs = [
        make_run(data, folder / name, pack={"seq_length": 256}, output={**output, **more})
        for name, more in (("flat", {}), ("folders", {"shards_per_folder": 2}))
    ]
    for run in runs:
        pack_all(run)
    return runs


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    return make_runs(tmp_path_factory.mktemp("both"))


def files(run: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.workspace.root.rglob("*.tar*")}


def keys_of(run: Run) -> list[str]:
    dataset = get_val_dataset(
        run.workspace.root,
        split_part="train",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        task_encoder=RawPacks(),
        batch_size=None,
    )
    return [pack.__key__ for pack in get_loader(dataset)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_are_the_same(both: list[Run], tmp_path: Path, layout: str) -> None:
    flat, run = both if layout == "energon" else make_runs(tmp_path, layout)
    names = [path.relative_to(run.workspace.root) for path in run.workspace.root.rglob("*.tar")]
    assert {str(name.parent) for name in names} >= {"train-0000", "train-0001", "val-0000"}
    assert files(run) == files(flat)
    assert verify(run, deep=True).problems == []
    if layout == "energon":
        assert sqlite_rows(run.workspace.root, "samples") == sqlite_rows(
            flat.workspace.root, "samples"
        )


@pytest.mark.parametrize("layout", ["references", "indexed"])
def test_other_layouts_refuse_them(tmp_path: Path, layout: str) -> None:
    with pytest.raises(ConfigError, match=f"layout {layout} has no file per shard"):
        make_run(tmp_path, tmp_path / "out", output={"layout": layout, "shards_per_folder": 2})


def test_energon_loads_them(both: list[Run]) -> None:
    keys = [keys_of(run) for run in both]
    assert len(keys[0]) > 4
    assert keys[0] == keys[1]


def test_packs_by_number(both: list[Run]) -> None:
    flat, folders = (PackedFolder(run.workspace.root) for run in both)
    assert [pack.key for pack in folders] == [pack.key for pack in flat]
    assert all(map(np.array_equal, *map(pack_costs, (flat, folders))))
    columns = flat.columns(), folders.columns()
    assert all(part is not None for part in columns)
    assert all(map(np.array_equal, *columns))
    assert [one.key for one in preview(both[1], packs=("0",))] == [
        one.key for one in preview(both[0], packs=("0",))
    ]


def test_what_is_damaged_or_was_not_written_is_written(tmp_path: Path) -> None:
    _, run = make_runs(tmp_path)
    before, workspace = files(run), run.workspace
    root = workspace.root
    flip_byte(root / "train-0001/train-000002.tar", 700)
    (root / "train-0000/train-000001.tar.idx").unlink()
    workspace.fragment("val-0000/val-000000").unlink()
    problems = verify(run).problems
    for name in ("train-0001/train-000002.tar", "train-0000/train-000001.tar.idx", "val-0000"):
        assert any(name in problem for problem in problems)
    assert repair(run).startswith("3 files")
    assert files(run) == before
    assert verify(run).problems == []
    shard = "train-0000/train-000001"  # the next was killed while it wrote this one
    for path in (workspace.manifest, workspace.fragment(shard), root / f"{shard}.tar"):
        path.unlink()
    left = root / f"{shard}.tar.0123456789ab.tmp"
    left.write_bytes(b"half")
    number = len(list(workspace.write.rglob("*-??????.json")))
    assert f"in {number} shards" in status(run)
    pack_all(run)
    assert not left.exists()
    assert files(run) == before
    workspace.manifest.unlink()
    pack_all(run)
    run.discard_shards()
    assert not list(root.glob("train*"))

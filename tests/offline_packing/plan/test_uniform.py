"""pack.order.uniform from plan to loaders: at each step all ranks have images, or none has."""

import itertools
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.energon import WorkerConfig

from launch.config import DataConfig
from launch.data.micro_batches import build_loader, build_task_encoder
from launch.data.packed_data import read_packed_data
from offline_packing.measure.measure import measure
from offline_packing.verify.verify import render_result, verify
from task_encoders import PackedFolder, get_packed_loader, get_packed_train_dataset
from tests.helpers.datasets import make_run, mixed_pairs, plan_summary
from tests.helpers.prepared_folders import blend_of
from tests.world import Source, World, copy_of, task_encoder

pytestmark = pytest.mark.usefixtures("bmr_environment")

PACK = {"seq_length": 200, "order": {"num_ranks": 4, "num_workers": 2, "uniform": True}}
OUTPUT: dict[str, Any] = {"split": {"train": 0.7, "val": 0.3}, "packs_per_shard": 5}


def dialogues(folder: Path) -> Source:
    return {"format": "pairs", "path": str(mixed_pairs(folder, 90)), "task": "bmr"}


@pytest.fixture(scope="module")
def folder(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy packs in two splits, each in order for itself, and check what is said of them."""
    made = world.run(dialogues, pack=PACK, output=OUTPUT)
    run = copy_of(made, tmp_path_factory.mktemp("packed") / "packed")
    folder = run.workspace.root
    result = verify(run)
    assert result.ok, result.problems
    summary = (run.workspace.plan / "summary.txt").read_text()
    assert "waiting after the tower too" in summary
    assert re.search(r"mixed steps +0 of \d+; \d+ packs halved, \d+ repeated", summary)
    counts = read_packed_data(folder).num_packs, read_packed_data(folder).num_val_packs
    assert all(count > 0 and count % 8 == 0 for count in counts)
    shown = render_result(result, deep=False)
    assert f"steps           {sum(counts) // 4}, each of one kind" in shown
    return folder


def test_fewer_packs_than_ranks(world: World, tmp_path: Path) -> None:
    """No step has a pack for every rank; shares of time that ranks wait would say 0."""
    pack = {"seq_length": 200, "order": {"num_ranks": 1000}}
    measure(run := make_run(world.source(dialogues), tmp_path, pack=pack))
    summary = plan_summary(run)
    assert re.search(r"order +\d+ packs are not one for each of 1,000 ranks", summary)
    assert "idle" not in summary


def has_images(row: object) -> bool:
    return len(row.image_grid_thw) > 0  # type: ignore[attr-defined]


def are_alike(steps: list[tuple[bool, ...]], kinds: Collection[bool] = (True, False)) -> None:
    """Every step is of one kind, and these kinds occur."""
    assert all(len(set(step)) == 1 for step in steps)
    assert {step[0] for step in steps} == set(kinds)


def test_energons_loader_over_two_epochs(folder: Path) -> None:
    packs = read_packed_data(folder)
    encoder, drawn = build_task_encoder(DataConfig(path=str(folder)), packs), []
    for rank in range(2):
        config = WorkerConfig(rank=rank, world_size=2, num_workers=2)
        loader = get_packed_loader(get_packed_train_dataset(folder, encoder, worker_config=config))
        drawn.append([*map(has_images, itertools.islice(loader, packs.num_packs))])
        loader.close()
    are_alike([*zip(*drawn, strict=True)])


def test_readers_know_the_kinds_of_packs(world: World) -> None:
    run = world.run(dialogues, pack=PACK, output=OUTPUT)
    for split in ("train", "val"):
        packs = PackedFolder(run.workspace.root, task_encoder(run), split=split)
        columns = packs.columns()
        assert columns is not None
        assert packs.uniform_ranks == 4
        kinds = [has_images(packs.batch([number])) for number in range(len(packs))]
        assert (columns.media > 0).tolist() == kinds
        assert sorted(packs.order) == list(range(len(packs)))
        are_alike([tuple(step) for step in np.array(kinds).reshape(-1, 4).tolist()], {*kinds})


def test_a_blend_keeps_steps_and_the_share_of_each_output(folder: Path, tmp_path: Path) -> None:
    """One output comes once, the other three times."""
    other = shutil.copytree(folder, tmp_path / "other")
    blend = tmp_path / "blend.yaml"
    blend_of(blend, [f"path: {folder}, repetitions: 1", f"path: {other}, repetitions: 3"])
    encoder = build_task_encoder(DataConfig(path=str(folder)), read_packed_data(folder))
    packs = PackedFolder(blend, encoder)
    columns = packs.columns()
    assert columns is not None
    assert packs.uniform_ranks == 4
    are_alike([tuple(step) for step in (columns.media > 0).reshape(-1, 4).tolist()])
    own = DataConfig(path=str(blend), order="balanced", num_workers=0, repeat=False)
    loader: Any = build_loader(own, encoder, rank=0, num_ranks=2)
    features = loader.schedule.features
    assert features is not None
    assert features[:, -1].mean() == 3 / 4
    assert np.array_equal(features[:, 0], columns.media == np.unique(columns.media)[1])

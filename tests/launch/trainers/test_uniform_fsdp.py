"""FSDP2 on two gloo processes: packs with and without images at one step stop it, steps of one kind
train as one process does."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from launch.config import DataConfig
from launch.data.micro_batches import build_task_encoder
from launch.data.packed_data import read_packed_data
from launch.model.config import TransformersModelConfig, transformers_classes
from launch.model.segments import isolate_segments
from task_encoders import PackedFolder
from task_encoders.model_inputs import to_transformers_kwargs
from tests.helpers.datasets import make_run, mixed_pairs, pack_all
from tests.helpers.packed_runs import BMR_ENVIRONMENT
from tests.helpers.rank_processes import run_ranks

#: Seconds without an answer from the other rank: that of one that is only slow, and of a hang.
PATIENCE, SOON = 300, 10


def train(
    folder: Path, steps: list[list[int]], *, sharded: bool, patience: int = PATIENCE
) -> list[list[float]]:
    """Losses of the packs of each step; in one process of all, sharded of this rank's."""
    data = read_packed_data(folder)
    encoder = build_task_encoder(DataConfig(path=str(folder)), data)
    packs = PackedFolder(folder, encoder)
    torch.manual_seed(0)
    config = TransformersModelConfig().random_config(token_ids=encoder.encoder.media_token_ids)
    model = transformers_classes("qwen2_vl").model(config).train()
    isolate_segments(model)
    if sharded:
        group = distributed.new_group(timeout=timedelta(seconds=patience))
        mesh = DeviceMesh.from_group(group, "cpu")
        for part in (model.model.visual, *model.model.language_model.layers, model):
            fully_shard(part, mesh=mesh)
        steps = [[step[distributed.get_rank()]] for step in steps]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in steps:
        own = []
        for number in step:
            loss = model(**to_transformers_kwargs(packs.batch([number]))).loss
            (loss / len(step)).backward()
            own.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(own)
    return losses


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in BMR_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    source = {"format": "pairs", "path": str(mixed_pairs(tmp_path / "source", 60)), "task": "bmr"}
    order = {"num_ranks": 2, "uniform": True}
    pack_all(make_run(source, tmp_path / "packed", pack={"seq_length": 200, "order": order}))
    return tmp_path / "packed"


def steps_of(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the packs of each step, and whether they have images: (num_steps, 2)."""
    columns = PackedFolder(folder).columns()
    assert columns is not None
    return np.arange(len(columns.media)).reshape(-1, 2), (columns.media > 0).reshape(-1, 2)


@pytest.mark.exhaustive
def test_steps_of_one_kind_train_as_one_process(folder: Path, tmp_path: Path) -> None:
    numbers, media = steps_of(folder)
    chosen = [*np.flatnonzero(media[:, 0])[:2], *np.flatnonzero(~media[:, 0])[:2]]
    assert len(chosen) == 4
    steps = numbers[chosen[::2] + chosen[1::2]].tolist()
    alone = train(folder, steps, sharded=False)
    both = run_ranks(2, tmp_path / "group", sharded_training, folder, steps)
    np.testing.assert_allclose(np.concatenate(both, axis=1), alone, rtol=1e-5)


@pytest.mark.exhaustive
def test_mixed_steps_hang_or_fail(folder: Path, tmp_path: Path) -> None:
    numbers, media = steps_of(folder)
    with_images, without = numbers[media], numbers[~media]
    steps = [[int(with_images[0]), int(without[0])], [int(without[1]), int(with_images[1])]]
    with pytest.raises(Exception, match=r"(?i)timed? ?out|gloo|terminated with signal"):
        run_ranks(2, tmp_path / "group", sharded_training, folder, steps, SOON)


def sharded_training(folder: Path, steps: list[list[int]], patience: int = PATIENCE) -> Any:
    """Run as one rank of a group."""
    return train(folder, steps, sharded=True, patience=patience)

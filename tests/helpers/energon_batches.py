"""Packs read through Energon's loader, as they were measured."""

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from megatron.energon import WorkerConfig

from task_encoders.energon_samples import PackedBatch
from task_encoders.loading.packed_dataset import (
    PackedLoader,
    get_packed_loader,
    get_packed_train_dataset,
)
from task_encoders.model_inputs import to_transformers_kwargs
from task_encoders.packed_task_encoder import PackedTaskEncoder


@contextmanager
def loading(
    path: str | Path,
    encoder: PackedTaskEncoder,
    workers: int = 0,
    *,
    state: Any = None,
    rank: int = 0,
    world_size: int = 1,
    dataset_of: Callable[..., Any] = get_packed_train_dataset,
    loader_of: Callable[..., Any] = get_packed_loader,
    **options: Any,
) -> Iterator[Any]:
    """A loader over one epoch, whose workers end afterwards; `options` are of `dataset_of`."""
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=workers)
    given = {"repeat": False, "task_encoder": encoder, "worker_config": config} | options
    loader = loader_of(dataset_of(path, **given))
    loader.restore_state_rank(state)
    try:
        yield loader
    finally:
        PackedLoader.close(loader)


def batches_of(
    path: str | Path,
    encoder: PackedTaskEncoder,
    workers: int = 0,
    *,
    count: int | None = None,
    **options: Any,
) -> list[PackedBatch]:
    """The first batches of `loading`, or all of them."""
    with loading(path, encoder, workers, **options) as loader:
        return list(itertools.islice(loader, count))


def assert_same(found: Sequence[PackedBatch], expected: Sequence[PackedBatch]) -> None:
    """Batches are equal but for the places that they were read from."""
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        for name in {field.name for field in fields(ours)} - {"__sources__", "__restore_key__"}:
            mine, other = getattr(ours, name), getattr(theirs, name)
            is_equal = torch.equal if isinstance(mine, torch.Tensor) else operator.eq
            assert is_equal(mine, other), name


def check_training_step(model: Any, path: str | Path, encoder: PackedTaskEncoder) -> None:
    """A step of transformers' model on the first pack, by a finite loss, changes the matrix that is
    trained."""
    (batch, *_) = batches_of(path, encoder)
    weight = model.requires_grad_(False).model.language_model.layers[0].mlp.up_proj.weight
    weight.requires_grad_(True)
    before = weight.detach().clone()
    loss = model(**to_transformers_kwargs(batch)).loss
    assert torch.isfinite(loss)
    loss.backward()
    torch.optim.SGD([weight], 0.01).step()
    weight.grad = None
    assert not torch.equal(weight, before)

"""Packs in a Megatron-LM pretrain script, in the forms that its `pretrain()` calls: `get_batch`,
`loss_func`, `forward_step`, and the dataloaders. `examples/megatron_lm/pretrain_packed_vlm.py` is
such a script.

- Data: read by the first of the ranks that share a row, which sends it to the others.
- Order: as written, per data parallel rank; `--dataloader-save` keeps the place.
- Boundaries: `PackedSeqParams`; under context parallelism each rank counts its own tokens.
- Loss: labels shifted; a sum and its number of tokens, for `--calculate-per-token-loss`.
- Options: `--dataloader-type external`; batch sizes count packs.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.energon import WorkerConfig

from launch.data.broadcast import broadcast_batch
from launch.data.loader_state import load_state
from launch.loop.loss import shift_labels
from launch.loop.parallel import context_group
from launch.model.megatron.context_parallel import cut_row
from task_encoders.energon_samples import PackedBatch
from task_encoders.loading.packed_dataset import (
    PackedLoader,
    get_packed_loader,
    get_packed_train_dataset,
    get_packed_val_dataset,
)
from task_encoders.model_inputs import to_packed_seq_params
from task_encoders.samples import IGNORE_INDEX


class DataIterator:
    """An endless iterator over a loader, with the state that Megatron-LM saves as
    `--dataloader-save` says, and Megatron-Bridge in its checkpoints. `convert` changes each row."""

    def __init__(
        self, loader: PackedLoader, convert: Callable[[PackedBatch], Any] = lambda row: row
    ) -> None:
        self._loader = loader
        self._rows = map(convert, itertools.chain.from_iterable(itertools.repeat(loader)))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._rows)

    def save_state(self) -> Any:
        """Return Energon's state. From a file only `load_state` reads it: torch.load refuses its
        classes."""
        return self._loader.save_state_rank()

    def restore_state(self, state: Any) -> None:
        """Continue where a state was saved. Only before the first row."""
        self._loader.restore_state_rank(state)


def build_dataloaders(
    args: Any, task_encoder: Any, restore_from: str | Path | None = None
) -> tuple[DataIterator | None, list[DataIterator] | None, None]:
    """Build train and validation data, in the order of the written packs, on the ranks that read:
    the first of the ranks that share a row, on the first and the last pipeline stage.

    Args:
        args: Megatron-LM's arguments, of which `data_path`, `micro_batch_size`, `num_workers` and
            `eval_iters` are used; without validation a folder needs no val split.
        restore_from: this rank's file of a saved state.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    of_row = parallel_state.get_tensor_and_context_parallel_rank()
    if of_row or stage not in (0, stages - 1):
        return None, None, None
    options = {
        "micro_batch_size": args.micro_batch_size,
        "worker_config": WorkerConfig(
            rank=parallel_state.get_data_parallel_rank(),
            world_size=parallel_state.get_data_parallel_world_size(),
            num_workers=args.num_workers,
        ),
    }
    task_encoder.check_trainer("Megatron-LM")  # which divides by a whole number of tokens
    path = args.data_path[0] if isinstance(args.data_path, list) else args.data_path
    train = get_packed_train_dataset(path, task_encoder, **options)
    data = DataIterator(get_packed_loader(train))
    if restore_from is not None:
        data.restore_state(load_state(Path(restore_from))["dataloader_state_dict"])
    if not args.eval_iters:
        return data, None, None
    validation = get_packed_val_dataset(path, task_encoder, **options)
    return data, [DataIterator(get_packed_loader(validation))], None


def get_batch(data_iterator: Iterator[PackedBatch] | None, device: torch.device) -> PackedBatch:
    """Read the next batch on the first of the tensor and context parallel ranks, and return it on
    all of them, with shifted labels. Raises StopIteration on all ranks when the data ends.

    Args:
        data_iterator: an iterator over Energon's loader; None on the other ranks.
        device: the device of the result.
    """
    read = next(data_iterator, None) if data_iterator is not None else None
    group = parallel_state.get_tensor_and_context_parallel_group()
    batch = broadcast_batch(read, device, group)
    if batch is None:
        raise StopIteration
    labels = shift_labels(batch.labels)
    return dataclasses.replace(batch, labels=labels, loss_mask=(labels != IGNORE_INDEX).float())


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Reduce losses of tokens (1, S) to Megatron-LM's loss with `--calculate-per-token-loss`: a sum
    and its number of tokens."""
    loss = (output_tensor.float() * loss_mask).sum()
    num_tokens = loss_mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(
    data_iterator: Iterator[PackedBatch] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """Compute the losses of the next batch's tokens, and return them with the function that reduces
    them. Context parallel ranks count the tokens that they hold."""
    batch = get_batch(data_iterator, next(model.parameters()).device)
    params = to_packed_seq_params(batch, context_group())
    loss_mask = batch.loss_mask
    if (part := cut_row(params)) is not None:
        loss_mask = torch.zeros_like(loss_mask).index_copy(1, part.own, loss_mask[:, part.own])
    output_tensor = model(batch, params, batch.labels)
    return output_tensor, functools.partial(loss_func, loss_mask)

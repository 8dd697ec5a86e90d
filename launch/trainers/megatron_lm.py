"""Packs in a Megatron-LM pretrain script, in the forms that its `pretrain()` calls: `get_batch`,
`loss_func`, `forward_step`, and the dataloaders, as in its multimodal example:

    def train_valid_test_dataloaders_provider(num_samples):
        return build_dataloaders(get_args(), task_encoder)  # PackedTaskEncoder or any other

    train_valid_test_dataloaders_provider.is_distributed = True

Run as a module, they train a few steps on packs:

    OFFLINE_PACKED_DATA=1 OFFLINE_PACKING_VQA=1 \\
        torchrun --nproc-per-node 2 -m launch.trainers.megatron_lm out/packed --tensor-parallel 2
"""

import argparse
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from megatron.core import parallel_state
from megatron.energon import WorkerConfig

from launch.data.broadcast import broadcast_batch
from launch.data.loader_state import from_plain, to_plain
from launch.loop.loss import shift_labels
from task_encoders.energon_samples import PackedBatch
from task_encoders.loading.packed_dataset import (
    PackedLoader,
    get_packed_loader,
    get_packed_train_dataset,
    get_packed_val_dataset,
)
from task_encoders.model_inputs import to_packed_seq_params
from task_encoders.packs.tokenized import IGNORE_INDEX

logger = logging.getLogger(__name__)


class DataIterator:
    """An endless iterator over a loader, with the state that Megatron-LM saves as
    `--dataloader-save` says."""

    def __init__(self, loader: PackedLoader) -> None:
        self._loader = loader
        self._rows = itertools.chain.from_iterable(itertools.repeat(loader))

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def __next__(self) -> PackedBatch:
        return next(self._rows)

    def save_state(self) -> Any:
        """Plain values: torch.load refuses Energon's classes, and its state would be skipped."""
        return to_plain(self._loader.save_state_rank())

    def restore(self, path: str | Path) -> None:
        """Go on where a saved state was taken. Only before the first row."""
        saved = torch.load(path, map_location="cpu", weights_only=True)
        self._loader.restore_state_rank(from_plain(saved["dataloader_state_dict"]))


def build_dataloaders(
    args: Any, task_encoder: Any, restore_from: str | Path | None = None
) -> tuple[DataIterator | None, list[DataIterator] | None, None]:
    """Train and validation data on the ranks that read, in the order of the written packs.

    Args:
        args: Megatron-LM's, of which `data_path`, `micro_batch_size`, `num_workers` and
            `eval_iters` are used; a folder that is not validated needs no val split.
        restore_from: this rank's file of a saved state.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if parallel_state.get_tensor_model_parallel_rank() or stage not in (0, stages - 1):
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
        data.restore(restore_from)
    if not args.eval_iters:
        return data, None, None
    validation = get_packed_val_dataset(path, task_encoder, **options)
    return data, [DataIterator(get_packed_loader(validation))], None


def get_batch(data_iterator: Iterator[PackedBatch] | None, device: torch.device) -> PackedBatch:
    """The next batch with shifted labels, read by the first tensor parallel rank for all of them.

    Args:
        data_iterator: over Energon's loader; None on the other tensor parallel ranks.
        device: of the result.

    Raises:
        StopIteration: on all ranks, when the data ends.
    """
    read = next(data_iterator, None) if data_iterator is not None else None
    batch = broadcast_batch(read, device, parallel_state.get_tensor_model_parallel_group())
    if batch is None:
        raise StopIteration
    labels = shift_labels(batch.labels)
    return dataclasses.replace(batch, labels=labels, loss_mask=(labels != IGNORE_INDEX).float())


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Megatron-LM's loss with `--calculate-per-token-loss`: a sum and its number of tokens.

    Args:
        loss_mask: (1, S).
        output_tensor: (1, S) per-token losses.
    """
    loss = (output_tensor.float() * loss_mask).sum()
    num_tokens = loss_mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(
    data_iterator: Iterator[PackedBatch] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """Per-token losses of the next batch, and the function that reduces them."""
    batch = get_batch(data_iterator, next(model.parameters()).device)
    output_tensor = model(
        batch.tokens,
        batch.position_ids,
        to_packed_seq_params(batch),
        batch.imgs,
        batch.image_grid_thw,
        batch.labels,
        batch.pixel_values_videos,
        batch.video_grid_thw,
    )
    return output_tensor, functools.partial(loss_func, batch.loss_mask)


@click.command()
@click.argument("path")
@click.option("--tensor-parallel", default=1)
@click.option("--steps", default=2)
@click.option("--task-encoder", help="'module:Class', with PackedTaskEncoder's arguments")
def main(path: str, tensor_parallel: int, steps: int, task_encoder: str | None) -> None:
    """Train a tiny random model on the packs in PATH for a few steps."""
    from launch.config import DataConfig
    from launch.data.micro_batches import build_task_encoder
    from launch.data.packed_data import read_packed_data
    from launch.loop.parallel import initialize_parallel
    from launch.model.config import ModelConfig
    from launch.model.megatron_model import build_model

    device = initialize_parallel(tensor_parallel)
    data = read_packed_data(path)
    encoder = build_task_encoder(DataConfig(path=path, task_encoder=task_encoder), data)
    model = build_model(ModelConfig(family=data.model.family), device=device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    args = argparse.Namespace(data_path=path, micro_batch_size=1, num_workers=0, eval_iters=0)
    data_iterator, _, _ = build_dataloaders(args, encoder)
    for step in range(steps):
        output_tensor, reduce = forward_step(data_iterator, model)
        loss, num_tokens, _ = reduce(output_tensor)
        optimizer.zero_grad()
        (loss / num_tokens).backward()
        optimizer.step()
        mean = float(loss.detach() / num_tokens)
        logger.info("step %d: loss %.4f over %d tokens", step, mean, int(num_tokens))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main()

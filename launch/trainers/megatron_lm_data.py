"""The dataloaders of a Megatron-LM pretrain script, as in its multimodal example:

def train_valid_test_dataloaders_provider(num_samples):
    return build_dataloaders(get_args(), task_encoder)  # Qwen2VLTaskEncoder or any other

train_valid_test_dataloaders_provider.is_distributed = True
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.energon import WorkerConfig

from launch.data.loader_state import from_plain, to_plain
from task_encoders.energon_samples import PackedBatch
from task_encoders.loading.packed_dataset import (
    PackedLoader,
    get_packed_loader,
    get_packed_train_dataset,
    get_packed_val_dataset,
)


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
    """Train and validation data on the ranks that read, in the order packs were written in.

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
    path = args.data_path[0] if isinstance(args.data_path, list) else args.data_path
    train = get_packed_train_dataset(path, task_encoder, **options)
    data = DataIterator(get_packed_loader(train))
    if restore_from is not None:
        data.restore(restore_from)
    if not args.eval_iters:
        return data, None, None
    validation = get_packed_val_dataset(path, task_encoder, **options)
    return data, [DataIterator(get_packed_loader(validation))], None

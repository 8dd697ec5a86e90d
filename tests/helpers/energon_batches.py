"""Packs read through Energon's loader, as they were measured."""

from pathlib import Path
from typing import Any

from megatron.energon import WorkerConfig

from offline_packing.runs.run import Run
from task_encoders.energon_samples import PackedBatch
from task_encoders.loading.packed_dataset import (
    PackedLoader,
    get_packed_loader,
    get_packed_train_dataset,
)
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import PackingSettings


def encoder_of(run: Run, **options: Any) -> PackedTaskEncoder:
    """A task encoder for the packs of a run."""
    task = run.config.task
    settings = PackingSettings(packed=True, vqa=task == "vqa", bmr=task == "bmr")
    own = {"seq_length": run.config.pack.seq_length, "model": run.config.model}
    return PackedTaskEncoder(settings=settings, **(own | options))


def batches_of(
    path: Path, encoder: PackedTaskEncoder, workers: int = 0, **options: Any
) -> list[PackedBatch]:
    """All batches of an epoch; `options` are those of `get_packed_train_dataset`."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    given = {"repeat": False, "worker_config": config} | options
    loader = get_packed_loader(get_packed_train_dataset(path, encoder, **given))
    try:
        return list(loader)
    finally:
        PackedLoader.close(loader)

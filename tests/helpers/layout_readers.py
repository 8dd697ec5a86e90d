"""Packs in the layouts of other trainers, written by .venv's Python, whose Energon is newer than
theirs, and read through their task encoders."""

import subprocess
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from megatron.energon import WorkerConfig, get_loader, get_train_dataset
from PIL import ExifTags, Image

from task_encoders.loading.packed_folder import PackedFolder

REPOSITORY = Path(__file__).parents[2]


def pack_by_command(
    root: Path, source: Any, model: dict[str, Any], *, layout: str, seq_length: int
) -> Path:
    """Pack a source in a layout, and return the output."""
    config = {
        "source": source,
        "model": model,
        "pack": {"seq_length": seq_length, "max_set_aside": 0.5},
        "output": {"path": str(root / "packed"), "layout": layout},
        "engine": {"workers": 0},
    }
    root.mkdir(exist_ok=True)
    (root / "pack.yaml").write_text(yaml.safe_dump(config))
    command = [".venv/bin/python", "-m", "offline_packing", "run", "--deep"]
    subprocess.run(
        [*command, str(root / "pack.yaml")], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL
    )
    return root / "packed"


def batches_by_key(
    packed: Path, encoder: Any, handler: Callable[..., Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Key and batch of each pack, in one epoch through Energon's loader with a trainer's arguments.
    A pack that it cannot use is given to the handler and left out, and the next epoch begins
    early."""
    dataset = get_train_dataset(
        str(packed),
        batch_size=1,
        task_encoder=encoder,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        packing_buffer_size=None,
        handler=handler,
        image_decode="pil",
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
    )
    keys = {raw.key for raw in PackedFolder(packed)}
    for batch in islice(get_loader(dataset), len(keys)):
        key = batch["__key__"][0].partition("/")[2].partition(".")[0]
        assert key in keys, f"{key} comes again, though {sorted(keys)} did not come"
        keys.remove(key)
        yield key, batch


def is_turned(image: Image.Image) -> bool:
    """Return True if EXIF turns an image, which these trainers do not do."""
    return bool(image.getexif().get(ExifTags.Base.Orientation, 1) != 1)


def pictures(grids: torch.Tensor | None, *values: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Grid of each image or video, and its part of each tensor with a row per patch."""
    if grids is not None and len(grids):
        parts = (one.split(grids.prod(-1).tolist()) for one in values)
        yield from zip(grids.tolist(), *parts, strict=True)

"""Energon's own packing buffer and ours over the same images, for `benchmark_online.py energon`."""

import contextlib
import io
import multiprocessing
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from megatron.energon import WorkerConfig
from megatron.energon.flavors import BaseWebdatasetFactory
from PIL import Image
from planner_speed import peak_mib

from offline_packing.online.energon import OnlineTaskEncoder, get_online_train_dataset
from offline_packing.planner.windows import WindowOptions, WindowPlanner
from task_encoders.loading.packed_dataset import get_packed_loader, get_packed_train_dataset
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import PackingSettings


def write_images(folder: Path, count: int, side: int) -> Path:
    """Captioned JPEGs, prepared for Energon as a crude dataset."""
    pixels = np.random.default_rng(0).integers(0, 256, (side // 8, side // 8, 3), np.uint8)
    image = Image.fromarray(pixels).resize((side, side))
    with tarfile.open(folder / "images.tar", "w") as tar:
        for number in range(count):
            file = io.BytesIO()
            image.rotate(number).save(file, "JPEG", quality=85)
            caption = " ".join(["word"] * (number % 40 + 1))
            for part, data in (("jpg", file.getvalue()), ("txt", caption.encode())):
                info = tarfile.TarInfo(f"{number:06d}.{part}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    with contextlib.redirect_stdout(sys.stderr):
        BaseWebdatasetFactory.prepare_dataset(
            folder, ["images.tar"], split_parts_ratio=[("train", 1.0)], workers=1
        )
    yaml = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    (folder / ".nv-meta" / "dataset.yaml").write_text(yaml)
    return folder


def open_plain(path: Path, buffer: int, **options: Any) -> Any:
    """Energon's hook on the plain encoder."""
    encoder = PackedTaskEncoder(**options)
    return get_packed_train_dataset(
        path, encoder, worker_config=HERE, packing_buffer_size=buffer, repeat=False
    )


def open_online(path: Path, buffer: int, **options: Any) -> Any:
    """Ours."""
    encoder = OnlineTaskEncoder(**options)
    return get_online_train_dataset(path, encoder, worker_config=HERE, buffer=buffer, repeat=False)


HERE = WorkerConfig(rank=0, world_size=1, num_workers=0)
MODES = {"packing_buffer_size": open_plain, "get_online_train_dataset": open_online}


def pack_images(mode: str, path: Path, buffer: int, seq_length: int) -> dict[str, Any]:
    """A row of `energon`, measured in a process of its own."""
    context = multiprocessing.get_context("fork")
    results: Any = context.SimpleQueue()
    process = context.Process(target=_pack_images, args=(mode, path, buffer, seq_length, results))
    process.start()
    process.join()
    if process.exitcode:
        raise click.ClickException(f"{mode} ended with exit status {process.exitcode}")
    return {"mode": mode, **results.get()}


def _pack_images(mode: str, path: Path, buffer: int, seq_length: int, results: Any) -> None:
    settings = PackingSettings(packed=False)
    with contextlib.redirect_stdout(sys.stderr):
        dataset = MODES[mode](path, buffer, seq_length=seq_length, settings=settings)
        WindowPlanner(WindowOptions(seq_length=64, window=50)).push(np.arange(1, 51))  # compiled
        before, start = peak_mib(), time.perf_counter()
        first: float | None = None
        tokens = packs = 0
        for batch in get_packed_loader(dataset):
            first = first or time.perf_counter() - start
            packs += 1
            tokens += batch.num_tokens
    results.put(
        {
            "packs": packs,
            "fill %": f"{100 * tokens / (packs * seq_length):.2f}",
            "peak MiB": round(peak_mib() - before),
            "first pack, seconds": f"{first or 0:.1f}",
            "seconds": f"{time.perf_counter() - start:.1f}",
        }
    )

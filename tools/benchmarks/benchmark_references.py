"""Reading packs that refer to media, beside packs that hold copies of them.

    python tools/benchmarks/benchmark_references.py [--samples 4000] [--folder FOLDER]

Energon's loader reads every pack of an epoch in this process, and nothing is decoded. `cold`: the
system is asked to forget the files first (posix_fadvise), so that the disk is read.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import orjson
from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset
from PIL import Image

from offline_packing.config.packing import parse_config
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import plan
from offline_packing.runs.run import Run, build_engine
from offline_packing.write.write import write
from task_encoders.packed_task_encoder import cook
from task_encoders.packs.references import metadataset_of

LAYOUTS = ("energon", "references")


class _Bytes(DefaultTaskEncoder):
    """Packs as they are read."""

    decoder = None
    cookers = (Cooker(cook),)


def make_source(folder: Path, num_samples: int, num_bytes: int) -> None:
    """Write pictures of so many bytes, most of them after the end of the JPEG, with captions."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for i in range(num_samples):
        path = folder / f"{i:06d}.jpg"
        Image.new("RGB", (28 * int(rng.integers(8, 24)), 448), "red").save(path)
        with open(path, "ab") as file:
            file.write(rng.bytes(max(num_bytes - file.tell(), 0)))
        record = {"caption": "A red picture. " * int(rng.integers(2, 20))}
        path.with_suffix(".json").write_bytes(orjson.dumps(record))


def pack(source: Path, output: Path, layout: str) -> float:
    """Pack; seconds of writing."""
    config = parse_config(
        {
            "source": {"format": "pairs", "path": str(source), "task": "captioning"},
            "output": {"path": str(output), "layout": layout},
        }
    )
    with build_engine(config) as engine:
        run = Run(config, engine)
        samples = measure(run)
        planned = plan(run, samples)
        start = time.perf_counter()
        write(run, samples, planned)
    return time.perf_counter() - start


def forget(*folders: Path) -> None:
    """Ask the system to drop its copies of all files."""
    os.sync()
    for folder in folders:
        for path in filter(Path.is_file, folder.rglob("*")):
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def read(output: Path) -> tuple[float, int]:
    """Seconds of an epoch, and the bytes of its media."""
    dataset = get_train_dataset(
        metadataset_of(output),
        task_encoder=_Bytes(),
        batch_size=None,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        shuffle_over_epochs_multiplier=None,
        parallel_shard_iters=1,
        repeat=False,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )
    start = time.perf_counter()
    media = (getattr(pack, "parts", None) or pack.images for pack in get_loader(dataset))
    num_bytes = sum(len(data) for one in media for name, data in one.items() if "." in name)
    return time.perf_counter() - start, num_bytes


def main() -> None:
    """Print bytes on disk, seconds of writing, and MB/s of reading, warm and cold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--kilobytes", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        source = Path(name) / "source"
        make_source(source, arguments.samples, arguments.kilobytes * 1000)
        for layout in LAYOUTS:
            output = Path(name) / layout
            seconds = pack(source, output, layout)
            own = (path for path in output.iterdir() if path.is_file())
            meta = (output / ".nv-meta").glob("*")
            size = sum(path.stat().st_size for path in (*own, *meta))
            rates = []
            for is_cold in (True, False):
                if is_cold:
                    forget(source, output)
                taken, num_bytes = read(output)
                rates.append(num_bytes / taken / 1e6)
            print(
                f"{layout:<12}{size / 1e6:10.2f} MB  written in {seconds:6.2f} s  "
                f"read cold {rates[0]:7.0f}, warm {rates[1]:7.0f} MB/s",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Speed of `write`, compared with `cat`, `cp` and the usual way with webdataset's TarWriter.

    python tools/benchmarks/benchmark_write.py [--samples 2000] [--rounds 3] [--folder FOLDER]

All read the same loose JPEG and JSON files from the page cache, and sync what they write.
They take turns, so that a busy neighbor slows all of them; the best round of each counts. `write`
runs in one process, with its index files, Energon metadata and manifest; the usual way writes
packs as loose files first, then tars, then `energon prepare`. All rounds must write the same bytes.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import orjson
import webdataset
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from PIL import Image

from offline_packing.config.packing import parse_config
from offline_packing.engines.local import LocalEngine
from offline_packing.layouts.energon_metadata import hash_metadata
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import plan
from offline_packing.runs.artifacts import open_index, open_plan
from offline_packing.runs.run import Run
from offline_packing.write.write import write

PACKS_PER_SHARD = 100
#: JPEGs of 0.75 to 3 megapixels.
_MEGAPIXELS = (0.75, 3.0)
_WORDS = "a red circle stands left of the small blue square below two green stars".split()


def make_samples(folder: Path, count: int) -> None:
    """`count` pictures with captions. A few are encoded; the others share their bytes."""
    rng = np.random.default_rng(0)
    encoded = []
    for size in np.linspace(*_MEGAPIXELS, 16):
        width = int((size * 1e6 * 4 / 3) ** 0.5)
        noise = rng.integers(0, 256, (width * 3 // 32, width // 8, 3), dtype=np.uint8)
        picture = folder / "picture.jpg"
        Image.fromarray(noise).resize((width, width * 3 // 4)).save(picture, quality=88)
        encoded.append(picture.read_bytes())
    picture.unlink()
    for i in range(count):
        text = " ".join(rng.choice(_WORDS, rng.integers(20, 200)))
        (folder / f"{i:06d}.jpg").write_bytes(encoded[i % len(encoded)])
        (folder / f"{i:06d}.json").write_bytes(orjson.dumps({"caption": text}))


def make_run(source: Path, output: Path) -> Run:
    """A measured and planned run in this process."""
    config = parse_config(
        {
            "source": {"format": "pairs", "path": str(source), "task": "captioning"},
            "pack": {"seq_length": 16384},
            "output": {"path": str(output), "packs_per_shard": PACKS_PER_SHARD},
            "engine": {"workers": 0},
        }
    )
    run = Run(config, LocalEngine(0))
    plan(run, measure(run))
    return run


def cat_files(files: list[Path], target: Path) -> None:
    """`cat` of all files into one."""
    with open(target, "wb") as file:
        names = "\0".join(map(str, files)).encode()
        subprocess.run(["xargs", "-0", "cat"], input=names, stdout=file, check=True)
        os.fsync(file.fileno())


def copy_one(tar: Path, target: Path) -> None:
    """`cp` of one large file with the same bytes; no other has to be opened."""
    subprocess.run(["cp", "--reflink=never", tar, target], check=True)
    subprocess.run(["sync", target], check=True)


def write_webdataset(packs: list[list[Path]], target: Path) -> None:
    """The usual way to the same result: packs as loose files, TarWriter, `energon prepare`."""
    loose, shards = target / "raw_packing_data", target / "shards"
    loose.mkdir(parents=True)
    shards.mkdir()
    for number, images in enumerate(packs):
        names = [f"img{i:03d}.jpg" for i in range(len(images))]
        for name, image in zip(names, images, strict=True):
            shutil.copyfile(image, loose / f"ps_{number:08d}.{name}")
        captions = [orjson.loads(i.with_suffix(".json").read_bytes())["caption"] for i in images]
        record = {"images": names, "prompt": [""] * len(images), "captions": captions}
        (loose / f"ps_{number:08d}.json").write_bytes(orjson.dumps(record))
    pattern = f"{shards}/train-%06d.tar"
    with webdataset.ShardWriter(pattern, maxcount=PACKS_PER_SHARD, verbose=0) as writer:
        for path in sorted(loose.glob("*.json")):
            record = orjson.loads(path.read_bytes())
            media = {n: (loose / f"{path.stem}.{n}").read_bytes() for n in record["images"]}
            writer.write({"__key__": path.stem, **media, "json": record})
    for path in shards.iterdir():
        subprocess.run(["sync", path], check=True)
    names = sorted(path.name for path in shards.iterdir())
    WebdatasetPreparator.prepare_dataset(
        EPath(shards), names, split_parts_ratio=[("train", 1)], workers=1
    )


def tar_writer_alone(packs: list[list[Path]], target: Path) -> None:
    """webdataset's TarWriter on the source's files, without packs and metadata."""
    with open(target, "wb") as file:
        with webdataset.TarWriter(file) as writer:
            for image in (image for images in packs for image in images):
                record = orjson.loads(image.with_suffix(".json").read_bytes())
                writer.write({"__key__": image.stem, "jpg": image.read_bytes(), "json": record})
        os.fsync(file.fileno())


def seconds(function: Callable[[], object]) -> float:
    """Wall clock of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def digest(output: Path) -> dict[str, str]:
    """Hashes of all files that a trainer reads."""
    paths = [*output.glob("*.tar*"), *(output / ".nv-meta").iterdir(), output / "manifest.json"]
    return {path.name: hash_metadata(path) for path in paths}


def worker_peak(source: Path, output: Path) -> float:
    """Peak MiB of a worker process that writes all shards."""
    run = make_run(source, output)
    with LocalEngine(1) as engine:
        write(replace(run, engine=engine), open_index(run), open_plan(run))
        return next(engine.run(_own_peak, [0]))


def _own_peak(_: int) -> float:
    """Peak MiB of this process; its ru_maxrss would count the parent's at the fork."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Print one line per way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        run(Path(name), arguments.samples, arguments.rounds)


def run(base: Path, num_samples: int, rounds: int) -> None:
    """Run all rounds; the caller empties the folder."""
    source = base / "source"
    source.mkdir()
    make_samples(source, num_samples)
    files = sorted(source.iterdir())
    size = sum(path.stat().st_size for path in files) / 2**20
    best: dict[str, float] = {}
    digests = []
    for number in range(rounds):
        output = base / f"out{number}"
        for mode, taken in run_round(source, files, output, base / "target").items():
            best[mode] = min(best.get(mode, taken), taken)
        digests.append(digest(output))
        shutil.rmtree(output)
    own = best["offline-packing write"]
    print(f"{num_samples} samples, {size:.0f} MiB, one process, best of {rounds} rounds")
    for mode, taken in best.items():
        print(
            f"{mode:<26}{taken:6.2f} s{size / taken:7.0f} MiB/s, {taken / own:5.2f} of write's time"
        )
    print(f"byte-identical in all rounds: {all(found == digests[0] for found in digests)}")
    half = base / "half"
    half.mkdir()
    for path in files[: len(files) // 2]:
        os.link(path, half / path.name)
    for name, folder in (("half", half), ("all", source)):
        peak = worker_peak(folder, base / f"peak_{name}")
        print(f"peak memory of a worker, {name} of the samples: {peak:.0f} MiB")


def run_round(source: Path, files: list[Path], output: Path, target: Path) -> dict[str, float]:
    """Seconds of each way."""
    run = make_run(source, output)
    packs = open_plan(run).packs
    images = [path for path in files if path.suffix == ".jpg"]  # in the order of the index
    image_packs = [[images[i] for i in packs.pack(n)] for n in range(packs.num_packs)]
    modes: dict[str, Callable[[], object]] = {
        "cat, loose files": partial(cat_files, files, target),
        "offline-packing write": partial(write, run, open_index(run), open_plan(run)),
        "cp, one file": partial(copy_one, target.with_name("one"), target),
        "TarWriter alone": partial(tar_writer_alone, image_packs, target),
        "TarWriter, the whole way": partial(write_webdataset, image_packs, target),
    }
    taken = {}
    for mode, function in modes.items():
        taken[mode] = seconds(function)
        if mode.startswith("cat"):
            target.rename(target.with_name("one"))
        elif target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
    return taken


if __name__ == "__main__":
    main()

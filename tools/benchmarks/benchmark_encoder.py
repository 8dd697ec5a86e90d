"""Cost of the pixels of an image in each family, against transformers' processor and the floor.

    python -m tools.benchmarks.benchmark_encoder --images 12

JPEGs of 0.3 to 3 megapixels, each a pack of its own, through the task encoder on one core, in
processor time. The reference is transformers' image processor of the same backend on the decoded
picture, without any text; of the torch backend only with torchvision. The floor is decoding by
Pillow, resizing by Pillow's or torch's plain call to the sizes that the family resizes to, and one
copy of the patches' bytes into new memory. They run in turns, so that a busy neighbour slows all;
the shortest time counts.

    python -m tools.benchmarks.benchmark_encoder --pack [PICTURE ...]

The way of one pack of seven JPEGs (or the given ones) from disk to a batch, by `qwen2_vl`, in one
process: decoding alone, either transport, and micro batches of two packs; the page faults of each,
and the share of each part.
"""

import argparse
import cProfile
import importlib
import importlib.util
import io
import pstats
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import orjson
import pyarrow as pa
import torch
from PIL import Image

from offline_packing.layouts.energon_metadata import index_pack_folder
from offline_packing.storage.tars import TarShardWriter
from task_encoders.energon_samples import PackedSample
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.media.image import decode_image
from task_encoders.media.patches import BACKENDS
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.packs.pack import find_damage
from task_encoders.packs.pack_format import checksum
from task_encoders.settings import PackingSettings
from tests.helpers import torchvision_stub  # noqa: F401 - before transformers finds torchvision

ROUNDS = 5

_TILES = {"crop_to_patches": True, "image_mean": [0.485, 0.456, 0.406]}
_TILES |= {"image_std": [0.229, 0.224, 0.225], "max_patches": 12}
#: Family: transformers' model, its image processor, and its options where these are not ours.
PROCESSORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2_vl": (
        "qwen2_vl",
        "Qwen2VLImageProcessor",
        {"min_pixels": 3136, "max_pixels": 4_014_080},
    ),
    "gemma4": ("gemma4", "Gemma4ImageProcessor", {}),
    "gemma4_unified": ("gemma4_unified", "Gemma4UnifiedImageProcessor", {}),
    "mistral3": (
        "pixtral",
        "PixtralImageProcessor",
        {"size": {"longest_edge": 1540}, "patch_size": 28},
    ),
    "internvl3": (
        "got_ocr2",
        "GotOcr2ImageProcessor",
        {"size": {"height": 448, "width": 448}, **_TILES},
    ),
    "glm4v": ("glm4v", "Glm4vImageProcessor", {}),
    "glm46v": ("glm46v", "Glm46VImageProcessor", {}),
}


def draw_image(
    rng: np.random.Generator, height: int, width: int, image_format: str = "JPEG", **options: Any
) -> bytes:
    coarse = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def draw_images(count: int) -> list[bytes]:
    rng = np.random.default_rng(0)
    widths = [int((megapixels * 1e6 * 4 / 3) ** 0.5) for megapixels in np.linspace(0.3, 3, count)]
    return [draw_image(rng, width * 3 // 4, width, quality=90) for width in widths]


def encode_packs(task_encoder: PackedTaskEncoder, packs: list[PackedSample]) -> int:
    """Encode all packs as batches; returns the bytes of their pixels."""
    return sum(task_encoder.batch([task_encoder.encode_sample(pack)]).imgs.nbytes for pack in packs)


def resize_plainly(image: Image.Image, height: int, width: int, backend: str) -> None:
    """Resize by Pillow's or torch's plain call; torch's takes Pillow's four bytes per pixel where
    they are: three in memory of their own take as long to resize, and a copy before it."""
    if backend == "pil":
        np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    else:
        pixels = torch.from_dlpack(pa.array(image).flatten()).view(image.height, image.width, 4)
        batch = pixels[None].permute(0, 3, 1, 2)
        torch.nn.functional.interpolate(batch, (height, width), mode="bicubic", antialias=True)


def least_times(
    ways: dict[str, Callable[[], object]], clock: Callable[[], float]
) -> dict[str, float]:
    """The shortest time of each function, in seconds."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, run in ways.items():
            start = clock()
            run()
            best[name] = min(best[name], clock() - start)
    return best


def image_processor(family: str, backend: str) -> Any:
    """transformers' image processor of a family, by Pillow or by torch; None where it has none, or
    torchvision is missing."""
    model, name, options = PROCESSORS[family]
    module = f"transformers.models.{model}.image_processing_"
    if backend == "torch":
        if importlib.util.find_spec("torchvision") is None:
            return None
        return getattr(importlib.import_module(module + model), name)(**options)
    if importlib.util.find_spec(f"{module}pil_{model}") is None:
        return None
    return getattr(importlib.import_module(f"{module}pil_{model}"), f"{name}Pil")(**options)


def run_processor(processor: Any, files: list[bytes]) -> int:
    """Bytes of the values of all pictures."""
    return sum(
        processor(images=[decode_image(data)], return_tensors="pt")["pixel_values"].nbytes
        for data in files
    )


def packs_of(files: list[bytes]) -> list[PackedSample]:
    """A pack of each picture."""
    return [
        PackedSample(
            __key__=f"pack{i}",
            __restore_key__=(),
            record={"images": ["0.jpg"], "prompt": [""], "captions": [f"A picture {i}."]},
            media={"0.jpg": data},
        )
        for i, data in enumerate(files)
    ]


def sizes_resized_to(
    task_encoder: PackedTaskEncoder, packs: Sequence[PackedSample], backend: str
) -> list[list[tuple[int, int]]]:
    """(height, width) of each resizing of each picture."""
    resize, table = BACKENDS[backend]
    seen: list[tuple[int, int]] = []

    def record(image: Image.Image, height: int, width: int) -> Any:
        seen.append((height, width))
        return resize(image, height, width)

    found = []
    with patch.dict(BACKENDS, {backend: (record, table)}):  # type: ignore[arg-type]
        for pack in packs:
            task_encoder.encode_sample(pack)
            found.append(seen[:])
            seen.clear()
    return found


def run_floor(
    backend: str,
    files: list[bytes],
    sizes: list[list[tuple[int, int]]],
    patches: list[torch.Tensor],
) -> None:
    for data, of_picture, rows in zip(files, sizes, patches, strict=True):
        image = Image.open(io.BytesIO(data))
        image.load()
        for height, width in of_picture:
            if backend == "pil" or (height, width) != (image.height, image.width):
                resize_plainly(image, height, width, backend)
        rows.clone()


def compare(family: str, backends: Sequence[str], files: list[bytes], folder: Path) -> None:
    """Print a line for each backend and transport."""
    processor = "builtin"
    if family != "qwen2_vl":
        from tests.helpers.tiny_families import save_tokenizer  # imports transformers' models

        save_tokenizer(family, folder)
        processor = str(folder)
    packs, settings = packs_of(files), PackingSettings(packed=True)
    ways: dict[str, Callable[[], object]] = {}
    for backend in backends:
        reference = image_processor(family, backend)
        if reference is not None:
            ways[f"{backend} transformers"] = partial(run_processor, reference, files)
        for transport in ("float32", "uint8"):
            encoder = PackedTaskEncoder(
                seq_length=65_536,
                settings=settings,
                family=family,
                processor=processor,
                resize=backend,
                pixel_transport=transport,
            )
            size = encode_packs(encoder, packs)  # compiles and loads once
            # Gemma's processors pad pictures.
            if reference and transport == "float32" and not family.startswith("gemma4"):
                assert size == run_processor(reference, files), "other sizes than transformers'"
            ways[f"{backend} {transport}"] = partial(encode_packs, encoder, packs)
        sizes = sizes_resized_to(encoder, packs, backend)
        rows = [encoder.encode_sample(pack).row.pixel_values for pack in packs]
        ways[f"{backend} floor"] = partial(run_floor, backend, files, sizes, rows)
    best = least_times(ways, time.process_time)
    for way, duration in best.items():
        backend, name = way.split()
        line = f"{family:14s} {way:18s} {1e3 * duration / len(files):7.1f} ms an image"
        if name != "floor":
            line += f"  {duration / best[f'{backend} floor']:5.2f} times the floor"
        if name not in ("floor", "transformers") and f"{backend} transformers" in best:
            line += f"  {best[f'{backend} transformers'] / duration:5.2f} times transformers"
        print(line, flush=True)


#: Parts of a pack's way, by their functions; the rest reads, and makes tokens.
PARTS = {
    "decode": ("image.py decode_image",),
    "resize": ("patches.py _resize_as_pillow", "patches.py _resize_as_torch"),
    "cut": ("patches.py cut",),
    "write pixels": tuple(f"concatenate.py {name}" for name in ("tensor", "_media", "merge_rows")),
}
PACKS_OF_A_ROW = 2


def write_packs(files: Sequence[bytes], folder: Path) -> None:
    """Write packs of these pictures, as many as a micro batch has."""
    members = [(f"img{i:03d}.jpg", data) for i, data in enumerate(files)]
    record = {
        "images": [name for name, _ in members],
        "prompt": [""] * len(files),
        "captions": [f"A picture {i}." for i in range(len(files))],
    }
    with open(folder / "train-000000.tar", "wb") as file:
        writer = TarShardWriter(file)
        for number in range(PACKS_OF_A_ROW):
            writer.add(f"ps_{number:08d}", [*members, ("json", orjson.dumps(record))])
        writer.finish()
    index_pack_folder(folder, "captioning")


def spent() -> tuple[float, float, int]:
    """Processor seconds, those of them in the kernel, and page faults of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_stime, used.ru_minflt


def shares(run: Callable[[], object]) -> str:
    """The share of each part."""
    profile = cProfile.Profile(time.process_time)
    profile.enable()
    for _ in range(ROUNDS):
        run()
    profile.disable()
    found: Any = pstats.Stats(profile)
    taken = {f"{Path(file).name} {name}": t for (file, _, name), (*_, t, _) in found.stats.items()}
    of_parts = {part: sum(taken.get(name, 0.0) for name in names) for part, names in PARTS.items()}
    of_parts["the rest"] = found.total_tt - sum(of_parts.values())
    return ", ".join(f"{part} {t / found.total_tt:.0%}" for part, t in of_parts.items())


def follow_pack(files: Sequence[bytes], backend: str, folder: Path) -> None:
    """Print a line for each way, and the parts of a pack's way."""
    write_packs(files, folder)
    ways: dict[str, Callable[[], object]] = {
        "decoding alone": lambda: [decode_image(data) for data in files]
    }
    for transport in ("uint8", "float32"):
        encoder = PackedTaskEncoder(
            seq_length=65_536,
            settings=PackingSettings(packed=True),
            resize=backend,
            pixel_transport=transport,
        )
        packs = PackedFolder(folder, encoder)
        ways[transport] = partial(packs.batch, [0])
        ways[f"{transport}, {PACKS_OF_A_ROW} packs"] = partial(packs.batch, range(PACKS_OF_A_ROW))
    for run in (*ways.values(), *ways.values()):
        run()  # compiles and loads once
    found: dict[str, list[Any]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            before = spent()
            run()
            found[name].append(np.subtract(spent(), before))
    per_pack = {
        name: np.array(rounds) / (PACKS_OF_A_ROW if "," in name else 1)
        for name, rounds in found.items()
    }
    for name, rounds in per_pack.items():
        seconds, kernel, faults = np.median(rounds, axis=0)
        ratios = [
            float(np.median(rounds[:, 0] / per_pack[other][:, 0]))  # of each round
            for other in ("decoding alone", name.replace("float32", "uint8"))
        ]
        print(
            f"{backend:5s} {name:16s} {1e3 * seconds:6.1f} ms a pack, {1e3 * kernel:6.1f} in the "
            f"kernel, {faults:7.0f} page faults; {ratios[0]:5.2f} times decoding, {ratios[1]:5.2f} "
            "times uint8"
        )
    for name in ("uint8", "float32", f"float32, {PACKS_OF_A_ROW} packs"):
        print(f"{backend:5s} {name}: {shares(ways[name])}", flush=True)


#: (height, width) of pictures whose checksums are compared with decoding them.
SIZES = ((336, 336), (480, 640), (768, 1024), (1080, 1920))


def compare_checksums() -> None:
    """Print the time of the checksum that readers compare before a picture is decoded."""
    rng = np.random.default_rng(0)
    for height, width in SIZES:
        for image_format, options in (("JPEG", {"quality": 90}), ("PNG", {})):
            data = draw_image(rng, height, width, image_format, **options)
            names, expected = ["img000.jpg"], {"img000.jpg": checksum(data)}
            ways: dict[str, Callable[[], object]] = {
                "checksum": lambda d=data, n=names, e=expected: [
                    find_damage(n, [d], e) for _ in range(100)
                ],
                "decoding": lambda d=data: [decode_image(d) for _ in range(5)],
            }
            spent = least_times(ways, time.process_time)
            checked, decoded = spent["checksum"] / 100, spent["decoding"] / 5
            print(
                f"{image_format:4s} {width}x{height}, {len(data):9,} bytes: checksum "
                f"{1e6 * checked:6.1f} us, decoding {1e3 * decoded:6.2f} ms: "
                f"{checked / decoded:.2%}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument("--families", nargs="+", choices=PROCESSORS, default=list(PROCESSORS))
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--pack", nargs="*", type=Path, metavar="PICTURE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.pack is not None:
        pictures = [path.read_bytes() for path in arguments.pack] or draw_images(7)
        for backend in arguments.backends:
            with tempfile.TemporaryDirectory() as folder:
                follow_pack(pictures, backend, Path(folder))
        return
    files = draw_images(arguments.images)
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as folder:
            compare(family, arguments.backends, files, Path(folder))
    compare_checksums()


if __name__ == "__main__":
    main()

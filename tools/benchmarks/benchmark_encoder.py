"""Cost of the pixels of an image in each family, against transformers' processor and the floor.

    python -m tools.benchmarks.benchmark_encoder --images 12

JPEGs of 0.3 to 3 megapixels, each a pack of its own, through the task encoder on one core, in
processor time. The reference is transformers' image processor of the same backend on the decoded
picture, without any text; of the torch backend only with torchvision. The floor is decoding by
Pillow, resizing by Pillow's or torch's plain call to the sizes that the family resizes to, and one
copy of the patches' bytes into new memory. They run in turns, so that a busy neighbour slows all;
the shortest time counts.
"""

import argparse
import importlib
import importlib.util
import io
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

from task_encoders.energon_samples import PackedSample
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


def draw_images(count: int) -> list[bytes]:
    rng = np.random.default_rng(0)
    files = []
    for megapixels in np.linspace(0.3, 3, count):
        width = int((megapixels * 1e6 * 4 / 3) ** 0.5)
        height = int(megapixels * 1e6 / width)
        coarse = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
        image.save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    return files


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


#: (height, width) of pictures whose checksums are compared with decoding them.
SIZES = ((336, 336), (480, 640), (768, 1024), (1080, 1920))


def compare_checksums() -> None:
    """Print the time of the checksum that readers compare before a picture is decoded."""
    rng = np.random.default_rng(0)
    for height, width in SIZES:
        coarse = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
        for image_format, options in (("JPEG", {"quality": 90}), ("PNG", {})):
            buffer = io.BytesIO()
            image.save(buffer, image_format, **options)
            data = buffer.getvalue()
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
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    files = draw_images(arguments.images)
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as folder:
            compare(family, arguments.backends, files, Path(folder))
    compare_checksums()


if __name__ == "__main__":
    main()

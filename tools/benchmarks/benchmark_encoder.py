"""Cost of encoding a pack, compared with transformers' processor and with its lower bound.

    python tools/benchmarks/benchmark_encoder.py --images 60

JPEGs of 0.3 to 3 megapixels with a short dialogue each, in packs of 8,192 tokens, through the task
encoder on one core, in processor time. The reference is transformers' Pillow image processor and
tokenizer per sub-sample; the floor of a backend is decoding and resizing by Pillow's, numpy's and
torch's plain calls. They run in turns, so that a busy neighbour slows all; the shortest time
counts. Two threads are compared with one in elapsed time: that needs two idle cores.
"""

import argparse
import io
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from task_encoders.energon_samples import PackedSample
from task_encoders.families import build_sample_encoder
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.media.image import decode_image
from task_encoders.media.patches import BACKENDS
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.samples import SourceSample, Turn
from task_encoders.settings import PackingSettings
from task_encoders.text.pieces import to_chat

ROUNDS = 5
SEQ_LENGTH = 8192
TEXT = "What does the picture show, and what stands to the left of it? " * 4


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


def sample_of(i: int) -> SourceSample:
    return SourceSample(f"s{i}", "vqa", (Turn(f"<image>{TEXT}", f"{TEXT} {i}"),), ("a.jpg",))


def make_packs(encoder: Any, files: list[bytes]) -> list[PackedSample]:
    """The samples in order, as many per pack as fit."""
    packs: list[list[int]] = []
    room = 0
    for i, data in enumerate(files):
        with Image.open(io.BytesIO(data)) as image:
            length = encoder.measure(sample_of(i), [image.size[::-1]]).num_tokens
        if length > room:
            packs.append([])
            room = SEQ_LENGTH
        packs[-1].append(i)
        room -= length
    return [
        PackedSample(
            __key__=f"pack{number}",
            __restore_key__=(),
            record={
                "images": [[f"{i}.jpg"] for i in numbers],
                "prompt": [[f"<image>{TEXT}"] for _ in numbers],
                "captions": [[f"{TEXT} {i}"] for i in numbers],
                "meta": {"task": "vqa", "keys": [f"s{i}" for i in numbers]},
            },
            media={f"{i}.jpg": files[i] for i in numbers},
        )
        for number, numbers in enumerate(packs)
    ]


def encode_packs(task_encoder: PackedTaskEncoder, packs: list[PackedSample]) -> int:
    """Encode all packs as batches; returns the bytes of their pixels."""
    return sum(task_encoder.batch([task_encoder.encode_sample(pack)]).imgs.nbytes for pack in packs)


def resize_plainly(image: Image.Image, height: int, width: int, backend: str) -> None:
    """Resize by Pillow's, numpy's and torch's plain calls."""
    if backend == "pil":
        np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    else:
        batch = torch.from_numpy(np.array(image))[None].permute(0, 3, 1, 2)
        torch.nn.functional.interpolate(batch, (height, width), mode="bicubic", antialias=True)


def resize_only(encoder: Any, files: list[bytes]) -> None:
    for data in files:
        image = decode_image(data)
        _, rows, columns = encoder.image_medium(image.height, image.width).grid
        height, width = rows * encoder.vision.patch_size, columns * encoder.vision.patch_size
        resize_plainly(image, height, width, encoder.vision.resize)


def tokenize_only(encoder: Any, count: int) -> None:
    for i in range(count):
        encoder.measure(sample_of(i), [(56, 56)])


def run_transformers(processor: Any, files: list[bytes]) -> None:
    for i, data in enumerate(files):
        text = processor.apply_chat_template(to_chat(sample_of(i)), tokenize=False)
        processor(text=[text], images=[decode_image(data)], return_tensors="np")


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


#: (height, width) of a picture before and after it is resized.
RESIZINGS = (((768, 1024), (756, 1008)), ((1080, 1920), (728, 1316)), ((3000, 4000), (1008, 1344)))


def compare_resizing() -> None:
    """Print the time of resizing alone, by Pillow's and torch's plain calls and by the encoder."""
    rng = np.random.default_rng(0)
    for before, after in RESIZINGS:
        image = Image.fromarray(rng.integers(0, 256, (*before, 3), dtype=np.uint8))
        ways: dict[str, Callable[[], object]] = {}
        for name, (resize, _) in BACKENDS.items():
            ways[f"{name}'s call"] = partial(resize_plainly, image, *after, name)
            ways[f"as {name}"] = partial(resize, image, *after)
            resize(image, *after)  # compiles and loads once
        times = least_times(ways, time.process_time)
        times_of_all = ", ".join(f"{way} {1e3 * spent:.1f} ms" for way, spent in times.items())
        print(f"{before} to {after}: {times_of_all}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=24)
    count = parser.parse_args().images
    torch.set_num_threads(1)
    files = draw_images(count)
    settings = PackingSettings(packed=True, vqa=True)

    def task_encoder(**options: Any) -> PackedTaskEncoder:
        return PackedTaskEncoder(seq_length=SEQ_LENGTH, settings=settings, **options)

    encoders: dict[str, Any] = {name: build_sample_encoder(resize=name) for name in BACKENDS}
    options = encoders["pil"].options
    processor = builtin_processor(min_pixels=options.min_pixels, max_pixels=options.max_pixels)
    packs = make_packs(encoders["pil"], files)
    ways: dict[str, Callable[[], object]] = {
        "transformers": partial(run_transformers, processor, files),
        "tokenizing": partial(tokenize_only, encoders["pil"], count),
    }
    threads: dict[str, Callable[[], object]] = {}
    sizes: dict[str, int] = {}
    for name, encoder in encoders.items():
        ways[f"{name} floor"] = partial(resize_only, encoder, files)
        for transport in ("float32", "uint8"):
            made = task_encoder(resize=name, pixel_transport=transport)
            sizes[transport] = encode_packs(made, packs)  # also compiles and loads once
            ways[f"{name} {transport}"] = partial(encode_packs, made, packs)
            for number in (1, 2):
                made = task_encoder(resize=name, pixel_transport=transport, encode_threads=number)
                threads[f"{name} {transport} {number}"] = partial(encode_packs, made, packs)
    best = least_times(ways, time.process_time)
    for way, duration in best.items():
        line = f"{way:13s} {1e3 * duration / count:8.2f} ms an image"
        if way.endswith(("32", "8")):
            line += (
                f"  {best['transformers'] / duration:5.2f} times transformers"
                f"  {duration / best[way.split()[0] + ' floor']:.2f} times its floor"
                f"  {best['tokenizing'] / duration:6.2%} of it tokenizing"
            )
        print(line)
    compare_resizing()
    print(f"bytes of pixels: float32 / uint8 {sizes['float32'] / sizes['uint8']:.2f}")
    elapsed = least_times(threads, time.perf_counter)
    for way in ways:
        if way.endswith(("32", "8")):
            print(
                f"{way:13s} two threads {elapsed[f'{way} 1'] / elapsed[f'{way} 2']:.2f} times one"
            )


if __name__ == "__main__":
    main()

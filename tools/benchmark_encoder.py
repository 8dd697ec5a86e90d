"""What encoding a sub-sample costs, against transformers' processor and against the least it can.

    python tools/benchmark_encoder.py --images 60

JPEGs of 0.3 to 3 megapixels with a short dialogue each, on one core, in processor time. The
reference is transformers' Pillow image processor and tokenizer per sub-sample; the floor of a
backend is decoding and resizing. Each is measured in turns, so that a busy neighbour slows all; the
least time counts.
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

from task_encoders.concatenate import concatenate
from task_encoders.families import build_sample_encoder
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.families.encoder import FamilyEncoder
from task_encoders.media.image import decode_image, image_grid
from task_encoders.media.patches import RESIZERS
from task_encoders.samples import SourceSample, Turn
from task_encoders.text.chat_templates import to_messages

ROUNDS = 5
SEQ_LENGTH = 8192


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
    text = "What does the picture show, and what stands to the left of it? " * 4
    return SourceSample(f"s{i}", "vqa", (Turn(f"<image>{text}", f"{text} {i}"),), ("a.jpg",))


def encode_packs(encoder: FamilyEncoder, files: list[bytes]) -> int:
    """All images in rows of up to SEQ_LENGTH tokens; returns the bytes of their pixels."""
    pack: list[Any] = []
    used = size = 0
    for i, data in enumerate(files):
        encoded = encoder.encode(sample_of(i), [data])
        if pack and used + len(encoded.tokens) > SEQ_LENGTH:
            row = concatenate(pack, pad_token_id=encoder.pad_token_id)
            size += row.pixel_values.nbytes
            pack, used = [], 0
        pack.append(encoded)
        used += len(encoded.tokens)
    return size + concatenate(pack, pad_token_id=encoder.pad_token_id).pixel_values.nbytes


def resize_only(encoder: Any, files: list[bytes]) -> None:
    resize, _ = RESIZERS[encoder.vision.resize]
    for data in files:
        image = decode_image(data)
        _, rows, columns = image_grid(image.height, image.width, encoder.vision)
        resize(image, rows * encoder.vision.patch_size, columns * encoder.vision.patch_size)


def run_transformers(processor: Any, files: list[bytes]) -> None:
    for i, data in enumerate(files):
        text = processor.apply_chat_template(to_messages(sample_of(i)), tokenize=False)
        processor(text=[text], images=[decode_image(data)], return_tensors="np")


def least_times(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Processor seconds of each way."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, run in ways.items():
            start = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=24)
    count = parser.parse_args().images
    torch.set_num_threads(1)
    files = draw_images(count)
    encoders: dict[str, Any] = {name: build_sample_encoder(resize=name) for name in RESIZERS}
    options = encoders["pil"].options
    processor = builtin_processor(min_pixels=options.min_pixels, max_pixels=options.max_pixels)
    for encoder in encoders.values():
        encode_packs(encoder, files[:1])  # what is compiled or loaded once
    ways: dict[str, Callable[[], object]] = {
        "transformers": lambda: run_transformers(processor, files)
    }
    for name, encoder in encoders.items():
        ways[f"floor {name}"] = partial(resize_only, encoder, files)
        ways[f"ours {name}"] = partial(encode_packs, encoder, files)
    best = least_times(ways)
    for name, duration in best.items():
        print(f"{name:13s} {1e3 * duration / count:8.1f} ms an image")
    for name in encoders:
        ours = best[f"ours {name}"]
        print(
            f"{name:5s} {best['transformers'] / ours:.2f} times transformers, "
            f"{ours / best[f'floor {name}']:.2f} times its floor"
        )


if __name__ == "__main__":
    main()

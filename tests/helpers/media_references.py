"""Images as transformers' processors take them."""

import io
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageOps

from task_encoders.model_inputs import to_transformers_kwargs
from task_encoders.samples import SourceSample, Turn
from tests.helpers.tiny_checkpoints import packed_batch


def opened(data: bytes) -> Image.Image:
    """An image upright, and in RGB unless a processor composes it on white."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    return image if image.has_transparency_data else image.convert("RGB")


def by_both(
    encoder: Any, processor: Any, files: list[bytes], num_images: int
) -> Iterator[tuple[Any, Any, Any]]:
    """For each run of so many images: their sample encoded, as arguments of transformers' model,
    and what transformers' processor makes of the images."""
    prompt = "a".join(["<image>"] * num_images)
    names = tuple(map(str, range(num_images)))
    sample = SourceSample("k", "vqa", (Turn(prompt, "b"),), names)
    assert len(files) >= num_images
    for begin in range(0, len(files) - num_images + 1, num_images):
        data = files[begin : begin + num_images]
        encoded = encoder.encode(sample, data)
        images = [opened(one) for one in data]
        yield (
            encoded,
            to_transformers_kwargs(packed_batch([encoded])),
            processor(images, return_tensors="np"),
        )

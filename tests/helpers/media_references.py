"""Images as transformers' processors take them, and the files of a folder of real ones."""

import importlib.util
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageOps

from task_encoders.media.image import decode_image
from task_encoders.model_inputs import to_transformers_kwargs
from task_encoders.packs.pack_format import MEDIA_EXTENSIONS, is_video_name
from task_encoders.samples import SampleError, SourceSample, Turn
from tests.helpers.tiny_checkpoints import packed_batch

_NEEDS_TORCHVISION = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="needs torchvision"
)
#: Marks a test that resizes as each of transformers' backends.
BACKENDS = pytest.mark.parametrize(
    "resize", ["pil", pytest.param("torch", marks=_NEEDS_TORCHVISION)]
)


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


def real_media(root: str) -> list[Path]:
    """Images and videos under a folder. There are some."""
    found = [path for path in sorted(Path(root).rglob("*")) if path.suffix[1:] in MEDIA_EXTENSIONS]
    assert found, f"no image or video under {root}"
    return found


def real_pictures(root: str) -> list[bytes]:
    """Bytes of the images under a folder that can be used: nine in ten of them, or more."""
    files = [path.read_bytes() for path in real_media(root) if not is_video_name(path.name)]
    usable = []
    for data in files:
        try:
            decode_image(data)
        except SampleError:
            continue
        usable.append(data)
    assert len(usable) >= 0.9 * len(files) > 3
    return usable


def real_videos(root: str) -> list[Path]:
    """Videos under a folder. Skips a test where there are none."""
    found = [path for path in real_media(root) if is_video_name(path.name)]
    if not found:
        pytest.skip(f"no video under {root}; name a folder of some by --real-data")
    return found


def real_samples(
    encoder: Any, root: str, folder: Path
) -> Iterator[tuple[SourceSample, list[bytes], list[bytes]]]:
    """A question about each image or video under `root`, which is copied to `folder`, with its
    bytes as an image or a video. Those that are set aside, at most one in ten, are left out."""
    media, num_usable = real_media(root), 0
    for path in media:
        of_video = is_video_name(path.name)
        tag, kind = ("<video>", "videos") if of_video else ("<image>", "images")
        turns = (Turn(f"{tag}What is it?", path.stem),)
        sample = SourceSample("r", "vqa", turns, **{kind: (path.name,)})
        data = [path.read_bytes()]
        (folder / path.name).write_bytes(data[0])
        files, clips = ([], data) if of_video else (data, [])
        try:
            encoder.encode(sample, files, clips)
        except SampleError:
            continue
        num_usable += 1
        yield sample, files, clips
    assert num_usable >= 0.9 * len(media)


def wrong_files(
    encoder: Any, root: str, folder: Path, differences: Callable[..., list[str]]
) -> list[tuple[str, list[str]]]:
    """Names of the files of `real_samples` that differ, and what differs, which
    `differences(sample, folder, images, videos)` names."""
    return [
        (sample.media[0], found)
        for sample, files, clips in real_samples(encoder, root, folder)
        if (found := differences(sample, folder, files, clips))
    ]

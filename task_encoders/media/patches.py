"""The patches of images and of video frames, as a vision tower takes them, in bytes.

There are two ways to resize, with slightly different results: Pillow's, and torch's on bytes, five
times as fast. Each, with its normalisation, equals one of transformers' two bit for bit.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from PIL import Image

from task_encoders.media.image import VisionSettings, image_grid
from task_encoders.media.pixel_values import (
    Bytes,
    Normalisation,
    Values,
    normalise_at_once,
    rescale_then_normalise,
)


def image_patches(
    image: Image.Image, settings: VisionSettings
) -> tuple[Bytes, tuple[int, int, int]]:
    """A decoded image as patches, in the order the vision tower merges them.

    Returns:
        bytes (t·h·w, C·p·p) and the grid (t, h, w). `normalisation` turns them into pixel values,
        bit-identical to those of transformers' image processor with the same backend.

    Raises:
        SampleError: aspect_ratio.
    """
    grid = image_grid(image.height, image.width, settings)
    return frame_patches([image], grid, 1, settings), grid


def frame_patches(
    frames: Iterable[Image.Image], grid: tuple[int, int, int], depth: int, settings: VisionSettings
) -> Bytes:
    """RGB frames as patches (t·h·w, C·depth·p·p), each frame resized to the grid's size.

    A grid of t takes up to t·depth frames, in order; the last one is repeated where there are
    fewer.
    """
    from task_encoders.media.patch_kernel import cut_patches  # numba takes half a second

    grid_t, grid_h, grid_w = grid
    patch = settings.patch_size
    resize, _ = BACKENDS[settings.resize]
    rows = np.empty((grid_t, grid_h * grid_w, 3, depth, patch**2), dtype=np.uint8)
    number = -1
    for number, frame in enumerate(frames):
        resized = resize(frame, grid_h * patch, grid_w * patch)
        cut_patches(resized, settings.merge_size, patch, rows[number // depth], number % depth)
    within = number % depth
    rows[-1, :, :, within + 1 :] = rows[-1, :, :, within : within + 1]
    return rows.reshape(grid_t * grid_h * grid_w, -1)


def normalisation(settings: VisionSettings) -> Normalisation:
    """The conversion of the patches' bytes to pixel values."""
    _, table = BACKENDS[settings.resize]
    return Normalisation(table(settings.mean, settings.std), settings.temporal_patch_size)


def _in_one_piece(image: Image.Image) -> pa.Array | None:
    """The bytes of an RGB image, four for each pixel, as Pillow holds them. None for an image that
    it holds in several blocks, which are of 16 MB."""
    try:
        return pa.array(image).flatten()
    except ValueError:
        return None


def _resize_with_pillow(image: Image.Image, height: int, width: int) -> Bytes:
    """(H, W, 3 or 4), the fourth without meaning."""
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    array = _in_one_piece(resized)
    return np.asarray(resized) if array is None else array.to_numpy().reshape(height, width, 4)


def _resize_with_torch(image: Image.Image, height: int, width: int) -> Bytes:
    """(H, W, 3 or 4), resized as torchvision resizes bytes on a CPU with AVX2 or later."""
    import torch

    array = _in_one_piece(image)
    pixels = torch.from_numpy(np.array(image)) if array is None else torch.from_dlpack(array)
    pixels = pixels.view(image.height, image.width, -1)
    if pixels.shape[:2] != (height, width):
        # Its loops for interleaved channels take 3.9 ms where those for planes take 9.1.
        batch = torch.nn.functional.interpolate(
            pixels[None].permute(0, 3, 1, 2), (height, width), mode="bicubic", antialias=True
        )
        pixels = batch[0].permute(1, 2, 0)
    return pixels.numpy()


_Resize = Callable[[Image.Image, int, int], Bytes]
_Table = Callable[[Sequence[float], Sequence[float]], Values]

#: Backends of transformers: how they resize, and the value of each byte.
BACKENDS: Final[Mapping[str, tuple[_Resize, _Table]]] = {
    "pil": (_resize_with_pillow, rescale_then_normalise),
    "torch": (_resize_with_torch, normalise_at_once),
}

"""The patches of images and of video frames, as a vision tower takes them.

Two ways to resize, which differ in a few values of 255: Pillow's, and torch's on bytes, two to five
times as fast. Each is one of transformers' two, bit for bit, with its way to normalise.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from task_encoders.media.image import VisionSettings, decode_image, image_grid

Bytes = npt.NDArray[np.uint8]


def image_patches(
    data: bytes, settings: VisionSettings
) -> tuple[npt.NDArray[np.float32], tuple[int, int, int]]:
    """An image file as normalised patches, in the order the vision tower merges them.

    Returns:
        pixel_values (t·h·w, C·T·p·p) and the grid (t, h, w). Bit-identical to transformers' image
        processor of the same backend.

    Raises:
        SampleError: as read_image_header, or aspect_ratio.
    """
    image = decode_image(data, max_image_pixels=settings.max_image_pixels)
    grid = image_grid(image.height, image.width, settings)
    return frame_patches([image], grid, settings), grid


def frame_patches(
    frames: Iterable[Image.Image], grid: tuple[int, int, int], settings: VisionSettings
) -> npt.NDArray[np.float32]:
    """RGB frames as patches (t·h·w, C·T·p·p), each frame resized to the grid's size.

    A grid of t takes up to t·T frames, in order; the last one is repeated where there are fewer. An
    image is one frame.
    """
    from task_encoders.media.patch_kernel import write_patches  # numba takes half a second

    grid_t, grid_h, grid_w = grid
    patch, depth = settings.patch_size, settings.temporal_patch_size
    resize, table_of = RESIZERS[settings.resize]
    table = table_of(settings)
    pixel_values = np.empty((grid_t, grid_h * grid_w, 3, depth, patch**2), dtype=np.float32)
    number = -1
    frames = iter(frames)
    frame = next(frames, None)
    while frame is not None:
        following = next(frames, None)
        number += 1
        t, within = divmod(number, depth)
        until = depth if following is None or within + 1 == depth else within + 1
        resized = resize(frame, grid_h * patch, grid_w * patch)
        write_patches(resized, table, settings.merge_size, patch, pixel_values[t], within, until)
        frame = following
    return pixel_values.reshape(grid_t * grid_h * grid_w, settings.patch_dim)


def _resize_with_pillow(image: Image.Image, height: int, width: int) -> Bytes:
    """(H, W, 3)"""
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def _resize_with_torch(image: Image.Image, height: int, width: int) -> Bytes:
    """(H, W, 3). What torchvision does with bytes on a CPU, where that has AVX2 or later."""
    import torch

    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    if pixels.shape[2:] != (height, width):
        pixels = torch.nn.functional.interpolate(
            pixels, (height, width), mode="bicubic", antialias=True
        )
    return pixels[0].permute(1, 2, 0).contiguous().numpy()


def byte_values(mean: Sequence[float], std: Sequence[float]) -> npt.NDArray[np.float32]:
    """(3, 256): what transformers' Pillow backend makes of each byte, in its order of operations
    and types."""
    rescaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    means = np.array(mean, dtype=np.float32)[:, None]
    return (rescaled - means) / np.array(std, dtype=np.float32)[:, None]


def _rescale_then_normalise(settings: VisionSettings) -> npt.NDArray[np.float32]:
    return byte_values(settings.mean, settings.std)


def _normalise_at_once(settings: VisionSettings) -> npt.NDArray[np.float32]:
    """The same of its torch backend, which puts the rescaling into mean and std."""
    factor = np.float32(1.0 / (1 / 255))
    mean = np.array(settings.mean, dtype=np.float32)[:, None] * factor
    std = np.array(settings.std, dtype=np.float32)[:, None] * factor
    return (np.arange(256, dtype=np.float32) - mean) / std


_Resize = Callable[[Image.Image, int, int], Bytes]
_Table = Callable[[VisionSettings], npt.NDArray[np.float32]]

#: Backends of transformers: how they resize, and what they make of each byte.
RESIZERS: Final[Mapping[str, tuple[_Resize, _Table]]] = {
    "pil": (_resize_with_pillow, _rescale_then_normalise),
    "torch": (_resize_with_torch, _normalise_at_once),
}

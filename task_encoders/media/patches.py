"""The patches of images and of video frames, as a vision tower takes them, and their values.

There are two ways to resize, with slightly different results: Pillow's, and torch's on bytes, five
times as fast. Each, with its normalisation, equals one of transformers' two bit for bit.

Patches stay bytes as long as possible: an image's `pixel_values` take four bytes per value and
repeat its frame T times, which for Qwen2-VL is eight times the size of its pixels.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from PIL import Image

from task_encoders.media.image import VisionSettings

Bytes = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]

#: The form in which pixels leave a loader: values for the vision tower, or bytes.
PixelTransport = Literal["float32", "uint8"]


@dataclass(frozen=True, slots=True, eq=False)
class Normalisation:
    """Mapping of a family from bytes to values."""

    table: Values  #: (C, 256), the value of each byte per channel
    repeats: int  #: T, how often an image's frame is repeated in its values

    def values(self, rows: Bytes, repeats: int = 1, out: Values | None = None) -> Values:
        """(P, C·n) bytes to (P, C·repeats·n) values: of images (P, C·p·p) with `self.repeats`, of
        videos (P, C·T·p·p) with 1."""
        if out is None:
            out = np.empty((len(rows), rows.shape[1] * repeats), dtype=np.float32)
        if len(rows):
            shape, size = (len(rows), len(self.table)), rows.shape[1] // len(self.table)
            by_channel = rows.reshape(*shape, size)
            _compiled(_look_up)(by_channel, self.table, out.reshape(*shape, repeats, size))
        return out


def frame_patches(
    frames: Iterable[Image.Image], grid: tuple[int, int, int], depth: int, settings: VisionSettings
) -> Bytes:
    """RGB frames as patches (t·h·w, C·depth·p·p), each resized to the grid's size, in the order the
    vision tower merges them; an image is one frame of depth 1. `Normalisation` turns them into
    pixel values, bit-identical to those of transformers' processor with the same backend.

    A grid of t takes up to t·depth frames, in order; the last one is repeated where there are
    fewer.
    """
    grid_t, grid_h, grid_w = grid
    patch = settings.patch_size
    resize, _ = BACKENDS[settings.resize]
    cut = _compiled(_cut_patches)
    rows = np.empty((grid_t, grid_h * grid_w, 3, depth, patch**2), dtype=np.uint8)
    number = -1
    for number, frame in enumerate(frames):
        resized = resize(frame, grid_h * patch, grid_w * patch)
        cut(resized, settings.merge_size, patch, rows[number // depth], number % depth)
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


def rescale_then_normalise(mean: Sequence[float], std: Sequence[float]) -> Values:
    """(3, 256): the value of each byte in transformers' Pillow backend, computed with its order of
    operations and its types."""
    rescaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    return (rescaled - _column(mean)) / _column(std)


def normalise_at_once(mean: Sequence[float], std: Sequence[float]) -> Values:
    """The same for its torch backend, which folds the rescaling into mean and std."""
    factor = np.float32(1.0 / (1 / 255))
    values = np.arange(256, dtype=np.float32)
    return (values - _column(mean) * factor) / (_column(std) * factor)


def _column(per_channel: Sequence[float]) -> Values:
    return np.array(per_channel, dtype=np.float32)[:, None]


@functools.cache
def _compiled(loop: Callable[..., None]) -> Callable[..., None]:
    """A loop over pixels, compiled once per machine in about 2 s; it releases the GIL."""
    import numba  # takes half a second, and measuring needs none of it

    compiled: Callable[..., None] = numba.njit(cache=True, nogil=True)(loop)
    return compiled


def _cut_patches(
    pixels: Bytes,
    merge: int,
    patch: int,
    out: Bytes,
    frame: int,
) -> None:
    """Cut one frame into patches, in blocks of merge² that the vision tower merges into a token.

    Args:
        pixels: (H, W, 3 or more).
        out: (patches, 3, T, p·p), filled at index `frame` of T.
    """
    height, width, _ = pixels.shape
    n = 0
    for top in range(0, height, merge * patch):
        for left in range(0, width, merge * patch):
            for row in range(merge):
                for column in range(merge):
                    y0, x0 = top + row * patch, left + column * patch
                    for y in range(patch):
                        for x in range(patch):
                            for channel in range(3):
                                byte = pixels[y0 + y, x0 + x, channel]
                                out[n, channel, frame, y * patch + x] = byte
                    n += 1


def _look_up(rows: Bytes, table: Values, out: Values) -> None:
    """Look up each byte of `rows` (P, C, size) in `table` (C, 256), and write its value to all
    `times` repeats in `out` (P, C, times, size)."""
    num_rows, channels, size = rows.shape
    for n in range(num_rows):
        for channel in range(channels):
            values = table[channel]
            for i in range(size):
                out[n, channel, 0, i] = values[rows[n, channel, i]]
            for other in range(1, out.shape[2]):
                out[n, channel, other] = out[n, channel, 0]


_Resize = Callable[[Image.Image, int, int], Bytes]
_Table = Callable[[Sequence[float], Sequence[float]], Values]

#: Backends of transformers: how they resize, and the value of each byte.
BACKENDS: Final[Mapping[str, tuple[_Resize, _Table]]] = {
    "pil": (_resize_with_pillow, rescale_then_normalise),
    "torch": (_resize_with_torch, normalise_at_once),
}

"""The patches of images and of video frames, as a vision tower takes them, and their values.

There are two ways to resize, with slightly different results: Pillow's, and torch's on bytes. Each,
with its normalisation, equals one of transformers' two bit for bit. Pillow adds pixel by pixel; the
loops here add the same integers row by row, in a quarter of the time.

Patches stay bytes as long as possible: an image's `pixel_values` take four bytes per value and
repeat its frame T times, which for Qwen2-VL is eight times the size of its pixels.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from packaging.version import Version
from PIL import Image
from PIL import __version__ as pillow_version

from task_encoders.media.image import VisionSettings

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int32]
Values = npt.NDArray[np.float32]

#: The form in which pixels leave a loader: values for the vision tower, or bytes.
PixelTransport = Literal["float32", "uint8"]


#: Fractional bits of a resizing weight, as in Pillow.
_PRECISION: Final = 22
#: Since version 13 Pillow resizes the height first where it shrinks more than twice as much.
_SHRINKS_TALL_FIRST: Final = Version(pillow_version) >= Version("13")


@dataclass(frozen=True, slots=True, eq=False)
class Normalisation:
    """Mapping of a family from bytes to values."""

    table: Values  #: (C, 256), the value of each byte per channel
    repeats: int  #: T, how often an image's frame is repeated in its values

    def values(self, rows: Bytes, repeats: int = 1, out: Values | None = None) -> Values:
        """Convert (P, C·n) bytes to (P, C·repeats·n) values: of images (P, C·p·p) with
        `self.repeats`, of videos (P, C·T·p·p) with 1."""
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
    """Cut RGB frames into patches (t·h·w, C·depth·p·p), each resized to the grid's size, in the
    order the vision tower merges them; an image is one frame of depth 1. `Normalisation` turns
    patches into pixel values, bit-identical to those of transformers' processor with the same
    backend. With `settings.channels_last`, patches are (t·h·w, p·p·3), row by row, and p is a
    multiple of 4.

    A grid of t takes up to t·depth frames, in order; if there are fewer, the last is repeated.
    """
    grid_t, grid_h, grid_w = grid
    patch = settings.patch_size
    resize, _ = BACKENDS[settings.resize]
    height, width = grid_h * patch, grid_w * patch
    rows = np.empty((grid_t, grid_h * grid_w, 3 * depth * patch**2), dtype=np.uint8)
    for number, frame in enumerate(frames):
        pixels, out = resize(frame, height, width).reshape(height, -1), rows[number // depth]
        if settings.channels_last:
            _packer(patch)(pixels.view(np.uint32), out.view(np.uint32))
        else:
            pairs, planes = pixels.view(np.uint64), out.reshape(-1, 3, depth, patch**2)
            _cutter(patch)(pairs, settings.merge_size, planes, number % depth)
    return rows.reshape(grid_t * grid_h * grid_w, -1)


def _resize_as_pillow(image: Image.Image, height: int, width: int) -> Bytes:
    """Resize to (H, W, 4), the fourth byte without meaning, as `Image.resize` with `BICUBIC` of the
    installed Pillow: first the width, some rows at a time, unless the height shrinks much more."""
    tall_first = _SHRINKS_TALL_FIRST and (image.height - height > max(0, 2 * (image.width - width)))
    wide = np.empty((image.height, image.width if tall_first else width, 4), np.uint8)
    # Few enough for the processor's caches, and for one of Pillow's blocks of 16 MB.
    at_once = min(64, (1 << 22) // image.width)
    for top in range(0, image.height, at_once):
        band = image.crop((0, top, image.width, min(top + at_once, image.height)))
        pixels = pa.array(band).flatten().to_numpy().reshape(band.height, band.width, 4)
        _resize_columns(pixels, wide[top : top + band.height])
    resized = _resize_rows(wide, height)
    if tall_first:
        resized = _resize_columns(resized, np.empty((height, width, 4), np.uint8))
    return resized


def _resize_columns(pixels: Bytes, out: Bytes) -> Bytes:
    """Resize (H, W, 4) to `out` (H, width, 4): columns become rows, and back."""
    (height, width, _), turn = pixels.shape, _compiled(_turn)
    if out.shape == pixels.shape:
        out[:] = pixels
    else:
        columns = np.empty((width, height, 4), np.uint8)
        turn(pixels.view(np.uint32), columns.view(np.uint32))
        turn(_resize_rows(columns, out.shape[1]).view(np.uint32), out.view(np.uint32))
    return out


def _resize_rows(pixels: Bytes, height: int) -> Bytes:
    """Resize (H, W, 4) to (height, W, 4)."""
    num_rows = len(pixels)
    if height == num_rows:
        return pixels
    out = np.empty((height, *pixels.shape[1:]), np.uint8)
    weights = _bicubic_weights(num_rows, height)
    _compiled(_weigh)(pixels.reshape(num_rows, -1), *weights, out.reshape(height, -1))
    return out


@functools.lru_cache(maxsize=64)
def _bicubic_weights(size: int, new_size: int) -> tuple[Integers, Integers, Integers]:
    """Return, for each of `new_size` rows made of `size` rows, the first row it is made of, their
    number, and their weights in units of 2^-22 (Pillow's precompute_coeffs in Resample.c)."""
    scale = size / new_size
    spread = max(scale, 1.0)
    centers = (np.arange(new_size) + 0.5) * scale
    first = np.maximum((centers - 2 * spread + 0.5).astype(np.int32), 0)
    count = np.minimum((centers + 2 * spread + 0.5).astype(np.int32), size) - first
    taps = np.arange(count.max())
    x = np.abs((taps + first[:, None] - centers[:, None] + 0.5) * (1.0 / spread))
    near = ((2 - 0.5) * x - (3 - 0.5)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    weights = np.where(x < 1, near, far) * (x < 2) * (taps < count[:, None])
    weights = weights / weights.cumsum(axis=1)[:, -1:] * (1 << _PRECISION)
    return first, count, np.trunc(weights + np.copysign(0.5, weights)).astype(np.int32)


def _resize_as_torch(image: Image.Image, height: int, width: int) -> Bytes:
    """Resize to (H, W, 4), as torchvision resizes bytes on a CPU with AVX2 or later."""
    import torch

    try:
        pixels = torch.from_dlpack(pa.array(image).flatten()).view(image.height, image.width, 4)
    except ValueError:  # Pillow holds it in several blocks
        pixels = torch.from_numpy(_resize_as_pillow(image, image.height, image.width))
    if pixels.shape[:2] != (height, width):
        # torch's loops for interleaved channels take 3.9 ms, its loops for planes 9.1.
        batch = torch.nn.functional.interpolate(
            pixels[None].permute(0, 3, 1, 2), (height, width), mode="bicubic", antialias=True
        )
        pixels = batch[0].permute(1, 2, 0)
    return pixels.numpy()


def rescale_then_normalise(mean: Sequence[float], std: Sequence[float]) -> Values:
    """Compute the value of each byte in transformers' Pillow backend, (3, 256), with its order of
    operations and its types."""
    rescaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    return (rescaled - _column(mean)) / _column(std)


def normalise_at_once(mean: Sequence[float], std: Sequence[float]) -> Values:
    """Compute the value of each byte in transformers' torch backend, which folds the rescaling into
    mean and std."""
    factor = np.float32(1.0 / (1 / 255))
    values = np.arange(256, dtype=np.float32)
    return (values - _column(mean) * factor) / (_column(std) * factor)


def _column(per_channel: Sequence[float]) -> Values:
    return np.array(per_channel, dtype=np.float32)[:, None]


@functools.cache
def _compiled(loop: Callable[..., None]) -> Callable[..., None]:
    """Compile a loop over pixels, once per machine in about 2 s; it releases the GIL."""
    import numba  # takes half a second, and measuring needs none of it

    compiled: Callable[..., None] = numba.njit(cache=True, nogil=True)(loop)
    return compiled


def _turn(pixels: Any, out: Any) -> None:
    """Swap rows and columns of (H, W, 1) whole pixels."""
    height, width, _ = pixels.shape
    eights = height // 8 * 8
    for y in range(0, eights, 8):
        for x in range(width):
            for i in range(8):
                out[x, y + i, 0] = pixels[y + i, x, 0]
    for y in range(eights, height):
        for x in range(width):
            out[x, y, 0] = pixels[y, x, 0]


def _weigh(rows: Any, first: Any, count: Any, weights: Any, out: Any) -> None:
    """Fill each row of `out` (h, L) with a weighted sum of some rows of `rows` (H, L), see
    `_bicubic_weights`. Sums are below 2^31, and 32 bits wide as in Pillow."""
    num_rows, width = out.shape
    sums = np.empty(width, np.int32)
    for y in range(num_rows):
        sums[:] = 1 << (_PRECISION - 1)  # rounds to the nearest
        fours = count[y] // 4 * 4
        for i in range(0, fours, 4):
            a, b, c, d = weights[y, i], weights[y, i + 1], weights[y, i + 2], weights[y, i + 3]
            n = first[y] + i
            p, q, r, s = rows[n], rows[n + 1], rows[n + 2], rows[n + 3]
            for x in range(width):
                sums[x] += a * p[x] + b * q[x] + c * r[x] + d * s[x]
        for i in range(fours, count[y]):
            weight, row = weights[y, i], rows[first[y] + i]
            for x in range(width):
                sums[x] += weight * row[x]
        for x in range(width):
            out[y, x] = min(max(np.int32(sums[x] >> _PRECISION), np.int32(0)), np.int32(255))


@functools.cache
def _cutter(patch: int) -> Callable[..., None]:
    """Compile a loop that cuts patches of this size, which is even and a constant in the loop:
    three times as fast."""

    def cut(pixels: Any, merge: int, out: Any, frame: int) -> None:
        """Cut one frame (H, W / 2) of pairs of pixels, in blocks of merge² patches that the tower
        merges into a token, into `out` (patches, 3, T, p·p) at index `frame` of T and at all after
        it, which frames that follow overwrite."""
        height, columns = len(pixels) // patch, 2 * pixels.shape[1] // patch
        lines = pixels.reshape(height, patch, columns, patch // 2)
        # A row of patches at a time: pixels are read in the order of memory, and pairs not while
        # the processor still stores them.
        pairs = np.empty((columns, patch, patch // 2), np.uint64)
        whole = pairs.view(np.uint32).reshape(columns, patch * patch)
        for row in range(height):
            for y in range(patch):
                for column in range(columns):
                    line, to = lines[row, y, column], pairs[column, y]
                    for i in range(patch // 2):
                        to[i] = line[i]
            first = (row // merge * columns + row % merge) * merge
            for column in range(columns):
                one, n = whole[column], first + column // merge * merge**2 + column % merge
                for channel in range(3):
                    byte = np.uint32(8 * channel)
                    for time in range(frame, out.shape[2]):
                        plane = out[n, channel, time]
                        for i in range(patch * patch):
                            plane[i] = one[i] >> byte

    return _compiled(cut)


@functools.cache
def _packer(side: int) -> Callable[..., None]:
    """Compile a loop that cuts patches of this size, a multiple of 4, with their channels last."""

    def pack(pixels: Any, out: Any) -> None:
        """Cut one frame (H, W) of whole pixels into `out` (patches, p·p·3 / 4): four pixels
        without their fourth bytes are three words."""
        height, columns = len(pixels), pixels.shape[1] // side
        lines = pixels.reshape(height, columns, side)
        rows = out.reshape(len(out), side, side // 4 * 3)
        for y in range(height):
            for column in range(columns):
                line, to = lines[y, column], rows[y // side * columns + column, y % side]
                for i in range(side // 4):
                    a, b, c, d = line[4 * i], line[4 * i + 1], line[4 * i + 2], line[4 * i + 3]
                    to[3 * i] = a & np.uint32(0xFFFFFF) | b << np.uint32(24)
                    to[3 * i + 1] = b >> np.uint32(8) & np.uint32(0xFFFF) | c << np.uint32(16)
                    to[3 * i + 2] = c >> np.uint32(16) & np.uint32(0xFF) | d << np.uint32(8)

    return _compiled(pack)


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
    "pil": (_resize_as_pillow, rescale_then_normalise),
    "torch": (_resize_as_torch, normalise_at_once),
}

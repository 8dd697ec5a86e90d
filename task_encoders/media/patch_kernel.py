"""Loops over pixels, compiled (about two seconds once per machine). They hold no lock."""

import numba
import numpy as np
import numpy.typing as npt


@numba.njit(cache=True, nogil=True)
def cut_patches(
    pixels: npt.NDArray[np.uint8],
    merge: int,
    patch: int,
    out: npt.NDArray[np.uint8],
    frame: int,
) -> None:
    """Cut one frame into patches, in blocks of merge² that the vision tower makes one token of.

    Args:
        pixels: (H, W, 3).
        out: (patches, 3, T, p·p); of T, `frame` is filled.
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


@numba.njit(cache=True, nogil=True)
def look_up(
    rows: npt.NDArray[np.uint8], table: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
    """Write the value of each byte of `rows` (P, C, size), by the `table` (C, 256), as often as
    `out` (P, C, times, size) takes it."""
    num_rows, channels, size = rows.shape
    for n in range(num_rows):
        for channel in range(channels):
            values = table[channel]
            for i in range(size):
                out[n, channel, 0, i] = values[rows[n, channel, i]]
            for other in range(1, out.shape[2]):
                out[n, channel, other] = out[n, channel, 0]

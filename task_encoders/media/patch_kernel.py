"""Compiled loops over pixels (compiled once per machine, in about 2 s). They release the GIL."""

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


@numba.njit(cache=True, nogil=True)
def look_up(
    rows: npt.NDArray[np.uint8], table: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
) -> None:
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

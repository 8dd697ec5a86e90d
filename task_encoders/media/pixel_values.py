"""From the bytes of pixels to the values that a vision tower takes.

Media stay bytes as long as they can: a row of `pixel_values` of an image holds four bytes a value
and the same frame T times over, which for Qwen2-VL is eight times what its pixels are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]

#: How pixels leave a loader: as what the vision tower takes, or as bytes.
PixelTransport = Literal["float32", "uint8"]


@dataclass(frozen=True, slots=True, eq=False)
class Normalisation:
    """What a family makes of bytes.

    An image's row of C·p·p bytes becomes `repeats` frames of values, C·T·p·p; a video's row of
    C·T·p·p bytes as many values.
    """

    table: Values  #: (C, 256), the value of each byte per channel
    repeats: int  #: T

    def image_values(self, rows: Bytes, out: Values | None = None) -> Values:
        """(P, C·p·p) bytes to (P, C·T·p·p) values."""
        return _values(rows, self.table, self.repeats, out)

    def video_values(self, rows: Bytes, out: Values | None = None) -> Values:
        """(Q, C·T·p·p) bytes to values of the same shape."""
        return _values(rows, self.table, 1, out)


def _values(rows: Bytes, table: Values, times: int, out: Values | None) -> Values:
    from task_encoders.media.patch_kernel import look_up  # numba takes half a second

    if out is None:
        out = np.empty((len(rows), rows.shape[1] * times), dtype=np.float32)
    if len(rows):
        size = rows.shape[1] // len(table)
        shape = (len(rows), len(table))
        look_up(rows.reshape(*shape, size), table, out.reshape(*shape, times, size))
    return out


def rescale_then_normalise(mean: Sequence[float], std: Sequence[float]) -> Values:
    """(3, 256): what transformers' Pillow backend makes of each byte, in its order of operations
    and types."""
    rescaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    return (rescaled - _column(mean)) / _column(std)


def normalise_at_once(mean: Sequence[float], std: Sequence[float]) -> Values:
    """The same of its torch backend, which puts the rescaling into mean and std."""
    factor = np.float32(1.0 / (1 / 255))
    values = np.arange(256, dtype=np.float32)
    return (values - _column(mean) * factor) / (_column(std) * factor)


def _column(per_channel: Sequence[float]) -> Values:
    return np.array(per_channel, dtype=np.float32)[:, None]

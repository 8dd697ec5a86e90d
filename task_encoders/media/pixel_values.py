"""Convert the bytes of pixels to the values that a vision tower takes.

Media stay bytes as long as possible: an image's `pixel_values` take four bytes per value and repeat
its frame T times, which for Qwen2-VL is eight times the size of its pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]

#: The form in which pixels leave a loader: values for the vision tower, or bytes.
PixelTransport = Literal["float32", "uint8"]


@dataclass(frozen=True, slots=True, eq=False)
class Normalisation:
    """Mapping of a family from bytes to values.

    An image's row of C·p·p bytes becomes `repeats` frames of values, C·T·p·p; a video's row of
    C·T·p·p bytes becomes as many values.
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

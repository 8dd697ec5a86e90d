"""Size of an ordinary JPEG from its first bytes, where nothing about it is in doubt.

Opening a JPEG with Pillow takes about 30 µs, most of it for tables that measuring does not need;
this takes 5. Whatever is not plain (EXIF, several pictures, arithmetic coding, a damaged segment)
is left to Pillow: the result is the same as Pillow's, or None.
"""

import struct
from typing import BinaryIO, Final, NamedTuple

from task_encoders.samples import SampleError
from task_encoders.samples.limits import MAX_SCANNED_PIXELS

#: Bytes at the start of a file that are searched.
HEAD_BYTES: Final = 4096

_PROGRESSIVE: Final = 0xFFC2
_SOF: Final = frozenset((0xFFC0, 0xFFC1, _PROGRESSIVE))  # and baseline, extended
_SOS: Final = 0xFFDA
_SKIPPED: Final = frozenset((0xFFC4, 0xFFDD, 0xFFFE))  # Huffman tables, restart interval, comment
_segment = struct.Struct(">HH").unpack_from  # a marker, and the length after it
_frame = struct.Struct(">BHHB").unpack_from  # bits, height, width, components
_TABLE_BYTES: Final = 65  # of an 8-bit quantization table with its number
_SCAN: Final = b"\xff\xda"
_MIN_SCAN_BYTES: Final = 10
_BLOCK: Final = 1 << 20


class PlainJpeg(NamedTuple):
    """Size in pixels of a JPEG without EXIF orientation, and whether it comes in many scans."""

    height: int
    width: int
    is_progressive: bool

    @property
    def pixels(self) -> int:
        """Size of the whole picture."""
        return self.height * self.width


def jpeg_size(head: bytes) -> PlainJpeg | None:
    """The JPEG that begins with these bytes, or None where Pillow must tell."""
    if not head.startswith(b"\xff\xd8\xff"):
        return None
    size: PlainJpeg | None = None
    available = len(head)
    end = 2  # of the last segment
    while end + 4 <= available:
        begin = end + 4
        marker, length = _segment(head, end)
        end += 2 + length
        if length < 2 or end > available:
            return None
        if marker in _SKIPPED:  # as Pillow does
            continue
        if marker == _SOS:
            return size
        if marker in _SOF and size is None:
            size = _plain_frame(marker, head[begin:end])
            if size is None:
                return None
        elif not _is_plain(marker, head[begin:end]):
            return None
    return None


def check_scans(file: BinaryIO, file_size: int, pixels: int) -> None:
    """Raise SampleError: too_costly for a progressive JPEG that takes long to decode, since each of
    its scans goes through all pixels. Only a file that has room for so many is read."""
    limit = MAX_SCANNED_PIXELS // max(1, pixels)
    if file_size // _MIN_SCAN_BYTES <= limit:
        return
    file.seek(0)
    num_scans, last = 0, b""
    while block := file.read(_BLOCK):
        num_scans += (last + block).count(_SCAN)
        last = block[-1:]
    if num_scans > limit:
        raise SampleError("too_costly", f"{num_scans:,} scans of {pixels:,} pixels > {limit:,}")


def _plain_frame(marker: int, segment: bytes) -> PlainJpeg | None:
    """The frame, if it has eight bits, is grey or of three components, and of a size above 0."""
    if len(segment) not in (6 + 3, 6 + 9):
        return None
    bits, height, width, components = _frame(segment)
    is_plain = bits == 8 and height and width and len(segment) == 6 + 3 * components
    return PlainJpeg(height, width, marker == _PROGRESSIVE) if is_plain else None


def _is_plain(marker: int, segment: bytes) -> bool:
    """Whether a segment is intact and cannot affect the picture's size or orientation."""
    if marker == 0xFFDB:  # quantization tables
        numbers = segment[::_TABLE_BYTES]
        return len(segment) == _TABLE_BYTES * len(numbers) and max(numbers, default=16) < 16
    if marker == 0xFFE0:  # APP0
        return segment.startswith(b"JFIF\0") and len(segment) >= 14
    if marker == 0xFFE2:  # APP2
        return segment.startswith(b"ICC_PROFILE\0") and len(segment) >= 14
    return False

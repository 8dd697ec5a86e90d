"""Sizes of the pages of a Parquet column chunk. A page is decoded as a whole, and the footer does
not say how large it is; its header does, a struct in Thrift's compact protocol.

Source: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md and
PageHeader in https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from collections.abc import Callable
from typing import Any, Final

#: Longer headers hold statistics of long values, and are not parsed.
_HEADER_BYTES: Final = 1 << 14
#: A column chunk of at most these bytes is not looked into.
_SMALL_CHUNK: Final = 1 << 20

#: Kinds of values: bytes of those of one size (flags are in their own head), and others.
_FIXED: Final = {1: 0, 2: 0, 3: 1, 7: 8}
_INTEGERS: Final = (4, 5, 6)
_BINARY: Final = 8
_STRUCT: Final = 12


def largest_page(chunk: Any, read: Callable[[int, int], bytes]) -> int:
    """Bytes, unpacked, of the largest page of a column chunk, dictionaries included; at most so
    many where a header cannot be parsed. `read` takes an offset in the file and a size."""
    left, largest = chunk.total_uncompressed_size, 0
    if left <= _SMALL_CHUNK:
        return int(left)
    offset = chunk.dictionary_page_offset or chunk.data_page_offset
    end = offset + chunk.total_compressed_size
    while left > largest and offset < end:
        try:
            unpacked, packed, length = page_header(read(offset, min(_HEADER_BYTES, end - offset)))
        except IndexError:
            return int(max(largest, left))
        largest = max(largest, unpacked)
        left -= unpacked
        offset += length + packed
    return largest


def page_header(data: bytes) -> tuple[int, int, int]:
    """Bytes of a page unpacked and packed, and of its header. Raises IndexError: these bytes hold
    no whole header."""
    reader, field, sizes = _Compact(data), 0, {2: 0, 3: 0}
    while head := reader.byte():
        field = field + (head >> 4) if head >> 4 else reader.integer() >> 1
        if field in sizes:
            value = reader.integer()
            sizes[field] = (value >> 1) ^ -(value & 1)  # zigzag
        else:
            reader.skip(head & 15)
    if min(sizes.values()) < 0 or reader.position > len(data):
        raise IndexError
    return sizes[2], sizes[3], reader.position


class _Compact:
    """Reads a struct in the compact protocol."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def byte(self) -> int:
        self.position += 1
        return self._data[self.position - 1]

    def integer(self) -> int:
        """Seven bits per byte, the lowest first."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def skip(self, kind: int, depth: int = 0) -> None:
        """Pass over a value. Raises IndexError for a list, which these headers lack."""
        if kind in _FIXED:
            self.position += _FIXED[kind]
        elif kind in _INTEGERS:
            self.integer()
        elif kind == _BINARY:
            size = self.integer()
            self.position += size
        elif kind == _STRUCT and depth < 8:
            while head := self.byte():
                if not head >> 4:
                    self.integer()
                self.skip(head & 15, depth + 1)
        else:
            raise IndexError

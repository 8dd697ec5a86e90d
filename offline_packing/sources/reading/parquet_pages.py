"""Sizes of the pages of a Parquet column chunk. A page is decoded as a whole, and the footer does
not say how large it is; its header does, a struct in Thrift's compact protocol.

Source: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md and
PageHeader in https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

import contextlib
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

#: Bytes of most headers, and of those with statistics of long values; Arrow reads no longer ones.
_HEADER_BYTES: Final = (1 << 14, 1 << 24)
#: Pages of a chunk: writers make them of about 1 MiB, or of a long value.
_MAX_PAGES: Final = 1 << 18

#: Kinds of values: bytes of those of one size (flags are in their own head), and others.
_FIXED: Final = {1: 0, 2: 0, 3: 1, 7: 8}
_INTEGERS: Final = (4, 5, 6)
_BINARY: Final = 8
_LISTS: Final = (9, 10)
_STRUCT: Final = 12


def largest_page(chunk: Any, read: Callable[[int, int], bytes]) -> int:
    """Bytes, unpacked, of the largest page of a column chunk, dictionaries included. Sizes in the
    footer are not believed. `read` takes an offset in the file and a size. Raises pa.ArrowInvalid
    where a header cannot be read."""
    starts = (chunk.dictionary_page_offset, chunk.data_page_offset)
    offset, largest = min(filter(None, starts), default=0), 0
    end = offset + chunk.total_compressed_size
    for _ in range(_MAX_PAGES):
        if offset >= end:
            return largest
        unpacked, packed, length = _read_header(offset, read)
        largest = max(largest, unpacked)
        offset += length + packed
    raise pa.ArrowInvalid(f"more than {_MAX_PAGES:,} pages in a row group; write larger ones")


def _read_header(offset: int, read: Callable[[int, int], bytes]) -> tuple[int, int, int]:
    for size in _HEADER_BYTES:
        with contextlib.suppress(IndexError):
            return page_header(read(offset, size))
    raise pa.ArrowInvalid(f"no header of a page at byte {offset:,}; write the file again")


def page_header(data: bytes) -> tuple[int, int, int]:
    """Bytes of a page unpacked and packed, and of its header. Raises IndexError: these bytes hold
    no whole header."""
    reader, field, sizes = _Compact(data), 0, {2: -1, 3: -1}
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
        """Pass over a value. Raises IndexError for what these headers lack, as maps."""
        if depth > 8 or self.position > len(self._data):
            raise IndexError
        if kind in _FIXED:
            self.position += _FIXED[kind]
        elif kind in _INTEGERS:
            self.integer()
        elif kind == _BINARY:
            size = self.integer()
            self.position += size
        elif kind in _LISTS:
            head = self.byte()
            size = head >> 4 if head >> 4 < 15 else self.integer()
            for _ in range(size):
                self.skip(head & 15, depth + 1)
        elif kind == _STRUCT:
            while head := self.byte():
                if not head >> 4:
                    self.integer()
                self.skip(head & 15, depth + 1)
        else:
            raise IndexError

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

_STOP, _BYTE, _DOUBLE, _BINARY, _STRUCT = 0, 3, 7, 8, 12
_FLAGS, _INTEGERS = (1, 2), (4, 5, 6)


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
    position, sizes, field = 0, {2: 0, 3: 0}, 0

    def integer() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def skip(kind: int, depth: int) -> None:
        nonlocal position
        if kind in (_BYTE, _DOUBLE):
            position += 1 if kind == _BYTE else 8
        elif kind in _INTEGERS:
            integer()
        elif kind == _BINARY:
            length = integer()  # moves the position
            position += length
        elif kind == _STRUCT and depth < 8:
            while (inner := next_field()) != _STOP:
                skip(inner, depth + 1)
        elif kind not in _FLAGS:  # PageHeader has no lists
            raise IndexError

    def next_field() -> int:
        nonlocal position, field
        head = data[position]
        position += 1
        field = field + (head >> 4) if head >> 4 or not head else integer() >> 1
        return head & 15

    while (kind := next_field()) != _STOP:
        number = field
        if number in sizes:
            value = integer()
            sizes[number] = (value >> 1) ^ -(value & 1)  # zigzag
        else:
            skip(kind, 0)
            field = number
    if min(sizes.values()) < 0 or position > len(data):
        raise IndexError
    return sizes[2], sizes[3], position

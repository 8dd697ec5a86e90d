"""Pages of a Parquet column chunk. One is decoded as a whole, and the footer does not say how large
it is; its header does, a struct in Thrift's compact protocol.

Source: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md and
PageHeader in https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

#: Takes an offset in a file, and a size.
Read = Callable[[int, int], bytes]

#: Bytes of most headers, and of those with statistics of long values; Arrow reads no longer ones.
_HEADER_BYTES: Final = (1 << 14, 1 << 24)
#: Pages of a chunk: writers make them of about 1 MiB, or of a long value.
_MAX_PAGES: Final = 1 << 18

#: Fields of a page's header.
_UNPACKED: Final = 2
_PACKED: Final = 3
_DATA: Final = 5
_DICTIONARY: Final = 7
_DATA_V2: Final = 8


@dataclass(frozen=True, slots=True)
class Page:
    """One page, from its header."""

    offset: int  #: in the file, of what follows the header
    packed: int
    unpacked: int
    num_values: int  #: with nulls; 0 where it holds no values
    encoding: int
    is_dictionary: bool
    #: bytes of the repetition and of the definition levels, which are not packed, and whether the
    #: values are; None: levels are packed with the values, each after its length
    levels: tuple[int, int, bool] | None


def read_pages(chunk: Any, read: Read) -> list[Page]:
    """The pages of a column chunk. Sizes in the footer are not believed. Raises pa.ArrowInvalid
    where a header cannot be read."""
    starts = (chunk.dictionary_page_offset, chunk.data_page_offset)
    offset = min(filter(None, starts), default=0)
    end, pages = offset + chunk.total_compressed_size, list[Page]()
    while offset < end:
        if len(pages) == _MAX_PAGES:
            problem = f"more than {_MAX_PAGES:,} pages in a row group"
            raise pa.ArrowInvalid(f"{problem}; write larger ones")
        pages.append(_read_page(offset, read))
        offset = pages[-1].offset + pages[-1].packed
    return pages


def _read_page(offset: int, read: Read) -> Page:
    for size in _HEADER_BYTES:
        with contextlib.suppress(IndexError):
            return _page(offset, read(offset, size))
    raise pa.ArrowInvalid(f"no header of a page at byte {offset:,}; write the file again")


def _page(offset: int, data: bytes) -> Page:
    """The page whose header these bytes begin with. Raises IndexError: they hold no whole one."""
    reader = _Compact(data)
    header = reader.struct()
    packed, unpacked = header.get(_PACKED, -1), header.get(_UNPACKED, -1)
    if min(packed, unpacked) < 0 or reader.position > len(data):
        raise IndexError
    second = header.get(_DATA_V2)
    values = second or header.get(_DATA) or header.get(_DICTIONARY) or {}
    return Page(
        offset + reader.position,
        packed,
        unpacked,
        values.get(1, 0),
        values.get(4 if second else 2, 0),
        _DICTIONARY in header,
        (second.get(6, 0), second.get(5, 0), second.get(7, True)) if second else None,
    )


#: Kinds of values.
_TRUE: Final = 1
_FALSE: Final = 2
_BYTE: Final = 3
_INTEGERS: Final = (4, 5, 6)
_DOUBLE: Final = 7
_BINARY: Final = 8
_LISTS: Final = (9, 10)
_STRUCT: Final = 12


class _Compact:
    """Reads a struct in the compact protocol. Raises IndexError where the bytes end, and for what
    the headers of pages lack, as maps."""

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
            if shift > 63:  # of so many bytes the time would grow with the square
                raise IndexError

    def signed(self) -> int:
        """An integer in zigzag."""
        value = self.integer()
        return (value >> 1) ^ -(value & 1)

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Values by the numbers of their fields; None for those that no page needs."""
        fields, number = dict[int, Any](), 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.signed()
            kind = head & 15
            is_flag = kind in (_TRUE, _FALSE)
            fields[number] = kind == _TRUE if is_flag else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > 8 or self.position > len(self._data):
            raise IndexError
        if kind in _INTEGERS:
            return self.signed()
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in _LISTS:
            head = self.byte()
            for _ in range(head >> 4 if head >> 4 < 15 else self.integer()):
                self._value(head & 15, depth + 1)
            return None
        sizes = {_TRUE: 1, _FALSE: 1, _BYTE: 1, _DOUBLE: 8}
        if kind not in sizes and kind != _BINARY:
            raise IndexError
        size = self.integer() if kind == _BINARY else sizes[kind]
        self.position += size
        return None

"""Where the elements of a JSON array end, without parsing them.

A byte ends an element if it stands outside strings and is a comma at depth 1 or the bracket that
closes the array. Strings are found by the parity of unescaped quotes before a byte; all of it is
array arithmetic on blocks, as the first pass of simdjson (https://arxiv.org/abs/1902.08318).
"""

from collections.abc import Iterator
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

_QUOTE, _BACKSLASH, _COMMA = (ord(character) for character in '"\\,')

#: What a byte does to the depth, and 2 for a comma; 0 is ignored.
_CLASS: Final = np.zeros(256, np.int8)
_CLASS[[ord(character) for character in "[{"]] = 1
_CLASS[[ord(character) for character in "]}"]] = -1
_CLASS[_COMMA] = 2


class ArrayCutter:
    """Goes through an array block by block."""

    def __init__(self, *, depth: int = 0) -> None:
        """`depth`: 1 to begin behind an element instead of in front of the array."""
        self._depth = depth
        self._in_string = False
        self._backslashes = 0  # at the end of the last block
        self._offset = 0
        self._closed = False

    def feed(self, block: bytes) -> npt.NDArray[np.int64]:
        """Offsets behind the last byte of each element that ends in this block, its comma or the
        closing bracket included, counted from the first block."""
        data = np.frombuffer(block, np.uint8)
        begin = self._offset
        self._offset += len(data)
        quotes = self._string_ends(data)
        places = np.flatnonzero(_CLASS[data])
        inside = (np.searchsorted(quotes, places) + self._in_string) % 2 == 1
        self._in_string = bool((len(quotes) + self._in_string) % 2)
        places = places[~inside]
        kinds = _CLASS[data[places]]
        depth = self._depth + np.cumsum(np.where(kinds == 2, 0, kinds))
        if len(depth):
            self._depth = int(depth[-1])
        ends = ((kinds == 2) & (depth == 1)) | ((kinds == -1) & (depth == 0))
        if self._closed:  # behind the array, nothing is an element's end any more
            ends[:] = False
        elif (closing := np.flatnonzero((kinds == -1) & (depth == 0))).size:
            ends[closing[0] + 1 :] = False
            self._closed = True
        return places[ends] + begin + 1

    def _string_ends(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """Positions of the quotes not preceded by an odd number of backslashes."""
        quotes = np.flatnonzero(data == _QUOTE)
        marks = np.flatnonzero(data == _BACKSLASH)
        carried, self._backslashes = self._backslashes, 0
        if not len(marks):
            return quotes[1:] if carried % 2 and len(quotes) and quotes[0] == 0 else quotes
        new_run = np.diff(marks, prepend=-2) != 1
        run_begin = np.maximum.accumulate(np.where(new_run, marks, -1))
        # A run at the very beginning continues one of the last block.
        lengths = marks - run_begin + 1 + np.where(run_begin == 0, carried, 0)
        if marks[-1] == len(data) - 1:
            self._backslashes = int(lengths[-1])
        last = np.searchsorted(marks, quotes) - 1
        before = np.where((last >= 0) & (marks[last] == quotes - 1), lengths[last], 0)
        if len(quotes) and quotes[0] == 0:
            before[0] = carried
        return quotes[before % 2 == 0]


def split_elements(
    file: BinaryIO, begin: int, end: int | None, block_size: int, limit: int
) -> Iterator[tuple[int, bytes | None, int]]:
    """Elements from the file's current offset up to another.

    Args:
        begin: 0, in front of the array, or behind an element.
        end: behind an element; None for the end of the file.
        limit: an element of more bytes is not kept.

    Yields (offset, bytes without the separator or None, their number). What is left at the end, of
    an array that was cut off or behind one that was not, comes as an element too.
    """
    cutter = ArrayCutter(depth=1 if begin else 0)
    held, start, position = b"", begin, begin
    too_long = False
    while block := file.read(block_size if end is None else min(block_size, end - position)):
        for element_end in (cutter.feed(block) + begin).tolist():
            if too_long or element_end - start > limit:
                yield start, None, element_end - start - 1
            else:
                data = held + block[max(0, start - position) : element_end - position]
                yield _found(start, data[:-1])
            held, start, too_long = b"", element_end, False
        held = b"" if too_long else held + block[max(0, start - position) :]
        position += len(block)
        if len(held) > limit:
            held, too_long = b"", True
    if too_long:
        yield start, None, position - start
    elif held.strip():
        yield _found(start, held)


def _found(start: int, data: bytes) -> tuple[int, bytes, int]:
    """An element; the first one without the bracket that opens the array."""
    if start == 0:
        inner = data.removeprefix(b"\xef\xbb\xbf").lstrip()
        data, start = inner.removeprefix(b"["), len(data) - len(inner.removeprefix(b"["))
    return start, data, len(data)

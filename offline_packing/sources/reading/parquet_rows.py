"""Bytes of the rows of a Parquet column of lists, found without decoding its values.

Arrow decodes a row as a whole. The headers of pages do not say how large rows are: a row may take
all values of a chunk, and each of them may be the same long entry of the dictionary. Repetition
levels tell where rows begin, and the values' indices which entries they are.

Source: https://parquet.apache.org/docs/file-format/data-pages, and its page on encodings
"""

import itertools
import struct
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from offline_packing.sources.reading.parquet_pages import Page, Read
from task_encoders.samples.limits import MAX_ROW_BYTES

Sizes = npt.NDArray[np.int64]

#: Bytes that a value takes beside its own: its levels, its offset in an array.
_VALUE_BYTES: Final = 16
#: Values of a page and of a chunk, and runs of a chunk: each takes a step.
_MAX_PAGE_VALUES: Final = 1 << 24
_MAX_VALUES: Final = 1 << 27
_MAX_RUNS: Final = 1 << 22

_PLAIN: Final = 0
_DICTIONARY: Final = (2, 8)


def upper_bound(pages: Iterable[Page], length: int) -> int:
    """Bytes of all values at most, by the headers: with the longest entry a dictionary may have."""
    longest, total = 0, 0
    for page in pages:
        if page.is_dictionary:
            longest = page.unpacked
        elif page.encoding == _PLAIN:
            total += page.unpacked
        else:
            total += page.num_values * max(length, longest, page.unpacked)
        total += page.num_values * _VALUE_BYTES
    return total


def largest_row(chunk: Any, column: Any, pages: Iterable[Page], read: Read) -> int:
    """Bytes of the largest row of a chunk of a repeated column, or of the first above
    MAX_ROW_BYTES. Raises pa.ArrowException or OSError where pages cannot be read."""
    decoder = _Decoder(column)
    open_row = largest = num_values = 0
    for page in pages:
        num_values += page.num_values
        if page.num_values > _MAX_PAGE_VALUES or num_values > _MAX_VALUES:
            raise pa.ArrowInvalid(f"{num_values:,} values in a row group; write smaller ones")
        data = _unpacked(page, chunk.compression, read)
        if page.is_dictionary:
            decoder.entries = decoder.plain_sizes(data, page.num_values)
        elif page.num_values:
            repetition, sizes = decoder.sizes(page, data)
            edges = [0, *np.flatnonzero(repetition == 0).tolist(), page.num_values]
            rows = np.diff(np.concatenate(([0], np.cumsum(sizes)))[edges])
            rows[0] += open_row
            open_row, largest = int(rows[-1]), max(largest, int(rows[:-1].max(initial=0)))
            if max(largest, open_row) > MAX_ROW_BYTES:
                break
    return max(largest, open_row)


def _unpacked(page: Page, compression: str, read: Read) -> memoryview:
    """Levels and values of a page."""
    data = read(page.offset, page.packed)
    if compression == "UNCOMPRESSED" or (page.levels and not page.levels[2]):
        return memoryview(data)
    start = sum(page.levels[:2]) if page.levels else 0
    codec = {"LZ4": "lz4_raw"}.get(compression, compression.lower())
    if not pa.Codec.is_available(codec):
        raise pa.ArrowInvalid(f"pages packed with {compression}, which is not known; use zstd")
    packed, size = data[start:], page.unpacked - start
    values = pa.decompress(packed, size, codec, asbytes=True) if size > 0 else b""
    return memoryview(data[:start] + values)


class _Decoder:
    """Sizes of the values of a column's pages, one after the other."""

    def __init__(self, column: Any) -> None:
        self._deepest = (column.max_repetition_level, column.max_definition_level)
        self._length = column.length
        self._is_varying = column.physical_type == "BYTE_ARRAY"
        self._runs = itertools.count()
        #: of the dictionary
        self.entries: Sizes = np.zeros(0, dtype=np.int64)

    def sizes(self, page: Page, data: memoryview) -> tuple[npt.NDArray[Any], Sizes]:
        """Repetition levels of a page, and the bytes that each value takes."""
        levels, at = [], 0
        for number, deepest in enumerate(self._deepest):
            if page.levels:
                size = page.levels[number]
            else:
                size = struct.unpack_from("<I", data, at)[0]
                at += 4
            bits = deepest.bit_length()
            levels.append(self._hybrid(data[at : at + size], bits, page.num_values))
            at += size
        is_value = levels[1] == self._deepest[1]
        sizes = np.full(page.num_values, _VALUE_BYTES, dtype=np.int64)
        sizes[is_value] += self._value_sizes(page, data[at:], int(is_value.sum()))
        return levels[0], sizes

    def _value_sizes(self, page: Page, data: memoryview, count: int) -> Sizes | int:
        if page.encoding in _DICTIONARY and count:
            indices = self._hybrid(data[1:], data[0], count)
            if indices.max() >= len(self.entries):
                raise pa.ArrowInvalid("an index beyond the dictionary; write the file again")
            return self.entries[indices]
        if page.encoding == _PLAIN or not self._is_varying:
            return self.plain_sizes(data, count)
        return page.unpacked  # of other encodings, whose values share bytes

    def plain_sizes(self, data: memoryview, count: int) -> Sizes:
        """Bytes of values that lie one after the other, each after its length if that varies."""
        if not self._is_varying:
            return np.full(count, self._length, dtype=np.int64)

        def lengths() -> Iterator[int]:
            at, unpack = 0, struct.Struct("<I").unpack_from
            for _ in range(count):
                (size,) = unpack(data, at)
                yield size
                at += 4 + size

        try:
            return np.fromiter(lengths(), np.int64, count)
        except struct.error as error:
            raise pa.ArrowInvalid("values beyond the end of a page") from error

    def _hybrid(self, data: memoryview, bits: int, count: int) -> npt.NDArray[np.uint32]:
        """`count` integers of so many bits, in runs of one value and in groups of eight."""
        values, done, at = np.zeros(count, dtype=np.uint32), 0, 0
        buffer = np.frombuffer(data, np.uint8)
        while done < count and bits:
            head = shift = 0
            while True:
                byte = data[at] if at < len(data) else 0
                head |= (byte & 127) << shift
                at, shift = at + 1, shift + 7
                if byte < 128:
                    break
            if head < 2 or bits > 32 or next(self._runs) > _MAX_RUNS:
                raise pa.ArrowInvalid("levels or indices that do not fit; write the file again")
            if head & 1:
                number = min(8 * (head >> 1), count - done)
                piece = buffer[at : at + (number * bits + 7) // 8]
                flags = np.unpackbits(piece, count=number * bits, bitorder="little")
                for bit in range(bits):
                    values[done : done + number] |= flags[bit::bits].astype(np.uint32) << bit
                at += (head >> 1) * bits
            else:
                number, size = head >> 1, (bits + 7) // 8
                values[done : done + number] = int.from_bytes(data[at : at + size], "little")
                at += size
            done += number
        return values

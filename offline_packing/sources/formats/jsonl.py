"""Files of many records: JSON Lines, and JSON arrays; plain, or compressed (.gz, .zst).

    {"id": "a-17", "messages": [...], "images": ["images/17.jpg"]}      one line, or one element

The path is one file, or a folder of which every file with the format's suffix is read. A record's
key is its "id" (text or a whole number), or else `FILE:NUMBER`, lines or elements counted from 1.
Blank lines are not records.
"""

import io
import itertools
import os
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import xxhash

from offline_packing.errors import StageError, as_sample_error
from offline_packing.sources.base import Scan, Source, SourcePart, SourceRecord
from offline_packing.sources.options import FileOptions
from offline_packing.sources.reading.contents import file_names, first_character
from offline_packing.sources.reading.locators import Locator
from offline_packing.storage.streams import (
    CODECS,
    UNREAD_SUFFIXES,
    DamagedStreamError,
    codec_of,
    open_unpacked,
)
from task_encoders.records.record import decode_text, own_key
from task_encoders.samples import SampleError
from task_encoders.samples.limits import MAX_JSON_BYTES

#: Bytes at a time while listing, and while reading records.
_BLOCK: Final = 2 << 20
_BUFFER: Final = 1 << 16
_CODECS: Final = ("", *(f".{name}" for name in CODECS))
_BOM: Final = b"\xef\xbb\xbf"

#: Takes a file block by block; returns the end offset of each record in the block.
_Cutter = Callable[[bytes], npt.NDArray[np.intp]]


def endings(suffix: str, codecs: Iterable[str] = _CODECS) -> tuple[str, ...]:
    """Endings of plain and compressed files."""
    return tuple(suffix + codec for codec in codecs)


class JsonlSource(Source):
    """One record per line. A part is (container, begin, end, first number): a byte range; of a
    compressed file, which can only be read from its beginning, the whole, with no end."""

    Options = FileOptions
    ENDINGS = endings(".jsonl")
    UNREAD = endings(".jsonl", UNREAD_SUFFIXES)
    #: bytes at the end of a record that are not its own
    SEPARATOR: ClassVar[int] = 0
    #: bytes of blank records
    BLANK: ClassVar[bytes] = string.whitespace.encode()

    def _cutter(self, begin: int) -> _Cutter:
        """Cutter of a file from its beginning, or from the end of a record."""
        return lambda block: np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1

    def _check_beginning(self, container: str, block: bytes) -> None:
        """Raise StageError if a file has another format."""

    def scan(self, samples_per_part: int) -> Scan:
        digest = xxhash.xxh3_128()
        parts: list[SourcePart] = []
        for container, _ in self.files():
            content = xxhash.xxh3_128()
            cuts, num_records = self._cut(container, samples_per_part, content)
            if codec_of(container):
                parts.append(SourcePart((container, 0, None, 1), None))
            else:
                for i, ((start, first), (end, _)) in enumerate(itertools.pairwise(cuts)):
                    count = min(samples_per_part, num_records - i * samples_per_part)
                    parts.append(SourcePart((container, start, end, first + 1), count))
            digest.update(os.fsencode(container) + b"\0" + b"0\n" + content.digest())
        return Scan(tuple(parts), digest.hexdigest())

    def _cut(
        self, container: str, records_per_part: int, content: "xxhash.xxh3_128"
    ) -> tuple[list[tuple[int, int]], int]:
        """(offset, lines or elements before it) at which parts begin, and the end; number of
        records, at least. What is read, of a compressed file nothing else, is handed to
        `content`."""
        cuts, num_records, num_lines, offset, is_open = [(0, 0)], 0, 0, 0, False
        cutter = self._cutter(0)
        with self.open_container(container, sequential=True) as file:
            while block := file.read(_BLOCK):
                content.update(block)
                if codec_of(container):
                    continue
                if offset == 0:
                    self._check_beginning(container, block)
                ends = cutter(block)
                records = np.flatnonzero(self._have_text(block, ends, is_open))
                # Record `num_records + j` is line records[j]; every records_per_part-th ends a part
                chosen = records[(-num_records - 1) % records_per_part :: records_per_part]
                places = zip((ends[chosen] + offset).tolist(), (chosen + 1).tolist(), strict=True)
                cuts += [(end, num_lines + line) for end, line in places]
                num_records, num_lines = num_records + len(records), num_lines + len(ends)
                rest = block[ends[-1] :] if len(ends) else block
                is_open = bool(rest.strip()) or (is_open and not len(ends))
                offset += len(block)
        if is_open:  # a last line without its end, or an array that was cut off
            num_records += 1
        elif num_records % records_per_part == 0:
            offset = cuts[-1][0]  # only blank ones are left
        return (cuts if cuts[-1][0] == offset else [*cuts, (offset, num_lines)]), num_records

    def _have_text(
        self, block: bytes, ends: npt.NDArray[np.intp], is_open: bool
    ) -> npt.NDArray[np.bool_]:
        """Whether each line or element that ends in a block is a record: all but blank ones, of
        which a file may hold millions. `is_open`: the first has text before the block."""
        if not len(ends):
            return np.empty(0, np.bool_)
        is_text = np.ones(256, np.bool_)
        is_text[list(self.BLANK)] = False
        data = np.frombuffer(block, np.uint8, int(ends[-1]))  # what follows is open
        begins = np.concatenate([np.zeros(1, np.intp), ends[:-1]])
        found = is_text[data[begins]]
        if not found.all():  # some begin with white space
            found = np.logical_or.reduceat(is_text[data], begins)
        found[0] |= is_open
        return found

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        # dataset_info.json says what the files are
        return None if "dataset_info.json" in file_names(path) else super().recognise(path)

    def unread_parts(self) -> list[SourcePart]:
        return [SourcePart((container, 0, None, 1), None) for container, _ in self.files()]

    def records(self, part: SourcePart) -> Iterator[SourceRecord]:
        container, begin, end, first = part.items
        stem = container[: container.lower().rfind(self.ENDINGS[0])] or container
        kind = "stream" if codec_of(container) else "bytes"
        try:
            for number, offset, data, size in self._split(container, begin, end):
                if data is None or data.strip():
                    at = Locator(kind, container, offset, size)
                    yield self._record(f"{stem}:{first + number}", at, data)
        except DamagedStreamError as error:
            at = Locator(kind, container, 0, 0)
            yield SourceRecord(container, at, SampleError("damaged_source", str(error)))

    def _split(
        self, container: str, begin: int, end: int | None
    ) -> Iterator[tuple[int, int, bytes | None, int]]:
        """Number from 0 and offset of each record between two offsets of a file (no end: of all of
        it), its bytes (None if there are too many), their number. What is left at the end comes as
        a record; blank ones, of which a small file may unpack to millions, need not come."""
        cutter = self._cutter(begin)
        held, start, position, number = list[bytes](), begin, begin, 0
        with self._open(container) as file:
            if begin:
                file.seek(begin)
            while block := file.read1(_BUFFER if end is None else min(_BUFFER, end - position)):
                ends = cutter(block)
                begins = np.concatenate([np.zeros(1, np.intp), ends])  # the last one stays open
                has_text = self._have_text(block, ends, start < position or not position)
                for i in np.flatnonzero(has_text).tolist():
                    first, last = int(begins[i]), int(ends[i]) - self.SEPARATOR
                    held.append(block[first:last])
                    offset = position + first if i else start
                    size = position + last - offset
                    data = b"".join(held) if size <= MAX_JSON_BYTES else None
                    yield number + i, offset, data, size
                    held = []
                if len(ends):
                    held, number, start = [], number + len(ends), position + int(ends[-1])
                held.append(block[begins[-1] :])
                position += len(block)
                if position - start > MAX_JSON_BYTES + self.SEPARATOR:
                    held.clear()
        size = position - start
        if size:
            yield number, start, b"".join(held) if size <= MAX_JSON_BYTES else None, size

    def _record(self, key: str, locator: Locator, data: bytes | None) -> SourceRecord:
        try:
            if data is None:
                raise SampleError("bad_record", f"the JSON is longer than {MAX_JSON_BYTES} bytes")
            content = self.parse(data, locator.column)
        except Exception as error:  # noqa: BLE001 - of this record
            return SourceRecord(key, locator, as_sample_error(error))
        own = own_key(content)
        return SourceRecord(own or key, locator, content, own_id=own != "")

    def _open(self, container: str) -> io.BufferedIOBase:
        file = self.open_container(container, sequential=True)
        content = open_unpacked(file, container, self.root.size(file))
        if isinstance(content, io.BufferedIOBase):
            return content
        return io.BufferedReader(content, _BUFFER)  # type: ignore[type-var]  # of fsspec


class JsonSource(JsonlSource):
    """Each file is one JSON array of records."""

    ENDINGS = endings(".json")
    UNREAD = endings(".json", UNREAD_SUFFIXES)
    SEPARATOR = 1
    BLANK = JsonlSource.BLANK + b","

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        names = (name for name in file_names(path) if name.lower().endswith(cls.ENDINGS))
        name = next(names, None)
        if name is None or (codec_of(name) is None and first_character(path, name) != b"["):
            return None
        return super().recognise(path)

    def _check_beginning(self, container: str, block: bytes) -> None:
        if block.removeprefix(_BOM).lstrip().startswith(b"{"):
            raise StageError(
                f"{self.root.path(container)} holds no JSON array; use format pairs for one record "
                "per file, jsonl for one per line"
            )

    def _cutter(self, begin: int) -> _Cutter:
        return _ArrayCutter(1 if begin else 0)

    def _split(
        self, container: str, begin: int, end: int | None
    ) -> Iterator[tuple[int, int, bytes | None, int]]:
        for number, start, data, size in super()._split(container, begin, end):
            if start == 0 and data is not None:  # the bracket that opens the array is not its own
                data = data.removeprefix(_BOM).lstrip().removeprefix(b"[")
                start, size = size - len(data), len(data)
            yield number, start, data, size


#: Change of the depth by a byte, and 2 for a comma; 0 is ignored.
_CLASS: Final = np.zeros(256, np.int8)
_CLASS[[ord(character) for character in "[{"]] = 1
_CLASS[[ord(character) for character in "]}"]] = -1
_CLASS[ord(",")] = 2


class _ArrayCutter:
    """Finds where the elements of a JSON array end, without parsing them: at the bytes outside
    strings that are a comma at depth 1, or the bracket that closes the array. A byte with an odd
    number of quotes before it is in a string. All of it is array arithmetic on blocks, as the first
    pass of simdjson (https://arxiv.org/abs/1902.08318)."""

    def __init__(self, depth: int) -> None:
        """`depth`: 0 in front of the array, 1 after an element."""
        self._depth = depth
        self._in_string = self._escaped = self._closed = False

    def __call__(self, block: bytes) -> npt.NDArray[np.intp]:
        """End offset of each element in the block, its separator included."""
        if self._escaped:  # by the last byte of the last block
            block = b" " + block[1:]
        block = block.replace(rb"\\", b"  ").replace(rb"\"", b"  ")
        self._escaped = block.endswith(b"\\")
        data = np.frombuffer(block, np.uint8)
        quotes = np.flatnonzero(data == ord('"'))
        places = np.flatnonzero(_CLASS[data])
        places = places[(np.searchsorted(quotes, places) + self._in_string) % 2 == 0]
        self._in_string ^= bool(len(quotes) % 2)
        kinds = _CLASS[data[places]]
        depth = self._depth + np.cumsum(np.where(kinds == 2, 0, kinds))
        self._depth = int(depth[-1]) if len(depth) else self._depth
        ends = np.flatnonzero(((kinds == 2) & (depth == 1)) | ((kinds == -1) & (depth == 0)))
        if self._closed:  # after the array, nothing is an element's end any more
            ends = ends[:0]
        elif (closing := np.flatnonzero(kinds[ends] == -1)).size:
            ends, self._closed = ends[: closing[0] + 1], True
        return places[ends] + 1


class TextSource(JsonlSource):
    """Each line of a `.txt` is a sample without media, with task captioning trained as a whole."""

    ENDINGS = endings(".txt")
    UNREAD = endings(".txt", UNREAD_SUFFIXES)

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        # A text beside other files describes them.
        is_all = all(name.lower().split(".")[1:2] == ["txt"] for name in file_names(path))
        return super().recognise(path) if is_all else None

    def parse(self, data: bytes, column: str = "") -> Mapping[str, Any]:
        return self.fields.apply({"text": decode_text(data).strip()})

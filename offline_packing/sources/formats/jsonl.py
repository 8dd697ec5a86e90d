"""Files of many records: JSON Lines, and JSON arrays; plain, or compressed (.gz, .zst).

    {"id": "a-17", "messages": [...], "images": ["images/17.jpg"]}      one line, or one element

The path is one file, or a folder of which every file with the format's suffix is read. A record's
key is its "id" (text or a whole number), or else `FILE:NUMBER`, lines or elements counted from 1.
Blank lines are not records.
"""

import io
import itertools
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final

import numpy as np
import xxhash

from offline_packing.errors import StageError
from offline_packing.sources.base import Source
from offline_packing.sources.formats.json_array import ArrayCutter, split_elements
from offline_packing.sources.options import FileOptions
from offline_packing.sources.protocol import MAX_JSON_BYTES, Scan, SourcePart, record_key
from offline_packing.sources.protocol import SourceRecord as Record
from offline_packing.sources.reading.locators import Locator
from offline_packing.sources.roots.contents import file_names, first_character, nothing_found
from offline_packing.storage.streams import (
    CODECS,
    UNREAD_SUFFIXES,
    DamagedStreamError,
    codec_of,
    find_unread,
    open_unpacked,
)
from task_encoders.samples import SampleError

_BLOCK: Final = 8 << 20
_ARRAY_BLOCK: Final = 1 << 20
_BUFFER: Final = 1 << 16

#: Offset of a record in its file, its bytes (None if there are too many), their number.
_Found = tuple[int, bytes | None, int]


class RecordFilesSource(Source):
    """Records by their byte range in a file. A part is (container, begin, end, first number); of a
    compressed file, which can only be read from its beginning, the whole, with no end."""

    Options = FileOptions
    #: suffix of the files that are read in a folder
    SUFFIX: ClassVar[str]

    @abstractmethod
    def _cut(
        self, container: str, records_per_part: int, content: "xxhash.xxh3_128"
    ) -> tuple[list[int], int]:
        """Offsets at which parts begin, and the end; number of records (blank ones included).

        What is read is handed to `content`.
        """

    @abstractmethod
    def _split(self, file: BinaryIO, begin: int, end: int | None) -> Iterator[_Found]:
        """The content between two offsets of an open file, record by record. With no end, the file
        may not be able to seek, and is read from its beginning."""

    def scan(self, samples_per_part: int) -> Scan:
        digest = xxhash.xxh3_128()
        parts: list[SourcePart] = []
        for container in self._containers():
            content = xxhash.xxh3_128()
            if codec_of(container):
                self._read_through(container, content)
                parts.append(SourcePart((container, 0, None, 1), None))
            else:
                cuts, num_records = self._cut(container, samples_per_part, content)
                for i, (start, end) in enumerate(itertools.pairwise(cuts)):
                    first = i * samples_per_part
                    count = min(samples_per_part, num_records - first)
                    parts.append(SourcePart((container, start, end, first + 1), count))
            digest.update(os.fsencode(container) + b"\0" + b"0\n" + content.digest())
        return Scan(tuple(parts), digest.hexdigest())

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        names = file_names(path)
        found = [name for name in names if _record_suffix(name) == cls.SUFFIX]
        if "dataset_info.json" in names:  # it says what the files are
            return None
        return {} if found and cls._is_form_of(path, found[0]) else None

    @classmethod
    def _is_form_of(cls, path: Path, name: str) -> bool:
        """Whether a file of the right suffix holds records of this format."""
        return True

    def unread_parts(self) -> list[SourcePart]:
        return [SourcePart((container, 0, None, 1), None) for container in self._containers()]

    def records(self, part: SourcePart) -> Iterator[Record]:
        container, begin, end, number = part.items
        packed = codec_of(container) is not None
        stem = container[: container.lower().rfind(f".{self.SUFFIX}")] or container
        kind = "stream" if packed else "bytes"
        with self._open(container) as file:
            found = self._split(file, begin, end)
            for number in itertools.count(number):  # noqa: B020 - goes on from where it is
                try:
                    offset, data, size = next(found)
                except StopIteration:
                    return
                except DamagedStreamError as error:
                    at = Locator(kind, container, 0, 0)
                    yield Record(container, at, SampleError("damaged_source", str(error)))
                    return
                if data is None or data.strip():
                    at = Locator(kind, container, offset, size)
                    yield self._record(f"{stem}:{number}", at, data)

    def _record(self, key: str, locator: Locator, data: bytes | None) -> Record:
        try:
            if data is None:
                raise SampleError("bad_record", f"the JSON is longer than {MAX_JSON_BYTES} bytes")
            content = self.parse(data)
        except SampleError as error:
            return Record(key, locator, error)
        own = record_key(content, "")
        return Record(own or key, locator, content, own_id=own != "")

    def _open(self, container: str) -> BinaryIO:
        file = self.open_container(container, sequential=True)
        content = open_unpacked(file, container, self.root.size(file))
        if isinstance(content, io.BufferedIOBase):
            return content
        return io.BufferedReader(content, _BUFFER)  # type: ignore[type-var]  # of fsspec

    def _read_through(self, container: str, content: "xxhash.xxh3_128") -> None:
        with self.open_container(container) as file:
            while block := file.read(_BLOCK):
                content.update(block)

    def is_read(self, container: str) -> bool:
        suffixes = tuple(f".{self.SUFFIX}{end}" for end in ("", *(f".{name}" for name in CODECS)))
        return container.lower().endswith((*suffixes, *self._unread_endings()))

    def _unread_endings(self) -> tuple[str, ...]:
        return tuple(f".{self.SUFFIX}{end}" for end in UNREAD_SUFFIXES)

    def _containers(self) -> list[str]:
        found = sorted(name for name, *_ in self.entries())
        if not found:
            raise nothing_found(self.path, f"*.{self.SUFFIX}")
        if problem := find_unread(found, self._unread_endings()):
            raise StageError(f"source path {self.path!r} {problem}")
        return found


def _record_suffix(name: str) -> str:
    """'a.jsonl.gz' -> 'jsonl'."""
    name = name.lower()
    return (name.rpartition(".")[0] if codec_of(name) else name).rpartition(".")[2]


class JsonlSource(RecordFilesSource):
    """One record per line."""

    SUFFIX = "jsonl"

    def _cut(
        self, container: str, records_per_part: int, content: "xxhash.xxh3_128"
    ) -> tuple[list[int], int]:
        cuts, num_lines, offset, last = [0], 0, 0, b"\n"
        with self.open_container(container) as file:
            while block := file.read(_BLOCK):
                content.update(block)
                ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + offset + 1
                # Line `num_lines + j` ends at ends[j]; every records_per_part-th closes a part.
                cuts += ends[(-num_lines - 1) % records_per_part :: records_per_part].tolist()
                num_lines += len(ends)
                offset += len(block)
                last = block[-1:]
        num_lines += last != b"\n"
        return (cuts if cuts[-1] == offset else [*cuts, offset]), num_lines

    def _split(self, file: BinaryIO, begin: int, end: int | None) -> Iterator[_Found]:
        offset = begin
        if begin:
            file.seek(begin)
        while (end is None or offset < end) and (line := file.readline(MAX_JSON_BYTES)):
            size, rest = len(line), line
            while len(rest) == MAX_JSON_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(MAX_JSON_BYTES)
                size += len(rest)
            yield offset, line if rest is line else None, size
            offset += size


class JsonSource(RecordFilesSource):
    """Each file is one JSON array of records."""

    SUFFIX = "json"

    @classmethod
    def _is_form_of(cls, path: Path, name: str) -> bool:
        return codec_of(name) is not None or first_character(path, name) == b"["

    def _cut(
        self, container: str, records_per_part: int, content: "xxhash.xxh3_128"
    ) -> tuple[list[int], int]:
        cutter = ArrayCutter()
        cuts, num_records, offset, complete = [0], 0, 0, True
        with self.open_container(container) as file:
            while block := file.read(_ARRAY_BLOCK):
                content.update(block)
                if offset == 0 and block.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
                    raise StageError(
                        f"{self.root.path(container)} holds no JSON array; use format pairs for "
                        "one record per file, jsonl for one per line"
                    )
                ends = cutter.feed(block)
                cuts += (ends[(-num_records - 1) % records_per_part :: records_per_part]).tolist()
                num_records += len(ends)
                behind = block[int(ends[-1]) - offset :] if len(ends) else block
                complete = (complete or len(ends) > 0) and not behind.strip()
                offset += len(block)
        if not complete:  # the array was cut off
            num_records += 1
        elif num_records and num_records % records_per_part == 0:
            offset = cuts[-1]  # nothing but white space is left
        return (cuts if cuts[-1] == offset else [*cuts, offset]), num_records

    def _split(self, file: BinaryIO, begin: int, end: int | None) -> Iterator[_Found]:
        if begin:
            file.seek(begin)
        return split_elements(file, begin, end, _ARRAY_BLOCK, MAX_JSON_BYTES)


class TextSource(JsonlSource):
    """Plain text: each line of a `.txt` is a sample without an image. With task captioning all of
    it is trained, as in pretraining on text."""

    SUFFIX = "txt"

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        # A text beside other files describes them.
        is_all = all(name.lower().split(".")[1:2] == ["txt"] for name in file_names(path))
        return super().recognise(path) if is_all else None

    def parse(self, data: bytes, column: str = "") -> Mapping[str, Any]:
        try:
            return self.fields.apply({"text": data.decode("utf-8").strip()})
        except UnicodeDecodeError as error:
            raise SampleError("bad_json", f"the text is not UTF-8: {error}") from error

"""Files of many records: JSON Lines, JSON arrays, CSV and TSV; plain, or compressed (.gz, .zst).

    {"id": "a-17", "messages": [...], "images": ["images/17.jpg"]}      one line, or one element
    {"info": {...}, "questions": [{...}, ...]}         or an object whose only list of objects holds
                                                       the records: official files of DocVQA, VQAv2

The path is one file, or a folder of which every file with the format's suffix is read. A record's
key is its "id" (text or a whole number), or else `FILE:NUMBER`, lines or elements counted from 1.
Blank lines are not records. A list of records in the place of one, as Qwen's packed form has it, is
read as its records, `FILE:NUMBER.PLACE`.

    image,question,answer                   the heading: names as those of a JSON record's fields,
    images/17.jpg,"How many, in all?",Two   or named by `source.fields`

In columns such as `images` and `messages`, a cell that begins as a JSON list or object is read as
one; an empty cell is a missing field. CSV cells with a comma, a quote or a line break are quoted;
in TSV a line is a row and quotes are characters like others.
"""

import csv
import io
import os
import re
import string
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from offline_packing.errors import as_sample_error
from offline_packing.sources.base import Scan, Source, SourcePart, SourceRecord
from offline_packing.sources.options import FileOptions
from offline_packing.sources.reading.contents import file_head, file_names
from offline_packing.sources.reading.locators import Locator
from offline_packing.storage.streams import (
    CODECS,
    UNREAD_SUFFIXES,
    DamagedStreamError,
    codec_of,
    open_unpacked,
)
from task_encoders.records.forms import RECORD_FIELDS, read_cells
from task_encoders.records.record import decode_text, load_json, own_key
from task_encoders.samples import SampleError
from task_encoders.samples.limits import MAX_JSON_BYTES

#: Bytes at a time while listing, and while reading records.
_BLOCK: Final = 2 << 20
_BUFFER: Final = 1 << 16
_BOM: Final = b"\xef\xbb\xbf"
_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")
#: Bytes at the beginning of a file by which its form is known, and most bytes after its records.
_HEAD: Final = 4096
_AFTER: Final = 1 << 20
#: A JSON object with one of these is a record.
_FIELDS: Final = frozenset(name.encode() for name in RECORD_FIELDS if name != "id")
_EMPTY: Final = "it is empty; restore it"
#: Beginning of a list of records.
_LIST: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[(?=\s*\{)")


def _endings(suffix: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the endings of plain and compressed files that are read; and of those that are not."""
    read = (suffix, *(f"{suffix}.{name}" for name in CODECS))
    return read, tuple(suffix + codec for codec in UNREAD_SUFFIXES)


class _LineCutter:
    """Finds where the records of a file end, block by block: at line breaks."""

    #: number of bytes at the end of a record that are not its own
    SEPARATOR: ClassVar[int] = 0
    #: bytes of blank records
    BLANK: ClassVar[bytes] = string.whitespace.encode()
    #: number of bytes at the beginning of the last block that are in front of all records
    skipped = 0

    def __call__(self, block: bytes) -> npt.NDArray[np.intp]:
        """Return the end offset of each record in the next block, its separator included."""
        return np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1

    def is_record(self, rest: bytes) -> bool:
        """Tell whether the bytes after the last end of a block are the beginning of a record."""
        return bool(rest.strip())

    def damage(self, left: bytes | None) -> tuple[str, bool]:
        """Return why the file is not whole ("": it is), and whether the bytes `left` after the last
        record's end are a record. None: they are too long to hold."""
        return "", True


class JsonlSource(Source):
    """One record per line. A part is (container, begin, end, first number): a byte range, the last
    one of a file without an end; a compressed file, which can only be read from its beginning, is
    one part."""

    Options = FileOptions
    ENDINGS, UNREAD = _endings(".jsonl")
    #: whether a line break ends a record
    BY_LINE: ClassVar[bool] = True
    #: whether a record may be a list of records
    NESTED: ClassVar[bool] = True

    def _cutter(self, container: str, begin: int) -> _LineCutter:
        """Return the cutter of a file from its beginning, or from the end of a record."""
        return _LineCutter()

    def _problem_of(self, head: bytes) -> str:
        """Tell why a file with this beginning is of another form; "": it is not."""
        odd, even = head[1::2].strip(b"\0"), head[::2].strip(b"\0")
        if head.startswith(_UTF16) or (len(head) > 3 and bool(odd) != bool(even)):
            return "it is UTF-16; convert it: iconv -f UTF-16 -t UTF-8"
        if self.BY_LINE and b"\r" in head and b"\n" not in head:
            return r"its lines end in CR; convert it: tr '\r' '\n'"
        return ""

    def _heading(self, container: str) -> tuple[str, str]:
        """Return the names of a file's columns as JSON, and why they cannot be used; "", "": it
        has no heading."""
        return "", ""

    def scan(self, samples_per_part: int) -> Scan:
        digest = xxhash.xxh3_128()
        parts = self.cut_files(partial(self._cut, samples_per_part, digest))
        return Scan(parts, digest.hexdigest())

    def _cut(
        self, records_per_part: int, digest: "xxhash.xxh3_128", container: str
    ) -> tuple[list[SourcePart], str]:
        """Cut a file into parts, see `cut_files`. The digest gets the name of the file and a hash
        of its bytes, of a damaged file of the first ones."""
        whole = SourcePart((container, 0, None, 1), None)
        #: offset and number of the first line or element of each part
        cuts, num_records, num_lines, offset, is_open = [(0, 1)], 0, 0, 0, False
        cutter, is_packed = self._cutter(container, 0), codec_of(container) is not None
        content = xxhash.xxh3_128()
        with self.open_container(container, sequential=True) as file:
            head = file.read(_HEAD)
            problem = _EMPTY if not head else "" if is_packed else self._problem_of(head)
            for block in _blocks(head, file.read, _BLOCK, 0 if problem else None):
                content.update(block)
                if is_packed or problem:
                    continue
                ends = cutter(block)
                records = np.flatnonzero(_have_text(cutter, block, ends, is_open))
                # Record `num_records + j` is line records[j]; every records_per_part-th ends a part
                chosen = records[(-num_records - 1) % records_per_part :: records_per_part]
                places = zip((ends[chosen] + offset).tolist(), (chosen + 2).tolist(), strict=True)
                cuts += [(end, num_lines + line) for end, line in places]
                num_records, num_lines = num_records + len(records), num_lines + len(ends)
                rest = block[ends[-1] :] if len(ends) else block
                is_open = cutter.is_record(rest) or (is_open and not len(ends))
                offset += len(block)
        digest.update(os.fsencode(container) + b"\0" + b"0\n" + content.digest())
        if not (problem or is_packed or num_records or is_open):
            problem = _EMPTY
        if problem:
            return [replace(whole, num_records=1)], problem
        columns, problem = self._heading(container)
        if is_packed:
            return [whole], problem
        # A last line without its end is a record, and an array that was cut is one more.
        num_left = is_open + bool(cutter.damage(b"")[0])
        if num_records % records_per_part == 0 and not num_left:
            cuts.pop()  # only blank ones are left
        ends_at = [*(end for end, _ in cuts[1:]), None]
        counts = [records_per_part] * len(cuts)
        counts[-1] = num_records + num_left - sum(counts[:-1])
        counts[0] -= bool(columns)
        return [
            SourcePart((container, start, end, first), count)
            for (start, first), end, count in zip(cuts, ends_at, counts, strict=True)
        ], problem

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        # dataset_info.json says what the files are
        return None if "dataset_info.json" in file_names(path) else super().recognise(path)

    def unread_parts(self) -> list[SourcePart]:
        return [SourcePart((container, 0, None, 1), None) for container, _ in self.files()]

    def records(self, part: SourcePart) -> Iterator[SourceRecord]:
        container, begin, end, first = part.items
        stem = container[: container.lower().rfind(self.ENDINGS[0])] or container
        kind, known = "stream" if codec_of(container) else "bytes", first - 1
        columns, problem = self._heading(container)
        has_heading = not begin and bool(columns or problem)
        try:
            for number, offset, data, size in self._split(container, begin, end):
                if has_heading and not number:
                    continue
                if data is None or data.strip():
                    at = Locator(kind, container, offset, size, columns)
                    known = first + number
                    if problem:
                        yield self.damaged(f"{stem}:{known}", at, problem)
                    else:
                        yield from self._records(f"{stem}:{known}", at, data)
            if problem and not known:
                raise DamagedStreamError(problem)
        except DamagedStreamError as error:
            why = f"{error} (after {stem}:{known})" if known else error
            yield self.damaged(container, Locator(kind, container, 0, 0), why)

    def _split(
        self, container: str, begin: int, end: int | None
    ) -> Iterator[tuple[int, int, bytes | None, int]]:
        """Yield the records between two offsets of a file (no end: that of the file): the number
        from 0, the offset, the bytes (None if there are too many) and their count. The rest at the
        end counts as a record; blank ones may be left out, since a small file may unpack to
        millions. Raises DamagedStreamError after the last one if the file is not whole."""
        cutter = self._cutter(container, begin)
        held, start, position, number, is_blank = list[bytes](), begin, begin, 0, True
        packed = self.open_container(container, sequential=True)
        with cast(io.BufferedReader, open_unpacked(packed, container)) as file:
            if begin:
                file.seek(begin)
            head = b"" if begin else file.read(_HEAD if end is None else min(_HEAD, end))
            if problem := self._problem_of(head):
                raise DamagedStreamError(problem)
            left = None if end is None else end - begin - len(head)
            for block in _blocks(head, file.read1, _BUFFER, left):
                if self.BY_LINE and start == position and block[-1:] == b"\n" and block.isspace():
                    number, position = number + block.count(b"\n"), position + len(block)
                    start = position
                    continue
                ends = cutter(block)
                if cutter.skipped:
                    held, start, is_blank = [], position + cutter.skipped, False
                has_text = _have_text(cutter, block, ends, start < position or not position)
                begins = [cutter.skipped, *ends.tolist()]  # the last one stays open
                for i in np.flatnonzero(has_text).tolist():
                    last = begins[i + 1] - cutter.SEPARATOR
                    held.append(block[begins[i] : last])
                    offset = position + begins[i] if i else start
                    size = position + last - offset
                    data = b"".join(held) if size <= MAX_JSON_BYTES else None
                    yield number + i, offset, data, size
                    held, is_blank = [], is_blank and data is not None and not data.strip()
                if len(ends):
                    held, number, start = [], number + len(ends), position + begins[-1]
                held.append(block[begins[-1] :])
                position += len(block)
                if position - start > MAX_JSON_BYTES + cutter.SEPARATOR:
                    held.clear()
        size = position - start
        data = b"".join(held) if size <= MAX_JSON_BYTES else None
        damage, is_record = cutter.damage(data) if end is None else ("", True)
        if size and is_record:
            yield number, start, data, size
        if not begin and end is None and is_blank and data is not None and not data.strip():
            damage = _EMPTY
        if damage:
            raise DamagedStreamError(damage)

    def _records(self, key: str, at: Locator, data: bytes | None) -> Iterator[SourceRecord]:
        """Yield the record in a line or an element, or those of a list of them."""
        match = _LIST.match(data) if data is not None and self.NESTED else None
        if data is None or match is None:
            yield self._record(key, at, data)
            return
        cutter = _ArrayCutter()
        bounds = [match.end(), *cutter(data).tolist()]
        if not cutter.is_closed or cutter.problem_after():
            yield self._record(key, at, data)
            return
        for number, (begin, end) in enumerate(pairwise(bounds), 1):
            place = at._replace(offset=at.offset + begin, size=end - 1 - begin)
            yield self._record(f"{key}.{number}", place, data[begin : end - 1])

    def _record(self, key: str, locator: Locator, data: bytes | None) -> SourceRecord:
        try:
            if data is None:
                raise SampleError("bad_record", f"the JSON is longer than {MAX_JSON_BYTES} bytes")
            content = self.parse(data, locator.column)
        except Exception as error:  # noqa: BLE001 - of this record
            return SourceRecord(key, locator, as_sample_error(error))
        own = own_key(content)
        return SourceRecord(own or key, locator, content, own_id=own != "")


def _blocks(
    head: bytes, read: Callable[[int], bytes], size: int, left: int | None = None
) -> Iterator[bytes]:
    """Yield the head of a file and at most `left` bytes after it, in blocks of at most `size`."""
    for start in range(0, len(head), size):
        yield head[start : start + size]
    while block := read(size if left is None else min(size, left)):
        yield block
        left = None if left is None else left - len(block)


def _have_text(
    cutter: _LineCutter, block: bytes, ends: npt.NDArray[np.intp], is_open: bool
) -> npt.NDArray[np.bool_]:
    """Tell which lines or elements that end in a block are records: all but blank ones, of which a
    file may hold millions. `is_open`: the first has text before the block."""
    if not len(ends):
        return np.empty(0, np.bool_)
    is_text = np.ones(256, np.bool_)
    is_text[list(cutter.BLANK)] = False
    data = np.frombuffer(block, np.uint8, int(ends[-1]))  # what follows is open
    begins = np.append(0, ends[:-1])
    found = is_text[data[begins]]
    if not found.all():  # some begin with white space
        found = np.logical_or.reduceat(is_text[data], begins)
    found[0] |= is_open
    return found


class JsonSource(JsonlSource):
    """Each file is one JSON array of records, or an object with such an array."""

    ENDINGS, UNREAD = _endings(".json")
    BY_LINE = False

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        names = (name for name in file_names(path) if name.lower().endswith(cls.ENDINGS))
        name = next(names, None)
        if name is None or (codec_of(name) is None and _opening(file_head(path, name)) is None):
            return None
        return super().recognise(path)

    def _problem_of(self, head: bytes) -> str:
        problem = super()._problem_of(head)
        if not problem and head.removeprefix(_BOM).strip() and _opening(head) is None:
            problem = "it holds no JSON array; use format pairs for one record per file, jsonl for "
            problem += "one per line"
        return problem

    def _cutter(self, container: str, begin: int) -> _LineCutter:
        if not begin:
            return _ArrayCutter()
        with self.open_container(container) as file:
            return _ArrayCutter(_before_records(file.read(_HEAD)))


#: Strings, and the brackets between them.
_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def _opening(head: bytes) -> int | None:
    """Find the offset of the bracket that opens the array of records in a file with this beginning:
    the file's own array, or the first list of objects in an object that is no record itself."""
    head, depth = head[:_HEAD], 0
    if head.removeprefix(_BOM).lstrip()[:1] not in (b"[", b"{"):
        return None
    for token in _TOKEN.finditer(head):
        mark, after = token[0], head[token.end() :].lstrip()[:1]
        if mark == b"[" and (depth == 0 or (depth == 1 and after == b"{")):
            return token.start()
        is_field = depth == 1 and after == b":" and mark[1:-1] in _FIELDS
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(mark, 0)
        if is_field or depth <= 0:
            return None
    return None


def _before_records(head: bytes) -> bytes:
    """Return the bytes up to the bracket that opens the array, itself included."""
    opening = _opening(head)
    return b"" if opening is None else head[: opening + 1]


#: Change of the depth by a byte, and 2 for a comma; 0 is ignored.
_CLASS: Final = np.zeros(256, np.int8)
_CLASS[[ord(character) for character in "[{"]] = 1
_CLASS[[ord(character) for character in "]}"]] = -1
_CLASS[ord(",")] = 2


class _ArrayCutter(_LineCutter):
    """Finds where the elements of a JSON array end, without parsing them: at the bytes outside
    strings that are a comma at depth 1, or the bracket that closes the array. A byte with an odd
    number of quotes before it is in a string. All of it is array arithmetic on blocks, as the first
    pass of simdjson (https://arxiv.org/abs/1902.08318)."""

    SEPARATOR = 1
    BLANK = _LineCutter.BLANK + b","

    def __init__(self, before: bytes = b"") -> None:
        """Begin at the end of an element, after what opened the array (`before`), or at the file's
        beginning."""
        self._before, self._depth = before, int(before != b"")
        self._in_string = self._escaped = False
        #: whether the bracket that closes the array was seen, and the first bytes after it
        self.is_closed, self._after = False, b""

    def problem_after(self) -> str:
        """Tell why the bytes after the array must not follow it; "": they may."""
        if not self._before.removeprefix(_BOM).strip().startswith(b"{"):
            return "text follows its array; remove it" if self._after.strip() else ""
        try:
            fields = orjson.loads(b'{"":0' + self._after)
        except orjson.JSONDecodeError:
            return "its object does not end soon after its list of records; restore or shorten it"
        if any(
            isinstance(one, list) and one and isinstance(one[0], dict) for one in fields.values()
        ):
            return "it holds several lists of objects; write the one with the records to a file"
        return ""

    def __call__(self, block: bytes) -> npt.NDArray[np.intp]:
        whole, self.skipped = block, 0
        if not self._before:
            self._before = _before_records(block)
            self.skipped = len(self._before)
            block = b" " * (self.skipped - 1) + block[max(self.skipped - 1, 0) :]
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
        if self.is_closed:  # after the array, nothing is an element's end any more
            ends, after = ends[:0], whole
        elif (closing := np.flatnonzero(kinds[ends] == -1)).size:
            ends, self.is_closed = ends[: closing[0] + 1], True
            after = whole[places[ends[-1]] + 1 :]
        else:
            after = b""
        if len(self._after) <= _AFTER:
            self._after += after
        return places[ends] + 1

    def is_record(self, rest: bytes) -> bool:
        return not self.is_closed and super().is_record(rest)

    def damage(self, left: bytes | None) -> tuple[str, bool]:
        if self.is_closed:
            return self.problem_after(), False
        is_record = False
        with suppress(SampleError):
            is_record = left is not None and load_json(left) is not None
        return "its array has no end, as of a file that was cut; restore it", is_record


class TextSource(JsonlSource):
    """Each line of a `.txt` is a sample without media, with task captioning trained as a whole."""

    ENDINGS, UNREAD = _endings(".txt")
    NESTED = False

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        # A text among other files describes them.
        is_all = all(name.lower().split(".")[1:2] == ["txt"] for name in file_names(path))
        return super().recognise(path) if is_all else None

    def files_at(self, record: Locator) -> None:
        return None

    def parse(self, data: bytes, column: str = "") -> Mapping[str, Any]:
        return self.fields.apply({"text": decode_text(data).strip()})


csv.field_size_limit(MAX_JSON_BYTES)  # of the process; the default is 128 KiB


class TsvSource(JsonlSource):
    """Columns apart by tabs, a row per line."""

    ENDINGS, UNREAD = _endings(".tsv")
    NESTED = False
    DIALECT: ClassVar[Mapping[str, Any]] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}

    def _heading(self, container: str) -> tuple[str, str]:
        try:
            _, _, line, _ = next(self._split(container, 0, None))
            columns = self._cells(line or b"")
            self.fields.choose(columns, hint="its first row is to name them; ")
        except SampleError as error:
            return "", f"its heading cannot be read: {error.detail}; mend it"
        except DamagedStreamError as error:
            return "", str(error)
        return orjson.dumps(columns).decode(), ""

    def parse(self, data: bytes, column: str = "") -> Mapping[str, Any]:
        cells, names = self._cells(data), orjson.loads(column)
        if len(cells) != len(names):
            raise SampleError("bad_record", f"{len(cells)} cells, the heading has {len(names)}")
        row = zip(names, cells, strict=True)
        return read_cells(self.fields.apply({name: cell for name, cell in row if cell}))

    def _cells(self, line: bytes) -> list[str]:
        text = decode_text(line).rstrip("\r\n")
        try:
            (row,) = csv.reader([text], strict=True, **self.DIALECT)
        except (csv.Error, ValueError) as error:
            raise SampleError("bad_record", f"the row cannot be read: {error}") from error
        return row


class CsvSource(TsvSource):
    """Columns apart by commas; quoted cells may hold line breaks."""

    ENDINGS, UNREAD = _endings(".csv")
    DIALECT: ClassVar[Mapping[str, Any]] = {}

    def _cutter(self, container: str, begin: int) -> _LineCutter:
        return _RowCutter()


class _RowCutter(_LineCutter):
    """Finds line breaks outside quotes, with an even number of quotes before them, since a quote in
    a quoted cell is doubled."""

    def __init__(self) -> None:
        self._in_quotes = False

    def __call__(self, block: bytes) -> npt.NDArray[np.intp]:
        data = np.frombuffer(block, np.uint8)
        quotes, ends = (np.flatnonzero(data == ord(one)) for one in '"\n')
        outside = (np.searchsorted(quotes, ends) + self._in_quotes) % 2 == 0
        self._in_quotes ^= bool(len(quotes) % 2)
        return ends[outside] + 1

    def damage(self, left: bytes | None) -> tuple[str, bool]:
        if not self._in_quotes:
            return "", True
        lines = "" if left is None else f"{len(left.splitlines()):,} "
        return f"a quote in its last {lines}lines has no second one; mend it", False

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final

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
_CODECS: Final = ("", *(f".{name}" for name in CODECS))
_BOM: Final = b"\xef\xbb\xbf"
_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")
#: Bytes at the beginning of a file by which its form is known, and most bytes after its records.
_HEAD: Final = 4096
_AFTER: Final = 1 << 20
#: A JSON object with one of these is a record.
_FIELDS: Final = frozenset(name.encode() for name in RECORD_FIELDS if name != "id")
_EMPTY: Final = "it is empty; restore it"
#: Beginning of a list of records.
_LIST: Final = re.compile(rb"\s*\[(?=\s*\{)")

#: Takes a file block by block; returns the end offset of each record in the block.
_Cutter = Callable[[bytes], npt.NDArray[np.intp]]


def endings(suffix: str, codecs: Iterable[str] = _CODECS) -> tuple[str, ...]:
    """Endings of plain and compressed files."""
    return tuple(suffix + codec for codec in codecs)


class JsonlSource(Source):
    """One record per line. A part is (container, begin, end, first number): a byte range, the last
    one of a file without an end; a compressed file, which can only be read from its beginning, is
    one part."""

    Options = FileOptions
    ENDINGS = endings(".jsonl")
    UNREAD = endings(".jsonl", UNREAD_SUFFIXES)
    #: bytes at the end of a record that are not its own
    SEPARATOR: ClassVar[int] = 0
    #: whether a line break ends a record
    BY_LINE: ClassVar[bool] = True
    #: whether a record may be a list of records
    NESTED: ClassVar[bool] = True
    #: bytes of blank records
    BLANK: ClassVar[bytes] = string.whitespace.encode()

    def _cutter(self, container: str, begin: int) -> _Cutter:
        """Cutter of a file from its beginning, or from the end of a record."""
        return lambda block: np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1

    def _check_beginning(self, head: bytes) -> None:
        """Raise DamagedStreamError if a file with this beginning is of another form."""
        odd, even = head[1::2].strip(b"\0"), head[::2].strip(b"\0")
        if head.startswith(_UTF16) or (len(head) > 3 and bool(odd) != bool(even)):
            raise DamagedStreamError("it is UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
        if self.BY_LINE and b"\r" in head and b"\n" not in head:
            raise DamagedStreamError(r"its lines end in CR; convert it: tr '\r' '\n'")

    def _damage(self, cutter: Any, start: int, left: bytes | None) -> tuple[str, bool]:
        """Why a cut file is not whole ("": it is), and whether the bytes `left` from `start` on,
        after the last record's end, are a record. None: too long to hold."""
        return "", True

    def _is_record(self, cutter: Any, rest: bytes) -> bool:
        """Whether the bytes after the last end of a block are the beginning of a record."""
        return bool(rest.strip())

    def scan(self, samples_per_part: int) -> Scan:
        digest = xxhash.xxh3_128()

        def cut(container: str) -> tuple[list[SourcePart], str]:
            content = xxhash.xxh3_128()
            parts, problem = self._cut(container, samples_per_part, content)
            digest.update(os.fsencode(container) + b"\0" + b"0\n" + content.digest())
            return parts, problem

        return Scan(self.cut_files(cut), digest.hexdigest())

    def _cut(
        self, container: str, records_per_part: int, content: "xxhash.xxh3_128"
    ) -> tuple[list[SourcePart], str]:
        """The parts of a file, see `cut_files`. Bytes that are read (of a compressed file only
        these) are handed to `content`."""
        whole = SourcePart((container, 0, None, 1), None)
        #: (offset, lines or elements before it) at which parts begin
        cuts, num_records, num_lines, offset, is_open = [(0, 0)], 0, 0, 0, False
        cutter = self._cutter(container, 0)
        with self.open_container(container, sequential=True) as file:
            head = file.read(_HEAD)
            try:
                if not head:
                    raise DamagedStreamError(_EMPTY)
                if not codec_of(container):
                    self._check_beginning(head)
            except DamagedStreamError as error:
                content.update(head)
                return [replace(whole, num_records=1)], str(error)
            if codec_of(container):
                for block in _blocks(head, file.read, _BLOCK):
                    content.update(block)
                return [whole], ""
            for block in _blocks(head, file.read, _BLOCK):
                content.update(block)
                ends = cutter(block)
                records = np.flatnonzero(self._have_text(block, ends, is_open))
                # Record `num_records + j` is line records[j]; every records_per_part-th ends a part
                chosen = records[(-num_records - 1) % records_per_part :: records_per_part]
                places = zip((ends[chosen] + offset).tolist(), (chosen + 1).tolist(), strict=True)
                cuts += [(end, num_lines + line) for end, line in places]
                num_records, num_lines = num_records + len(records), num_lines + len(ends)
                rest = block[ends[-1] :] if len(ends) else block
                is_open = self._is_record(cutter, rest) or (is_open and not len(ends))
                offset += len(block)
        if not num_records and not is_open:
            return [replace(whole, num_records=1)], _EMPTY
        # A last line without its end is a record, and an array that was cut is one more.
        num_left = is_open + bool(self._damage(cutter, offset, b"")[0])
        if num_records % records_per_part == 0 and not num_left:
            cuts.pop()  # only blank ones are left
        ends_at = [*(end for end, _ in cuts[1:]), None]
        counts = [records_per_part] * len(cuts)
        counts[-1] = num_records + num_left - sum(counts[:-1])
        return [
            SourcePart((container, start, end, first + 1), count)
            for (start, first), end, count in zip(cuts, ends_at, counts, strict=True)
        ], ""

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
        kind, known = "stream" if codec_of(container) else "bytes", first - 1
        try:
            for number, offset, data, size in self._split(container, begin, end):
                if data is None or data.strip():
                    at = Locator(kind, container, offset, size)
                    known = first + number
                    yield from self._records(f"{stem}:{known}", at, data)
        except DamagedStreamError as error:
            why = f"{error} (after {stem}:{known})" if known else error
            yield self.damaged(container, Locator(kind, container, 0, 0), why)

    def _split(
        self, container: str, begin: int, end: int | None
    ) -> Iterator[tuple[int, int, bytes | None, int]]:
        """Number from 0 and offset of each record between two offsets of a file (no end: that of
        the file), its bytes (None if there are too many), their number. The rest at the end counts
        as a record; blank ones may be left out, since a small file may unpack to millions. Raises
        DamagedStreamError after the last one if the file is not whole."""
        cutter = self._cutter(container, begin)
        held, start, position, number, is_blank = list[bytes](), begin, begin, 0, True
        packed = self.open_container(container, sequential=True)
        with _buffered(open_unpacked(packed, container)) as file:
            head = b""
            if begin:
                file.seek(begin)
            elif head := file.read(_HEAD if end is None else min(_HEAD, end)):
                self._check_beginning(head)
            left = None if end is None else end - begin - len(head)
            for block in _blocks(head, file.read1, _BUFFER, left):
                if self.BY_LINE and start == position and block[-1:] == b"\n" and block.isspace():
                    number, start = number + block.count(b"\n"), position + len(block)
                    position = start
                    continue
                ends = cutter(block)
                begins = np.concatenate([np.zeros(1, np.intp), ends])  # the last one stays open
                has_text = self._have_text(block, ends, start < position or not position)
                lines = np.flatnonzero(has_text)
                bounds = zip(
                    lines.tolist(), begins[lines].tolist(), ends[lines].tolist(), strict=True
                )
                for i, first, last in bounds:
                    last -= self.SEPARATOR
                    held.append(block[first:last])
                    offset = position + first if i else start
                    size = position + last - offset
                    data = b"".join(held) if size <= MAX_JSON_BYTES else None
                    yield number + i, offset, data, size
                    held, is_blank = [], is_blank and data is not None and not data.strip()
                if len(ends):
                    held, number, start = [], number + len(ends), position + int(begins[-1])
                held.append(block[int(begins[-1]) :])
                position += len(block)
                if position - start > MAX_JSON_BYTES + self.SEPARATOR:
                    held.clear()
        size = position - start
        data = b"".join(held) if size <= MAX_JSON_BYTES else None
        damage, is_record = self._damage(cutter, start, data) if end is None else ("", True)
        if size and is_record:
            yield number, start, data, size
        if not begin and end is None and is_blank and data is not None and not data.strip():
            damage = _EMPTY
        if damage:
            raise DamagedStreamError(damage)

    def _records(self, key: str, at: Locator, data: bytes | None) -> Iterator[SourceRecord]:
        """Yield the record in a line or an element, or those of a list of them."""
        cutter, bounds = _ArrayCutter(), list[int]()
        if data is not None and self.NESTED and (match := _LIST.match(data)):
            bounds = [match.end(), *cutter(data).tolist()]
        if data is None or not cutter.is_closed or cutter.problem_after():
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


def _buffered(content: BinaryIO) -> io.BufferedIOBase:
    if isinstance(content, io.BufferedIOBase):
        return content
    return io.BufferedReader(content, _BUFFER)  # type: ignore[type-var]  # of fsspec


def _blocks(
    head: bytes, read: Callable[[int], bytes], size: int, left: int | None = None
) -> Iterator[bytes]:
    """The head of a file and at most `left` bytes after it, in blocks of at most `size`."""
    for start in range(0, len(head), size):
        yield head[start : start + size]
    while block := read(size if left is None else min(size, left)):
        yield block
        left = None if left is None else left - len(block)


class JsonSource(JsonlSource):
    """Each file is one JSON array of records, or an object with such an array."""

    ENDINGS = endings(".json")
    UNREAD = endings(".json", UNREAD_SUFFIXES)
    SEPARATOR = 1
    BY_LINE = False
    BLANK = JsonlSource.BLANK + b","

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        names = (name for name in file_names(path) if name.lower().endswith(cls.ENDINGS))
        name = next(names, None)
        if name is None or (codec_of(name) is None and _opening(file_head(path, name)) is None):
            return None
        return super().recognise(path)

    def _check_beginning(self, head: bytes) -> None:
        super()._check_beginning(head)
        if head.removeprefix(_BOM).strip() and _opening(head) is None:
            raise DamagedStreamError(
                "it holds no JSON array; use format pairs for one record per file, jsonl for one "
                "per line"
            )

    def _is_record(self, cutter: "_ArrayCutter", rest: bytes) -> bool:
        return not cutter.is_closed and super()._is_record(cutter, rest)

    def _damage(self, cutter: "_ArrayCutter", start: int, left: bytes | None) -> tuple[str, bool]:
        if cutter.is_closed:
            return cutter.problem_after(), False
        if left is not None and not start:
            left = left[len(_before_records(left)) :]
        try:
            is_record = left is not None and load_json(left) is not None
        except SampleError:
            is_record = False
        return "its array has no end, as of a file that was cut; restore it", is_record

    def _cutter(self, container: str, begin: int) -> _Cutter:
        if not begin:
            return _ArrayCutter()
        with self.open_container(container) as file:
            return _ArrayCutter(_before_records(file.read(_HEAD)))

    def _split(
        self, container: str, begin: int, end: int | None
    ) -> Iterator[tuple[int, int, bytes | None, int]]:
        for number, start, data, size in super()._split(container, begin, end):
            if start == 0 and data is not None:  # what opens the array is not its own
                data = data[len(_before_records(data)) :]
                start, size = size - len(data), len(data)
            yield number, start, data, size


#: Strings, and the brackets between them.
_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def _opening(head: bytes) -> int | None:
    """Offset of the bracket that opens the array of records in a file with this beginning: the
    file's own array, or the first list of objects in an object that is not itself a record."""
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
    """The bytes up to the bracket that opens the array, itself included."""
    opening = _opening(head)
    return b"" if opening is None else head[: opening + 1]


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

    def __init__(self, before: bytes = b"") -> None:
        """`before`: what opened the array, for a file that is read from the end of an element."""
        self._before, self._depth = before, int(before != b"")
        self._in_string = self._escaped = False
        #: whether the bracket that closes the array was seen, and the first bytes after it
        self.is_closed, self._after = False, b""

    def problem_after(self) -> str:
        """Why the bytes after the array are not what may stand there; "": they are."""
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
        """End offset of each element in the block, its separator included."""
        whole = block
        if not self._before:
            self._before = _before_records(block)
            block = b" " * (len(self._before) - 1) + block[max(len(self._before) - 1, 0) :]
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


class TextSource(JsonlSource):
    """Each line of a `.txt` is a sample without media, with task captioning trained as a whole."""

    ENDINGS = endings(".txt")
    UNREAD = endings(".txt", UNREAD_SUFFIXES)
    NESTED = False

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        # A text beside other files describes them.
        is_all = all(name.lower().split(".")[1:2] == ["txt"] for name in file_names(path))
        return super().recognise(path) if is_all else None

    def files_at(self, record: Locator) -> None:
        return None

    def parse(self, data: bytes, column: str = "") -> Mapping[str, Any]:
        return self.fields.apply({"text": decode_text(data).strip()})


csv.field_size_limit(MAX_JSON_BYTES)  # of the process; the default is 128 KiB


class TsvSource(JsonlSource):
    """Columns apart by tabs, a row per line."""

    ENDINGS = endings(".tsv")
    UNREAD = endings(".tsv", UNREAD_SUFFIXES)
    NESTED = False
    DIALECT: ClassVar[Mapping[str, Any]] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}

    def _cut(
        self, container: str, records_per_part: int, content: "xxhash.xxh3_128"
    ) -> tuple[list[SourcePart], str]:
        parts, problem = super()._cut(container, records_per_part, content)
        try:
            if not problem:
                _, _, line, _ = next(super()._split(container, 0, None))
                self._columns(line or b"")
                if (counted := parts[0].num_records) is not None:
                    parts[0] = replace(parts[0], num_records=counted - 1)
        except DamagedStreamError as error:
            problem = str(error)
        return parts, problem

    def _split(
        self, container: str, begin: int, end: int | None
    ) -> Iterator[tuple[int, int, bytes | None, int]]:
        rows = super()._split(container, begin, end)
        first = next(rows, None) if begin == 0 else None
        _, _, line, _ = first or next(super()._split(container, 0, None))
        self._heading, self._problem, num_rows = "", "", 0
        try:
            self._heading = orjson.dumps(self._columns(line or b"")).decode()
        except DamagedStreamError as error:
            self._problem = str(error)
        for row in rows:
            num_rows += 1
            yield row
        if self._problem and not begin and not num_rows:
            raise DamagedStreamError(self._problem)

    def _columns(self, line: bytes) -> list[str]:
        """The names in a heading. Raises DamagedStreamError if it cannot be one."""
        try:
            columns = self._cells(line.removeprefix(_BOM))
        except SampleError as error:
            raise DamagedStreamError(
                f"its heading cannot be read: {error.detail}; mend it"
            ) from error
        self.fields.choose(columns, hint="its first row is to name them; ")
        return columns

    def _record(self, key: str, locator: Locator, data: bytes | None) -> SourceRecord:
        if self._problem:
            return self.damaged(key, locator, self._problem)
        return super()._record(key, locator._replace(column=self._heading), data)

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

    ENDINGS = endings(".csv")
    UNREAD = endings(".csv", UNREAD_SUFFIXES)
    DIALECT: ClassVar[Mapping[str, Any]] = {}

    def _cutter(self, container: str, begin: int) -> "_RowCutter":
        return _RowCutter()

    def _damage(self, cutter: "_RowCutter", start: int, left: bytes | None) -> tuple[str, bool]:
        if not cutter.in_quotes:
            return "", True
        lines = "" if left is None else f"{len(left.splitlines()):,} "
        return f"a quote in its last {lines}lines has no second one; mend it", False


class _RowCutter:
    """Finds line breaks outside quotes, with an even number of quotes before them, since a quote in
    a quoted cell is doubled."""

    def __init__(self) -> None:
        #: whether the last block ends in a quoted cell
        self.in_quotes = False

    def __call__(self, block: bytes) -> npt.NDArray[np.intp]:
        """End offset of each row that ends in the next block."""
        data = np.frombuffer(block, np.uint8)
        quotes, ends = (np.flatnonzero(data == ord(one)) for one in '"\n')
        outside = (np.searchsorted(quotes, ends) + self.in_quotes) % 2 == 0
        self.in_quotes ^= bool(len(quotes) % 2)
        return ends[outside] + 1

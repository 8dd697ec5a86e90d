"""CSV and TSV files with a heading: a record per row, plain or compressed (.gz, .zst).

    image,question,answer                   the names of the columns are those of a JSON record's
    images/17.jpg,"How many, in all?",Two   fields, or are named by `source.fields`

A cell that begins as a JSON list or object is read as one in the columns that may hold it, such as
`images` and `messages`; an empty cell is a field that the record lacks. CSV cells with a comma, a
quote or a line break are quoted; in TSV a line is a row and quotes are characters like others.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from offline_packing.sources.base import SourcePart, SourceRecord
from offline_packing.sources.formats.jsonl import JsonlSource, endings
from offline_packing.sources.reading.locators import Locator
from offline_packing.storage.streams import UNREAD_SUFFIXES, DamagedStreamError
from task_encoders.records.questions import DIALOGUE_FIELDS
from task_encoders.records.record import MEDIA_FIELDS, RECORD_FIELDS, decode_text
from task_encoders.samples import SampleError
from task_encoders.samples.limits import MAX_JSON_BYTES, check_json

#: Columns whose cells may be JSON.
_STRUCTURED: Final = {*DIALOGUE_FIELDS, *MEDIA_FIELDS, "captions", "answers", "tools", "functions"}
_BOM: Final = b"\xef\xbb\xbf"

csv.field_size_limit(MAX_JSON_BYTES)  # of the process; the default is 128 KiB


class TsvSource(JsonlSource):
    """Columns apart by tabs, a row per line."""

    ENDINGS = endings(".tsv")
    UNREAD = endings(".tsv", UNREAD_SUFFIXES)
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
        """The names in a heading. Raises DamagedStreamError where it does not serve as one."""
        try:
            columns = self._cells(line.removeprefix(_BOM))
        except SampleError as error:
            raise DamagedStreamError(
                f"its heading cannot be read: {error.detail}; mend it"
            ) from error
        twice = [name for name in columns if columns.count(name) > 1]
        if twice:
            raise DamagedStreamError(f"it has {len(twice)} columns named {twice[0]!r}; rename them")
        absent = [one for one in self.fields.named.values() if one not in columns]
        if absent or not {*columns} & ({*RECORD_FIELDS, *self.fields.columns()} - {"id"}):
            problem = f" (no {absent[0]})" if absent else ""
            raise DamagedStreamError(
                f"it has the columns {', '.join(columns)}; its first row is to name them; name "
                f"those to be used{problem}, for example source.fields={{image: jpg, caption: txt}}"
            )
        return columns

    def _record(self, key: str, locator: Locator, data: bytes | None) -> SourceRecord:
        if self._problem:
            return self.damaged(key, locator, self._problem)
        return super()._record(key, replace(locator, column=self._heading), data)

    def parse(self, data: bytes, column: str = "") -> Mapping[str, Any]:
        cells, names = self._cells(data), orjson.loads(column)
        if len(cells) != len(names):
            raise SampleError("bad_record", f"{len(cells)} cells, the heading has {len(names)}")
        row = zip(names, cells, strict=True)
        renamed = self.fields.apply({name: cell for name, cell in row if cell})
        return {name: _value(name, cell) for name, cell in renamed.items()}

    def _cells(self, line: bytes) -> list[str]:
        text = decode_text(line).rstrip("\r\n")
        try:
            (row,) = csv.reader([text], strict=True, **self.DIALECT)
        except (csv.Error, ValueError) as error:
            raise SampleError("bad_record", f"the row cannot be read: {error}") from error
        return row


def _value(name: str, cell: Any) -> Any:
    if name not in _STRUCTURED or not isinstance(cell, str) or cell[0] not in "[{":
        return cell
    data = cell.encode()
    check_json(data)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return cell  # a file's name or a text that begins so


class CsvSource(TsvSource):
    """Columns apart by commas; quoted cells may hold line breaks."""

    ENDINGS = endings(".csv")
    UNREAD = endings(".csv", UNREAD_SUFFIXES)
    DIALECT: ClassVar[Mapping[str, Any]] = {}

    def _cutter(self, begin: int) -> "_RowCutter":
        return _RowCutter()

    def _damage(self, cutter: "_RowCutter", start: int, left: bytes | None) -> tuple[str, bool]:
        if not cutter.in_quotes:
            return "", True
        lines = "" if left is None else f"{len(left.splitlines()):,} "
        return f"a quote in its last {lines}lines has no second one; mend it", False


class _RowCutter:
    """Finds the line breaks outside quotes: those with an even number of quotes before them, since
    a quote in a quoted cell is doubled."""

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

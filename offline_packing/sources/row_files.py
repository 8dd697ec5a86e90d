"""Rows of Parquet and Arrow files: text as records, images as their bytes.

A record's `column` lists the columns that it is made of: "{id,caption,image}". A medium's is where
in the row it lies: "image", or "images.2" for the third of a list.
"""

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Final, TypeVar

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from offline_packing.errors import StageError
from offline_packing.sources.locators import Root
from offline_packing.sources.media_root import MediaRoot

#: Rows taken at a time while measuring: of a column of images that is tens of megabytes.
BATCH_ROWS: Final = 128
#: Row groups that a process keeps, beside the one it reads: packs take rows in any order.
_CACHE_BYTES: Final = 192 << 20
_OPEN_FILES: Final = 16

Key = TypeVar("Key")
Value = TypeVar("Value")


class RowFile:
    """One open Parquet or Arrow file."""

    def __init__(self, source: "BinaryIO | pa.NativeFile", kind: str) -> None:
        """Raises pa.ArrowException or OSError if the file is damaged."""
        self._parquet: pq.ParquetFile | None = None
        self._table: pa.Table | None = None
        if kind == "parquet_row":
            self._parquet = pq.ParquetFile(source)
            metadata = self._parquet.metadata
            groups = map(metadata.row_group, range(metadata.num_row_groups))
            self.group_rows = [group.num_rows for group in groups]
            self.schema = self._parquet.schema_arrow
        else:
            self._table = _read_arrow(source)
            self.group_rows = [len(batch) for batch in self._table.to_batches()]
            self.schema = self._table.schema
        #: first row of each group, and the number of rows
        self.group_starts = [0, *itertools.accumulate(self.group_rows)]

    @classmethod
    def open(cls, root: Root, container: str, kind: str) -> "RowFile":
        """Open a file. One that is here is mapped: nothing is read before it is used.

        Raises:
            SampleError: it may not be read.
        """
        file = root.open(container)
        if isinstance(root, MediaRoot):
            file.close()
            return cls(pa.memory_map(root.path(container)), kind)
        return cls(file, kind)

    def batches(self, groups: range, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of some groups in order, at most BATCH_ROWS at a time."""
        if self._parquet is not None:
            yield from self._parquet.iter_batches(BATCH_ROWS, list(groups), list(columns))
            return
        begin, end = self.group_starts[groups.start], self.group_starts[groups.stop]
        for batch in self._rows(begin, end, columns).to_batches(max_chunksize=BATCH_ROWS):
            batch.validate(full=True)  # nothing else does, and a wrong offset would end the process
            yield batch

    def group(self, number: int, columns: Sequence[str]) -> pa.Table:
        """All rows of one group."""
        if self._parquet is not None:
            return self._parquet.read_row_group(number, list(columns))
        rows = self._rows(self.group_starts[number], self.group_starts[number + 1], columns)
        rows.validate(full=True)
        return rows

    def _rows(self, begin: int, end: int, columns: Sequence[str]) -> pa.Table:
        assert self._table is not None
        return self._table.select(list(columns)).slice(begin, end - begin)


def _read_arrow(source: "BinaryIO | pa.NativeFile") -> pa.Table:
    """A file of either Arrow format."""
    try:
        return pa.ipc.open_stream(source).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_file(source).read_all()


def is_media_type(kind: pa.DataType) -> bool:
    """Whether a column of this type holds the bytes of images: binary, {bytes, path}, or lists."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return is_media_type(kind.value_type)
    if pa.types.is_struct(kind):
        return "bytes" in {kind.field(i).name for i in range(kind.num_fields)}
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def name_media(value: Any, column: str) -> tuple[Any, dict[str, bytes]]:
    """What a row holds in a column of images -> names for the record, and bytes by name.

    Bytes are named by their column; an image that is only a path keeps the path as its name.
    """
    if value is None:
        return None, {}
    if isinstance(value, list):
        named = [_name_one(one, f"{column}.{i}") for i, one in enumerate(value)]
        return [name for name, _ in named], {name: data for name, data in named if data is not None}
    name, data = _name_one(value, column)
    return [name], {} if data is None else {name: data}


def _name_one(value: Any, column: str) -> tuple[str, bytes | None]:
    if isinstance(value, Mapping):
        data = value.get("bytes")
        return (str(value.get("path") or ""), None) if data is None else (column, data)
    return ("", None) if value is None else (column, value)


def record_column(columns: Sequence[str]) -> str:
    """The `column` of a record made of these columns."""
    return "{" + ",".join(columns) + "}"


def record_json(
    row: Mapping[str, Any], media_columns: Sequence[str]
) -> tuple[bytes, dict[str, bytes]]:
    """A row as JSON with names in the place of images, and the bytes by name."""
    content, media = dict(row), {}
    for column in media_columns:
        content[column], found = name_media(row[column], column)
        media.update(found)
    return orjson.dumps(content, default=str), media


class _GroupCache:
    """Files that are open, and row groups read last, as many as fit."""

    def __init__(self) -> None:
        self._files: OrderedDict[tuple[str, str], RowFile] = OrderedDict()
        self._groups: OrderedDict[tuple[str, str, int, str], pa.Table] = OrderedDict()

    def row(self, root: Root, kind: str, container: str, row: int, column: str) -> pa.Table:
        """One row of a column, or of a record's columns. Raises IndexError if there is none."""
        path = root.path(container)
        stamp = root.stamp(container)  # a file that was replaced is another file
        file = self._files.get((path, stamp)) or RowFile.open(root, container, kind)
        _keep(self._files, (path, stamp), file)
        while len(self._files) > _OPEN_FILES:
            self._files.popitem(last=False)
        number = bisect.bisect_right(file.group_starts, row) - 1
        if number == len(file.group_rows):
            raise IndexError(f"there are {file.group_starts[-1]} rows")
        columns = column[1:-1].split(",") if column.startswith("{") else [column]
        key = (path, stamp, number, column)
        group = self._groups[key] if key in self._groups else file.group(number, columns)
        _keep(self._groups, key, group)
        while len(self._groups) > 1 and sum(t.nbytes for t in self._groups.values()) > _CACHE_BYTES:
            self._groups.popitem(last=False)
        return group.slice(row - file.group_starts[number], 1)


def _keep(cache: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    cache[key] = value
    cache.move_to_end(key)


_cache = _GroupCache()


def read_value(root: Root, kind: str, container: str, row: int, column: str, size: int) -> bytes:
    """A record's JSON or a medium's bytes.

    Raises:
        StageError: there is no such row or column any more, or it has another size.
    """
    is_record = column.startswith("{")
    top = column if is_record else column.partition(".")[0]
    try:
        table = _cache.row(root, kind, container, row, top)
        values = table.to_pylist()[0]
    except (OSError, LookupError, ValueError, pa.ArrowException) as error:
        raise StageError(f"{root.path(container)}, row {row} cannot be read: {error}") from error
    if is_record:
        media = [
            name for name in table.column_names if is_media_type(table.schema.field(name).type)
        ]
        data: Any = record_json(values, media)[0]
    else:
        data = name_media(values[top], top)[1].get(column)
    if data is None or len(data) != size:
        raise StageError(
            f"{root.path(container)}, row {row} changed since it was measured; restore it, or "
            "measure again with output.overwrite=true"
        )
    return bytes(data)

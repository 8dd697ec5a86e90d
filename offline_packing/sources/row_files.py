"""Rows of Parquet and Arrow files: text as records, images as their bytes.

A record's `column` lists the columns that it is made of: "{id,caption,image}". A medium's is where
in the row it lies: "image", or "images.2" for the third of a list.
"""

import itertools
import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from offline_packing.sources.locators import Root
from offline_packing.sources.media_root import MediaRoot

#: Rows and bytes taken at a time while reading in order.
_BATCH_ROWS: Final = 128
_BATCH_BYTES: Final = 4 << 20
#: Bytes of a remote Parquet file asked for at a time.
_REMOTE_BUFFER: Final = 4 << 20


class RowFile:
    """One open Parquet or Arrow file."""

    def __init__(
        self, source: "BinaryIO | pa.NativeFile", kind: str, mapped: mmap.mmap | None = None
    ) -> None:
        """Raises pa.ArrowException or OSError if the file is damaged."""
        self._parquet: pq.ParquetFile | None = None
        self._table: pa.Table | None = None
        self._mapped = mapped
        #: bytes of each row group when decoded, all columns; of Arrow files 0: they are not
        self.group_bytes: list[int] = []
        if kind == "parquet_row":
            self._parquet = _open_parquet(source, 0 if mapped else _REMOTE_BUFFER)
            metadata = self._parquet.metadata
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
            self.group_rows = [group.num_rows for group in groups]
            self.group_bytes = [group.total_byte_size for group in groups]
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
        if not isinstance(root, MediaRoot):
            return cls(file, kind)
        with file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return cls(pa.BufferReader(pa.py_buffer(mapped)), kind, mapped)

    def batches(self, groups: range, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of some groups in order, a few megabytes at a time.

        Memory does not depend on the size of a row group, but on that of its pages: one of each
        column is decoded at a time.
        """
        if self._parquet is not None:
            size = self._batch_rows(groups)
            for batch in self._parquet.iter_batches(size, list(groups), list(columns)):
                yield batch
                self.release()
            return
        begin, end = self.group_starts[groups.start], self.group_starts[groups.stop]
        for batch in self._rows(begin, end, columns).to_batches(max_chunksize=_BATCH_ROWS):
            batch.validate(full=True)  # nothing else does, and a wrong offset would end the process
            yield batch
            self.release()

    def _batch_rows(self, groups: range) -> int:
        num_bytes = sum(self.group_bytes[i] for i in groups)
        num_rows = sum(self.group_rows[i] for i in groups)
        return min(_BATCH_ROWS, max(1, _BATCH_BYTES * num_rows // max(1, num_bytes)))

    def release(self) -> None:
        """Give back the memory of what was read from a mapped file; it is read again if needed."""
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_DONTNEED)

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


def _open_parquet(source: "BinaryIO | pa.NativeFile", buffer_size: int) -> pq.ParquetFile:
    # Arrow's own allocator copies a buffer that grows, and keeps what was freed: for pages of
    # 130 MiB, which its writer makes of images of 130 KiB, 630 MiB instead of 500.
    pool = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        return pq.ParquetFile(source, buffer_size=buffer_size, pre_buffer=False)
    finally:
        pa.set_memory_pool(pool)


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


def record_columns(column: str) -> tuple[str, ...]:
    """The columns that a record, or a medium, with this `column` is made of."""
    return tuple(column[1:-1].split(",")) if column.startswith("{") else (column,)


def record_json(
    row: Mapping[str, Any], media_columns: Sequence[str]
) -> tuple[bytes, dict[str, bytes]]:
    """A row as JSON with names in the place of images, and the bytes by name."""
    content, media = dict(row), {}
    for column in media_columns:
        content[column], found = name_media(row[column], column)
        media.update(found)
    return orjson.dumps(content, default=str), media

"""Rows of Parquet and Arrow files, in their order or any other: text as records, images as bytes.

A record's `column` lists the columns that it is made of, with columns of media in brackets:
`["id","caption",["image"]]`. A medium's `column` is its place in the row: "images.2" is the third
of a list, "image.0" a value that is not a list.

A row of an Arrow file is read in place. A Parquet row group can only be decoded from its beginning,
a compressed Arrow batch as a whole: readers of many rows announce them (`rows_at_hand`), and get
them in one of two ways:

    groups that are small, or much of which is wanted     decoded once, in the order of the file;
                                                          these rows are kept in an unnamed file
    other groups                                          the whole group is kept as an Arrow file,
                                                          for all its readers, next to the
                                                          unpacked compressed files

A row that was not announced is read by decoding its group.
"""

import bisect
import io
import itertools
import mmap
import struct
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from offline_packing.errors import ChangedError, StageError
from offline_packing.sources.roots.roots import Root
from offline_packing.storage.files import scratch_folder, translate_disk_full
from offline_packing.storage.memory import machine_memory
from offline_packing.storage.streams import unpacked_copy
from task_encoders.samples import SampleError

#: Rows and bytes taken at a time while reading in order.
_BATCH_ROWS: Final = 128
_BATCH_BYTES: Final = 4 << 20
#: Bytes handed on at a time.
_MAX_PART_BYTES: Final = 16 << 20
#: Bytes of a Parquet file read at a time.
_BUFFER_BYTES: Final = 4 << 20


class RowFile:
    """One open Parquet or Arrow file."""

    def __init__(self, file: BinaryIO, kind: str) -> None:
        """Read what the table in a file says of itself. A local Arrow file is mapped: nothing is
        read before it is used. Of a mapped Parquet file, packed and unpacked pages would both be
        in memory. Raises pa.ArrowException or OSError if the file is damaged."""
        source: BinaryIO | pa.NativeFile = file
        self._mapped: mmap.mmap | None = None
        self._parquet: pq.ParquetFile | None = None
        if isinstance(getattr(file, "raw", None), io.FileIO):
            with file:
                if kind == "parquet_row":
                    source = pa.OSFile(f"/dev/fd/{file.fileno()}")
                else:
                    self._mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                    source = pa.BufferReader(pa.py_buffer(self._mapped))
        if kind == "parquet_row":
            # Only with a buffer it is read a page at a time.
            self._parquet = pq.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            metadata = self._parquet.metadata
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
            #: rows of each row group or batch; its bytes when decoded, 0 if it is used as it is
            self.group_rows = [group.num_rows for group in groups]
            self.group_bytes = [group.total_byte_size for group in groups]
            if min(self.group_rows, default=0) < 0 or sum(self.group_rows) != metadata.num_rows:
                raise pa.ArrowInvalid(
                    f"its {metadata.num_rows:,} rows are not those of its {len(groups):,} groups"
                )
            self.schema = self._parquet.schema_arrow
        else:
            self._arrow = ArrowBatches(source)
            self.group_rows, self.group_bytes = self._arrow.num_rows, self._arrow.unpacked
            self.schema = self._arrow.schema
        #: first row of each group, and the number of rows
        self.group_starts = [0, *itertools.accumulate(self.group_rows)]

    def batches(self, group: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one group in order, a few megabytes at a time. Memory depends on the
        size of pages, not of row groups: a page of each column is decoded at a time."""
        for batch in self._stored(group, list(columns)):
            for part in _parts(as_plain(batch)):
                yield part
                self.release()

    def _stored(self, group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        if self._parquet is not None:
            num_rows, num_bytes = self.group_rows[group], self.group_bytes[group]
            size = max(1, min(_BATCH_ROWS, _BATCH_BYTES * num_rows // max(1, num_bytes)))
            yield from self._parquet.iter_batches(size, [group], columns)
            return
        batch = self._arrow.read(group).select(columns)
        for start in range(0, len(batch), _BATCH_ROWS):
            rows = batch.slice(start, _BATCH_ROWS)
            rows.validate(full=True)  # nothing else does; a wrong offset would end the process
            yield rows

    def release(self) -> None:
        """Release the memory of pages read from a mapped file; they are read again if needed."""
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_DONTNEED)

    def row(self, number: int, columns: Sequence[str]) -> pa.Table:
        """Return one row of an Arrow file that we wrote, and that is therefore not checked."""
        group = bisect.bisect_right(self.group_starts, number) - 1
        batch = self._arrow.read(group).slice(number - self.group_starts[group], 1)
        return pa.Table.from_batches([batch]).select(list(columns))


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Halve a batch until its parts have at most _MAX_PART_BYTES, or one row."""
    if len(batch) < 2 or batch.nbytes <= _MAX_PART_BYTES:
        yield batch
    else:
        half = len(batch) // 2
        yield from _parts(batch.slice(0, half))
        yield from _parts(batch.slice(half))


def unread_type(kind: pa.DataType) -> bool:
    """Tell whether values of a type may share memory in ways that are not counted: views of lists,
    run-end encoded values and unions."""
    types = pa.types
    views = (types.is_list_view, types.is_large_list_view, types.is_run_end_encoded, types.is_union)
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    if types.is_dictionary(kind):
        inner.append(kind.value_type)
    return any(is_one(kind) for is_one in views) or any(map(unread_type, inner))


def holds_bytes(kind: pa.DataType) -> bool:
    """Tell whether a column can hold images: binary of any kind, {bytes, path}, or lists of
    these."""
    kind, types = _innermost(kind), pa.types
    is_bytes = [types.is_binary, types.is_large_binary, types.is_binary_view]
    is_bytes += [types.is_fixed_size_binary, holds_pictures]
    return any(is_one(kind) for is_one in is_bytes)


def holds_pictures(kind: pa.DataType) -> bool:
    """Tell whether a column holds {bytes, path}, or lists of it, which cannot be text."""
    kind = _innermost(kind)
    return pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0


def _innermost(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values in dictionaries, and in lists of any kind."""
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    return kind


def as_plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert a batch to the same values without dictionaries (an Arrow file has one for all
    batches) and without views (Arrow cannot take single rows of them): values that shared memory
    are counted one by one."""
    schema = pa.schema([field.with_type(_plain_type(field.type)) for field in batch.schema])
    return batch if schema == batch.schema else batch.cast(schema, safe=False)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the same values without dictionaries and views, and of times without
    nanoseconds, which Python lacks: pandas, where it is installed, makes types of its own."""
    types = pa.types
    if getattr(kind, "unit", "") == "ns":
        if types.is_timestamp(kind):
            return pa.timestamp("us", kind.tz)
        return pa.duration("us") if types.is_duration(kind) else pa.time64("us")
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        value = kind.value_field.with_type(_plain_type(kind.value_type))
        if types.is_large_list(kind):
            return pa.large_list(value)
        return pa.list_(value, kind.list_size if types.is_fixed_size_list(kind) else -1)
    if types.is_struct(kind):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in kind])
    return kind


def name_media(value: Any, column: str) -> tuple[Any, dict[str, bytes]]:
    """Split a row's column of images: names for the record, and bytes by name. Bytes are named by
    their column; an image that is only a path keeps the path as its name."""
    if value is None:
        return None, {}
    names, media = [], {}
    for i, one in enumerate(value if isinstance(value, list) else [value]):
        name, path = f"{column}.{i}", ""
        if isinstance(one, Mapping):
            path = str(one.get("path") or "")
            one = one.get("bytes")
        if one is not None:
            media[name] = one
        names.append(path if one is None else name)
    return names, media


def record_column(columns: Sequence[str], media_columns: Collection[str]) -> str:
    """Write the `column` of a record made of these columns, some of which hold media."""
    return orjson.dumps([[c] if c in media_columns else c for c in columns]).decode()


def is_record(column: str) -> bool:
    """Tell whether a `column` is that of a record; a medium's ends with a number."""
    return column.endswith("]")


def record_columns(column: str) -> tuple[list[str], list[str]]:
    """Return the columns that a record or a medium is made of, from its `column`; and which of them
    hold media."""
    if not is_record(column):
        return [column.rpartition(".")[0]], []
    named = [(c, False) if isinstance(c, str) else (c[0], True) for c in orjson.loads(column)]
    return [name for name, _ in named], [name for name, is_media in named if is_media]


def record_json(
    row: Mapping[str, Any], media_columns: Sequence[str]
) -> tuple[bytes, dict[str, bytes]]:
    """Return a row as JSON with names in place of images, and the bytes by name. Raises
    SampleError: bad_json, where a text is not UTF-8 or JSON has no form for a value."""
    content, media = dict(row), {}
    for column in media_columns:
        content[column], found = name_media(row[column], column)
        media.update(found)
    try:
        return orjson.dumps(content, default=_as_text), media
    except orjson.JSONEncodeError as error:
        raise SampleError("bad_json", f"{error}: {error.__cause__}"[:200]) from error


def _as_text(value: Any) -> str:
    """Convert types that JSON lacks: dates and decimals; and bytes, as older writers store text."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def write_arrow(target: BinaryIO, batches: Iterable[pa.RecordBatch]) -> None:
    """Write an Arrow file with the first batch's schema; without a batch, write no file."""
    writer = None
    for batch in batches:
        writer = writer or pa.ipc.new_file(target, batch.schema)
        writer.write_batch(batch)
    if writer is not None:
        writer.close()
        target.flush()


#: Beginning of a file that is a stream with a footer.
_FILE_MAGIC: Final = b"ARROW1\0\0"
#: Rows of a batch; each row of a damaged number would be a sample set aside.
MAX_BATCH_ROWS: Final = 1 << 24

#: End of a stream: a continuation mark, and a message of length 0.
_STREAM_END: Final = b"\xff\xff\xff\xff\0\0\0\0"


class ArrowBatches:
    """The record batches of a file in either of Arrow's formats."""

    def __init__(self, source: "BinaryIO | pa.NativeFile") -> None:
        """Find the batches. Raises pa.ArrowException or OSError if the file is damaged."""
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        open_reader = pa.ipc.open_file if is_file else pa.ipc.open_stream
        source.seek(0)
        self.schema: pa.Schema = open_reader(source).schema
        source.seek(len(_FILE_MAGIC) if is_file else 0)
        messages = [m for m in pa.ipc.MessageReader.open_stream(source) if m.type != "schema"]
        try:
            sizes = [_rows_and_bytes(message) for message in messages]
        except struct.error as error:
            raise pa.ArrowInvalid(f"a batch names bytes outside of it: {error}") from error
        self._batches: list[pa.Message] | list[pa.RecordBatch] = messages
        if not is_file:
            _check_end(source, sum(num_rows for num_rows, _ in sizes))
        if any(message.type == "dictionary" for message in messages):
            total = sum(num_bytes for _, num_bytes in sizes)
            if total > machine_memory():
                problem = f"compressed batches with dictionaries, {total:,} bytes in all"
                remedy = "write it without compression or without dictionaries"
                raise pa.ArrowInvalid(f"{problem} > the memory's {machine_memory():,}; {remedy}")
            source.seek(0)
            self._batches = open_reader(source).read_all().to_batches()
            sizes = [(len(batch), 0) for batch in self._batches]
        else:
            for message, (num_rows, num_bytes) in zip(messages, sizes, strict=True):
                if not 0 <= num_rows <= MAX_BATCH_ROWS:  # each would be set aside
                    problem = (
                        f"a batch claims {num_rows:,} rows, at most {MAX_BATCH_ROWS:,} are read"
                    )
                    raise pa.ArrowInvalid(f"{problem}; write smaller ones")
                if not num_bytes:
                    pa.ipc.read_record_batch(message, self.schema)  # checks it, and copies nothing
        #: rows of each batch, and the bytes that it is unpacked to; 0: it is used as it is
        self.num_rows = [num_rows for num_rows, _ in sizes]
        self.unpacked = [num_bytes for _, num_bytes in sizes]

    def read(self, number: int) -> pa.RecordBatch:
        """Read one batch; uncompressed buffers stay in the mapped file."""
        found = self._batches[number]
        if isinstance(found, pa.RecordBatch):
            return found
        return pa.ipc.read_record_batch(found, self.schema)


def _check_end(source: "BinaryIO | pa.NativeFile", num_rows: int) -> None:
    """Raise pa.ArrowInvalid where a stream lacks its end, as one that was cut between two batches,
    or goes on after it."""
    source.seek(max(0, source.tell() - len(_STREAM_END)))
    if source.read(len(_STREAM_END)) != _STREAM_END or source.read(1):
        raise pa.ArrowInvalid(
            f"its {num_rows} rows do not end in an end-of-stream mark at the end of the file: it "
            "was cut, or written over; restore it or save the dataset again"
        )


def _rows_and_bytes(message: pa.Message) -> tuple[int, int]:
    """Read the number of rows of a batch or a dictionary, and the unpacked bytes of its compressed
    buffers, from its FlatBuffers header: pyarrow gives them only by unpacking it."""
    data = memoryview(message.metadata)
    header = _field(data, _at(data, 0), 2)
    batch = _at(data, header)
    if message.type == "dictionary":
        batch = _at(data, _field(data, batch, 1))
    length, buffers, compression = (_field(data, batch, number) for number in (0, 2, 3))
    num_rows = struct.unpack_from("<q", data, length)[0] if length else 0
    if not compression or not buffers:
        return num_rows, 0
    vector = _at(data, buffers)
    (count,) = struct.unpack_from("<I", data, vector)
    places = np.frombuffer(data, "<i8", 2 * count, vector + 4).reshape(-1, 2)
    body = memoryview(message.body)
    # Each begins with its size; -1: it is not compressed.
    sizes = (
        struct.unpack_from("<q", body, offset)[0] for offset, size in places.tolist() if size > 8
    )
    return num_rows, sum(size for size in sizes if size > 0)


def _field(data: memoryview, table: int, number: int) -> int:
    """Find the position of a table's field; 0: it has its default."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    slot = 4 + 2 * number
    if slot >= struct.unpack_from("<H", data, vtable)[0]:
        return 0
    (offset,) = struct.unpack_from("<H", data, vtable + slot)
    return table + offset if offset else 0


def _at(data: memoryview, position: int) -> int:
    """Follow the offset at a position."""
    return int(position + struct.unpack_from("<I", data, position)[0])


#: Bytes, decoded, up to which a row group is small.
SMALL_GROUP: Final = 2 << 20
#: Share of a larger group's rows that one reader must want to decode the group for itself.
WANTED_SHARE: Final = 1 / 8
#: Decoded row groups that a process keeps besides the one it reads.
_CACHE_BYTES: Final = 64 << 20
_OPEN_FILES: Final = 64
#: Bytes read of mapped files before their memory is released.
_RELEASE_BYTES: Final = 32 << 20

_DAMAGE: Final = (OSError, LookupError, ValueError, MemoryError, pa.ArrowException)

Value = TypeVar("Value")
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class WantedRows:
    """Rows of one file that will be read: their numbers, ascending, and the columns of a record."""

    root: Root
    kind: str
    container: str
    rows: Rows
    columns: tuple[str, ...]


@dataclass
class _AtHand:
    """Prepared part of one file: some rows, ascending, which `copy` holds; and a folder for copies
    of other groups."""

    columns: tuple[str, ...]
    folder: Path
    rows: Rows
    copy: RowFile | None


class _RowReader:
    """State that a process keeps between reads."""

    def __init__(self) -> None:
        #: by `Root.version`: a replaced file counts as a different one
        self._files: dict[str, RowFile] = {}
        self._groups: dict[tuple[str, int, str], pa.Table] = {}
        self._bytes_read = 0
        #: open copies, by their originals
        self.copies: dict[str, RowFile] = {}
        #: prepared rows by the path of their file, which may belong to several sources
        self.at_hand: dict[str, list[_AtHand]] = {}

    def row(
        self, root: Root, kind: str, container: str, row: int, columns: Sequence[str]
    ) -> pa.Table:
        """Read some columns of one row. Raises IndexError if there is none."""
        path = root.path(container)
        prepared = (one for one in self.at_hand.get(path, ()) if set(columns) <= set(one.columns))
        at_hand = next(prepared, None)
        if at_hand is not None and at_hand.copy is not None:
            place = int(np.searchsorted(at_hand.rows, row))
            if row in at_hand.rows[place : place + 1]:
                return at_hand.copy.row(place, columns)
        file, version = self.file(root, kind, container)
        number = bisect.bisect_right(file.group_starts, row) - 1
        if number == len(file.group_rows):
            raise IndexError(f"there are {file.group_starts[-1]} rows")
        place = row - file.group_starts[number]
        if at_hand is not None:
            return self._copy(file, (path, version, number), at_hand).row(place, columns)

        def read() -> pa.Table:
            return pa.Table.from_batches(file.batches(number, columns))

        group = _cached(self._groups, (version, number, "\0".join(columns)), read)
        while len(self._groups) > 1 and sum(t.nbytes for t in self._groups.values()) > _CACHE_BYTES:
            self._groups.pop(next(iter(self._groups)))
        return group.slice(place, 1)

    def file(self, root: Root, kind: str, container: str) -> tuple[RowFile, str]:
        """Open a file; return it and its version."""
        key = root.version(container)
        return _cached(self._files, key, lambda: RowFile(root.open(container), kind)), key

    def count(self, num_bytes: int) -> None:
        """Count bytes read: from time to time the memory of mapped files is released."""
        self._bytes_read += num_bytes
        if self._bytes_read < _RELEASE_BYTES:
            return
        self._bytes_read = 0
        kept = [one.copy for found in self.at_hand.values() for one in found if one.copy]
        for file in (*self.copies.values(), *kept, *self._files.values()):
            file.release()

    def _copy(self, file: RowFile, group: tuple[str, str, int], at_hand: _AtHand) -> RowFile:
        """Copy a whole group to a file in the folder of unpacked files, unless it is there."""
        path, version, number = group
        name = "\0".join((version, str(number), *at_hand.columns))

        def write(target: BinaryIO) -> None:
            write_arrow(target, file.batches(number, at_hand.columns))

        def make() -> RowFile:
            what = f"row group {number} of {path}"
            copy = unpacked_copy(name, what, at_hand.folder, write)
            return RowFile(copy.open("rb"), "arrow_row")

        return _cached(self.copies, name, make)


def _cached(cache: dict[Any, Value], key: Any, make: Callable[[], Value]) -> Value:
    """Return a cached value, made if it is missing; the least recently used one is dropped."""
    cache[key] = cache.pop(key) if key in cache else make()
    if len(cache) > _OPEN_FILES:
        cache.pop(next(iter(cache)))
    return cache[key]


_reader = _RowReader()


@contextmanager
def rows_at_hand(wanted: Sequence[WantedRows], folder: Path, unpack_folder: Path) -> Iterator[None]:
    """Prepare rows of Parquet files for being read in any order while the block runs. Files in the
    scratch folder of `folder` have no name, and vanish with this process; copies of groups stay in
    `unpack_folder`. Raises StageError if a file cannot be read, or the disk is full."""
    scratch = scratch_folder(folder)
    scratch.mkdir(parents=True, exist_ok=True)
    before, _reader.at_hand = _reader.at_hand, {}
    try:
        for one in wanted:
            prepared = _prepare(one, scratch, unpack_folder)
            _reader.at_hand.setdefault(one.root.path(one.container), []).extend(prepared)
        yield
    finally:
        _reader.at_hand = before
        _reader.copies.clear()  # a removed one occupies its space until then


def _prepare(wanted: WantedRows, scratch: Path, unpack_folder: Path) -> list[_AtHand]:
    """Prepare rows of a file; return nothing if its rows are read in place."""
    try:
        file, _ = _reader.file(wanted.root, wanted.kind, wanted.container)
        if not any(file.group_bytes):
            return []
        counts = np.diff(np.searchsorted(wanted.rows, file.group_starts))
        much = counts >= WANTED_SHARE * np.diff(file.group_starts)
        at_once = (counts > 0) & (much | (np.asarray(file.group_bytes) <= SMALL_GROUP))
        with translate_disk_full(scratch), tempfile.TemporaryFile(dir=scratch) as kept:
            rows = _write_rows(kept, file, np.flatnonzero(at_once), wanted)
            copy = RowFile(kept, "arrow_row") if len(rows) else None
            return [_AtHand(wanted.columns, unpack_folder, rows, copy)]
    except (*_DAMAGE, SampleError) as error:
        path = wanted.root.path(wanted.container)
        raise StageError(f"{path} cannot be read: {error}") from error


def _write_rows(
    target: BinaryIO, file: RowFile, groups: npt.NDArray[np.intp], wanted: WantedRows
) -> Rows:
    """Write the wanted rows of some groups; return their numbers."""
    written: list[Rows] = []

    def chosen() -> Iterator[pa.RecordBatch]:
        for group in groups.tolist():
            first = file.group_starts[group]
            for batch in file.batches(group, wanted.columns):
                begin, end = np.searchsorted(wanted.rows, (first, first + len(batch)))
                if end > begin:
                    written.append(wanted.rows[begin:end])
                    yield batch.take(pa.array(written[-1] - first))
                first += len(batch)

    write_arrow(target, chosen())
    return np.concatenate([*written, wanted.rows[:0]])


def read_value(root: Root, kind: str, container: str, row: int, column: str, size: int) -> bytes:
    """Read a record's JSON or a medium's bytes. Raises StageError if gone, or of another size."""
    try:
        columns, media = record_columns(column)
        values = _reader.row(root, kind, container, row, columns).to_pylist()[0]
        data: Any = None
        if is_record(column):
            data, _ = record_json(values, media)
        else:
            data = name_media(values[columns[0]], columns[0])[1].get(column)
    except (*_DAMAGE, SampleError) as error:
        raise StageError(f"{root.path(container)}, row {row} cannot be read: {error}") from error
    _reader.count(size)
    if data is None or len(data) != size:
        raise ChangedError(f"{root.path(container)}, row {row}")
    return bytes(data)

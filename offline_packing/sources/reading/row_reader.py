"""Single rows of Parquet and Arrow files, in any order.

A row of an Arrow file is where it is. A Parquet row group can only be decoded from its beginning, a
compressed Arrow batch as a whole: whoever reads many rows says so first (`rows_at_hand`), and has
them in one of two ways:

    groups that are small, or much of which is wanted     decoded once, in the order of the file;
                                                          these rows are kept in an unnamed file
    other groups                                          the whole group is kept as an Arrow file,
                                                          for all its readers, next to the
                                                          unpacked compressed files

A row that was not announced is read by decoding its group.
"""

import bisect
import itertools
import mmap
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from offline_packing.errors import ChangedError, StageError
from offline_packing.sources.reading.row_files import (
    RowFile,
    is_record,
    name_media,
    record_columns,
    record_json,
    write_arrow,
)
from offline_packing.sources.roots.remote import Root
from offline_packing.storage.files import translate_disk_full
from offline_packing.storage.paths import scratch_folder
from offline_packing.storage.streams import unpacked_copy
from task_encoders.samples import SampleError

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


class _Copy:
    """Rows in an Arrow file that we wrote, mapped."""

    def __init__(self, file: BinaryIO) -> None:
        """`file` may be closed afterwards."""
        self._mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._batches = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(self._mapped)))
        numbers = range(self._batches.num_record_batches)
        sizes = (self._batches.get_batch(i).num_rows for i in numbers)
        self._starts = list(itertools.accumulate(sizes, initial=0))

    def row(self, number: int, columns: Sequence[str]) -> pa.Table:
        """One row."""
        place = bisect.bisect_right(self._starts, number) - 1
        batch = self._batches.get_batch(place).slice(number - self._starts[place], 1)
        return pa.Table.from_batches([batch]).select(list(columns))

    def release(self) -> None:
        """Release the memory of what was read."""
        self._mapped.madvise(mmap.MADV_DONTNEED)


@dataclass
class _AtHand:
    """Prepared part of one file: some rows, ascending, and a folder for copies of groups."""

    columns: tuple[str, ...]
    folder: Path
    rows: Rows
    copy: _Copy | None

    def row(self, number: int, columns: Sequence[str]) -> pa.Table | None:
        """A row; None if it is not kept."""
        place = int(np.searchsorted(self.rows, number))
        if self.copy is None or place == len(self.rows) or self.rows[place] != number:
            return None
        return self.copy.row(place, columns)


class _RowReader:
    """State that a process keeps between reads."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], RowFile] = {}
        self._groups: dict[tuple[str, str, int, str], pa.Table] = {}
        self._bytes_read = 0
        #: that are open, by what they are copies of
        self.copies: dict[str, _Copy] = {}
        #: by path; a file may belong to several sources
        self.at_hand: dict[str, list[_AtHand]] = {}

    def row(
        self, root: Root, kind: str, container: str, row: int, columns: Sequence[str]
    ) -> pa.Table:
        """Some columns of one row. Raises IndexError if there is none."""
        path = root.path(container)
        prepared = (one for one in self.at_hand.get(path, ()) if set(columns) <= set(one.columns))
        at_hand = next(prepared, None)
        if at_hand is not None and (found := at_hand.row(row, columns)) is not None:
            return found
        file, stamp = self.file(root, kind, container)
        number = bisect.bisect_right(file.group_starts, row) - 1
        if number == len(file.group_rows):
            raise IndexError(f"there are {file.group_starts[-1]} rows")
        place = row - file.group_starts[number]
        if at_hand is not None:
            return self._copy(file, (path, stamp, number), at_hand).row(place, columns)
        key = (path, stamp, number, "\0".join(columns))
        group = _cached(self._groups, key, lambda: file.group(number, columns))
        while len(self._groups) > 1 and sum(t.nbytes for t in self._groups.values()) > _CACHE_BYTES:
            self._groups.pop(next(iter(self._groups)))
        return group.slice(place, 1)

    def file(self, root: Root, kind: str, container: str) -> tuple[RowFile, str]:
        """A file and its stamp; a replaced file counts as a different one."""
        key = (root.path(container), root.stamp(container))
        return _cached(self._files, key, lambda: RowFile.open(root.open(container), kind)), key[1]

    def count(self, num_bytes: int) -> None:
        """Note what was read: from time to time the memory of mapped files is released."""
        self._bytes_read += num_bytes
        if self._bytes_read < _RELEASE_BYTES:
            return
        self._bytes_read = 0
        kept = [one.copy for found in self.at_hand.values() for one in found if one.copy]
        for copy in (*self.copies.values(), *kept):
            copy.release()
        for file in self._files.values():
            file.release()

    def _copy(self, file: RowFile, group: tuple[str, str, int], at_hand: _AtHand) -> _Copy:
        """A whole group, as a file in the folder of unpacked files."""
        path, stamp, number = group
        name = "\0".join((path, stamp, str(number), *at_hand.columns))

        def write(target: BinaryIO) -> None:
            write_arrow(target, file.batches(range(number, number + 1), at_hand.columns))

        def make() -> _Copy:
            what = f"row group {number} of {path}"
            with open(unpacked_copy(name, what, at_hand.folder, write), "rb") as opened:
                return _Copy(opened)

        return _cached(self.copies, name, make)


def _cached(cache: dict[Any, Value], key: Any, make: Callable[[], Value]) -> Value:
    """A cached value, made if it is missing; the least recently used one is dropped."""
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
    at_hand: dict[str, list[_AtHand]] = {}
    before, _reader.at_hand = _reader.at_hand, at_hand
    try:
        for one in wanted:
            path = one.root.path(one.container)
            prepared = _prepare(one, scratch, unpack_folder)
            at_hand.setdefault(path, []).extend(prepared)
        yield
    finally:
        _reader.at_hand = before
        _reader.copies.clear()  # a removed one occupies its space until then


def _prepare(wanted: WantedRows, scratch: Path, unpack_folder: Path) -> list[_AtHand]:
    """Rows of a file; none of one whose rows are used as they are."""
    try:
        file, _ = _reader.file(wanted.root, wanted.kind, wanted.container)
        if not any(file.group_bytes):
            return []
        chosen = decoded_at_once(file.group_starts, file.group_bytes, wanted.rows)
        with translate_disk_full(scratch), tempfile.TemporaryFile(dir=scratch) as kept:
            rows = _write_rows(kept, file, np.flatnonzero(chosen), wanted)
            copy = _Copy(kept) if len(rows) else None
            return [_AtHand(wanted.columns, unpack_folder, rows, copy)]
    except (*_DAMAGE, SampleError) as error:
        path = wanted.root.path(wanted.container)
        raise StageError(f"{path} cannot be read: {error}") from error


def decoded_at_once(
    group_starts: Sequence[int], group_bytes: Sequence[int], rows: Rows
) -> npt.NDArray[np.bool_]:
    """(num_groups,): whether a reader of these rows, ascending, decodes a group for itself.
    `group_starts`, (num_groups + 1,), are as in RowFile; `group_bytes`, (num_groups,), decoded."""
    wanted = np.diff(np.searchsorted(rows, np.asarray(group_starts)))
    much = wanted >= WANTED_SHARE * np.diff(group_starts)
    return (wanted > 0) & (much | (np.asarray(group_bytes) <= SMALL_GROUP))


def _write_rows(
    target: BinaryIO, file: RowFile, groups: npt.NDArray[np.intp], wanted: WantedRows
) -> Rows:
    """Write the wanted rows of some groups; returns their numbers."""
    written: list[Rows] = []

    def chosen() -> Iterator[pa.RecordBatch]:
        for group in groups.tolist():
            first = file.group_starts[group]
            for batch in file.batches(range(group, group + 1), wanted.columns):
                begin, end = np.searchsorted(wanted.rows, (first, first + len(batch)))
                if end > begin:
                    written.append(wanted.rows[begin:end])
                    yield batch.take(pa.array(written[-1] - first))
                first += len(batch)

    write_arrow(target, chosen())
    return np.concatenate([*written, wanted.rows[:0]])


def read_value(root: Root, kind: str, container: str, row: int, column: str, size: int) -> bytes:
    """A record's JSON or a medium's bytes. Raises StageError if gone, or of another size."""
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

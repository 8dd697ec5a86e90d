"""Which files of a source were measured, and what has been added to it since.

_packing/files/source-00000.parquet    container, size, modified: one row per file, as listed
                                       begin, content_hash: of files that may grow at their end

Data that are appended have a table of their own, of what they added. A file is taken to be as it
was where its size and modification time are; otherwise the format may find that only its end is
new (Source.find_end). All that is not so is refused by name: packs hold what was there before.
"""

import bisect
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from offline_packing.errors import StageError
from offline_packing.index.stamps import MODIFICATION_TIME
from offline_packing.index.table import table_writer
from offline_packing.sources import Growth, Scan, Source, Stretch
from offline_packing.sources.roots.listing import order, pack_batches, unpack_batches

FILES_SCHEMA: Final = pa.schema(
    [
        pa.field("container", pa.large_binary()),  # names need not be UTF-8
        pa.field("size", pa.int64()),
        pa.field("modified", pa.int64()),  # ns; 0 of remote files
        pa.field("begin", pa.int64()),  # the table is of the bytes from here to `size`
        pa.field("content_hash", pa.string()),  # xxh3_128 of them; null where nobody read them
    ]
)
_CHUNK: Final = 1 << 16
#: Names of files that a message lists of each kind of change.
_NUM_NAMED: Final = 3


def files_path(folder: Path, source_id: int) -> Path:
    """Where the table of a source lies."""
    return folder / f"source-{source_id:05d}.parquet"


def list_files(source: Source) -> bytes:
    """The files that a source reads now: a table of FILES_SCHEMA, packed, in the order of a
    listing."""
    return pack_batches(_batches(source), FILES_SCHEMA)


def _batches(source: Source) -> Iterator[pa.RecordBatch]:
    entries = iter(source.entries())
    while chunk := list(itertools.islice(entries, _CHUNK)):
        names, sizes, times = zip(*chunk, strict=True)
        columns: list[Any] = [
            pa.array(map(os.fsencode, names), pa.large_binary()),
            pa.array(sizes, pa.int64()),
            pa.array(times, pa.int64()),
            pa.array(np.zeros(len(names), np.int64)),
            pa.nulls(len(names), pa.string()),
        ]
        yield pa.record_batch(columns, schema=FILES_SCHEMA)


def save_files(path: Path, files: bytes, scan: Scan) -> None:
    """Write the table of what was scanned of a source."""
    with table_writer(path, FILES_SCHEMA) as write:
        for batch in unpack_batches(files):
            write(pa.Table.from_batches([_with_stretches(batch, scan.stretches)]))


def _with_stretches(batch: pa.RecordBatch, stretches: Mapping[str, Stretch]) -> pa.RecordBatch:
    """The files of a listing with what was read of them."""
    if not stretches:
        return batch
    whole = [Stretch(0, size, "") for size in batch["size"].to_pylist()]
    names = map(os.fsdecode, batch["container"].to_pylist())
    read = [stretches.get(name, one) for name, one in zip(names, whole, strict=True)]
    columns = [
        batch["container"],
        pa.array([stretch.end for stretch in read], pa.int64()),
        batch["modified"],
        pa.array([stretch.begin for stretch in read], pa.int64()),
        pa.array([stretch.content_hash for stretch in read], pa.string()),
    ]
    return pa.record_batch(columns, schema=FILES_SCHEMA)


@dataclass(frozen=True, slots=True)
class _Order(Sequence[bytes]):
    """Places of files in the order of listings, found as they are asked for."""

    names: pa.LargeBinaryArray

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: Any) -> Any:
        return order(self.names[i].as_py())


class _Known:
    """A table of measured files, while a listing goes by."""

    def __init__(self, path: Path) -> None:
        try:
            self._batches = pq.ParquetFile(path).iter_batches(_CHUNK)
        except FileNotFoundError as error:
            raise StageError(
                f"{path} is missing, and with it which files were measured; append from a folder "
                "of the new files alone"
            ) from error
        self._next: pa.RecordBatch | None = None

    def rows_up_to(self, last: bytes | None) -> pa.Table:
        """The rows that come next, up to a place in the order of listings, or to the end."""
        rows: list[pa.RecordBatch] = []
        while (batch := self._next or next(self._batches, None)) is not None:
            end = len(batch)
            if last is not None:
                end = bisect.bisect_right(_Order(batch["container"]), last)
            rows.append(batch.slice(0, end))
            self._next = batch.slice(end) if end < len(batch) else None
            if self._next is not None:
                break
        return pa.Table.from_batches(rows, FILES_SCHEMA)


class _Comparison:
    """A listing beside the tables of what was measured; all are in the same order, and only some
    rows of each are looked at together."""

    def __init__(self, known: Sequence[Path], check_times: bool) -> None:
        self._known = [_Known(path) for path in known]
        self._compared = ("size", "modified") if check_times else ("size",)
        #: rows of the tables: of files that are gone, and of those that are not as they were
        self.gone: list[pa.Table] = []
        self.differing: list[pa.Table] = []

    def added(self, files: bytes) -> Iterator[pa.RecordBatch]:
        """The rows of a listing that are new or not as they were."""
        for batch in unpack_batches(files):
            is_same = self._is_same(batch)
            if not is_same.all():
                yield batch.filter(pa.array(~is_same))
        self.gone.append(self._rows_up_to(None))

    def _is_same(self, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        names = batch["container"]
        known = self._rows_up_to(order(names[-1].as_py()))
        place = pc.index_in(known["container"].combine_chunks(), names)
        self.gone.append(known.filter(pc.is_null(place)))
        known = known.filter(pc.is_valid(place))
        # Of several rows of one file, the last says how it was when it was measured last.
        last = np.full(len(names), -1)
        last[place.drop_null().to_numpy()] = np.arange(len(known))
        is_known = last >= 0
        is_same = is_known.copy()
        for column in self._compared:
            was = known[column].to_numpy()[last[is_known]]
            is_same[is_known] &= was == batch[column].to_numpy()[is_known]
        differing = names.filter(pa.array(is_known & ~is_same))
        self.differing.append(known.filter(pc.is_in(known["container"], differing)))
        return is_same

    def _rows_up_to(self, last: bytes | None) -> pa.Table:
        return pa.concat_tables([known.rows_up_to(last) for known in self._known])


def find_growth(
    source: Source, files: bytes, known: Sequence[Path], *, accept: Iterable[str] = ()
) -> Growth:
    """What a source has beyond the files that are known.

    Args:
        files: what `list_files` gave of the source as it is now.
        known: its tables, from the first that was measured to the last that was appended.
        accept: with MODIFICATION_TIME, a file of the same size is taken to be as it was.

    Raises:
        StageError: a table is gone, or a known file is gone or was changed; the message names the
            first ones.
    """
    comparison = _Comparison(known, MODIFICATION_TIME not in accept)
    added = pack_batches(comparison.added(files), FILES_SCHEMA)
    gone = pa.concat_tables(comparison.gone)["container"].combine_chunks()
    _refuse(source, gone.unique(), "gone", "restore it")
    differing = pa.concat_tables([FILES_SCHEMA.empty_table(), *comparison.differing])
    grown, changed = _find_grown(source, differing)
    _refuse(
        source,
        changed,
        "not as it was measured (size, modification time)",
        "restore it; where it was copied without its times, copy it with cp -a or rsync -t or pass "
        f"--accept-mismatch {MODIFICATION_TIME}",
    )
    if len(differing):
        same = set(differing["container"].to_pylist()) - set(map(os.fsencode, grown))
        added = pack_batches(_without(unpack_batches(added), same), FILES_SCHEMA)
    return Growth(added, sum(map(len, unpack_batches(added))), grown)


def describe_changes(known: Path, files: bytes) -> str:
    """ "2 added ('a.json', 'b.json'), 1 removed ('c.json')"; empty where all are as they were.

    Args:
        known: table of what was measured.
        files: what `list_files` gave of the source as it is now.
    """
    comparison = _Comparison([known], check_times=True)
    now = pa.Table.from_batches(comparison.added(files), FILES_SCHEMA)
    was = pa.concat_tables([FILES_SCHEMA.empty_table(), *comparison.differing])
    names, was_names = (table["container"].combine_chunks() for table in (now, was))
    place = pc.index_in(was_names, names)
    sizes, times = (
        was[column].to_numpy() != now[column].take(place).to_numpy()
        for column in ("size", "modified")
    )
    # Of files that may grow `size` is where the last whole line ended, perhaps not the file's end.
    is_read = pc.is_valid(was["content_hash"]).to_numpy(zero_copy_only=False)
    sizes &= times | ~is_read | (was["modified"].to_numpy() == 0)
    changes = {
        "added": names.filter(pc.invert(pc.is_in(names, was_names))),
        "removed": pa.concat_tables(comparison.gone)["container"].combine_chunks(),
        "of another size": was_names.filter(pa.array(sizes)),
        "of another modification time": was_names.filter(pa.array(times & ~sizes)),
    }
    return ", ".join(_count_and_name(what, found) for what, found in changes.items() if len(found))


def _count_and_name(what: str, names: pa.LargeBinaryArray) -> str:
    first = ", ".join(repr(os.fsdecode(name.as_py())) for name in names[:_NUM_NAMED])
    more = ", …" if len(names) > _NUM_NAMED else ""
    return f"{len(names):,} {what} ({first}{more})"


def _without(batches: Iterator[pa.RecordBatch], names: set[bytes]) -> Iterator[pa.RecordBatch]:
    """Batches without the rows of some files."""
    some = pa.array(names, pa.large_binary())
    for batch in batches:
        yield batch.filter(pc.invert(pc.is_in(batch["container"], some)))


def _find_grown(
    source: Source, rows: pa.Table
) -> tuple[dict[str, tuple[int, int]], pa.LargeBinaryArray]:
    """Of files with another size or time, those that only grew, and the names of those that
    changed."""
    is_read = pc.is_valid(rows["content_hash"])
    stretches: dict[str, list[Stretch]] = {}
    for row in rows.filter(is_read).to_pylist():
        stretch = Stretch(row["begin"], row["size"], row["content_hash"])
        stretches.setdefault(os.fsdecode(row["container"]), []).append(stretch)
    ends = {name: source.find_end(name, measured) for name, measured in stretches.items()}
    grown = {
        name: end
        for name, end in ends.items()
        if end is not None and end[0] < source.root.entry(name)[1]
    }
    changed = [os.fsencode(name) for name, end in ends.items() if end is None]
    unread = rows.filter(pc.invert(is_read))["container"].combine_chunks()
    return grown, pa.concat_arrays([unread.unique(), pa.array(changed, pa.large_binary())])


def _refuse(source: Source, names: pa.LargeBinaryArray, what: str, remedy: str) -> None:
    """Raise StageError with the first of the names, if there are any."""
    if len(names):
        first = source.root.path(os.fsdecode(pc.min(names).as_py()))
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        raise StageError(
            f"{first}{more}: {what}, but packed already; {remedy}, or pack all data again with "
            "another output.path"
        )

"""Which files of a source were measured, and what has been added to it since.

_packing/files/source-00000.parquet    container, size, modified: one row per file, sorted by name
                                       begin, content_hash: of files that may grow at their end

Data that are appended have a table of their own, of what they added. A file is taken to be as it
was where its size and modification time are; otherwise the format may find that only its end is
new (Source.find_end). All that is not so is refused by name: packs hold what was there before.
"""

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from offline_packing.errors import StageError
from offline_packing.index import write_table
from offline_packing.sources import Growth, Scan, Source, Stretch
from offline_packing.stamps import MODIFICATION_TIME

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


def list_files(source: Source) -> pa.Table:
    """The files that a source reads now, as a table of FILES_SCHEMA sorted by name."""
    entries = iter(source.entries())
    batches = []
    while chunk := list(itertools.islice(entries, _CHUNK)):
        names, sizes, times = zip(*chunk, strict=True)
        columns: list[Any] = [
            pa.array(map(os.fsencode, names), pa.large_binary()),
            pa.array(sizes, pa.int64()),
            pa.array(times, pa.int64()),
            pa.array(np.zeros(len(names), np.int64)),
            pa.nulls(len(names), pa.string()),
        ]
        batches.append(pa.record_batch(columns, schema=FILES_SCHEMA))
    return pa.Table.from_batches(batches, FILES_SCHEMA).combine_chunks().sort_by("container")


def save_files(path: Path, files: pa.Table, scan: Scan) -> None:
    """Write the table of what was scanned of a source."""
    if scan.stretches:
        whole = [Stretch(0, size, "") for size in files["size"].to_pylist()]
        names = map(os.fsdecode, files["container"].to_pylist())
        read = [scan.stretches.get(name, one) for name, one in zip(names, whole, strict=True)]
        columns = {
            "container": files["container"],
            "size": [stretch.end for stretch in read],
            "modified": files["modified"],
            "begin": [stretch.begin for stretch in read],
            "content_hash": [stretch.content_hash for stretch in read],
        }
        files = pa.table(columns, schema=FILES_SCHEMA)
    write_table(path, files)


def read_files(paths: Iterable[Path]) -> pa.Table:
    """The tables of a source, from the first that was measured to the last that was appended.

    Raises:
        StageError: one of them is gone.
    """
    try:
        return pa.concat_tables([pq.read_table(path, schema=FILES_SCHEMA) for path in paths])
    except FileNotFoundError as error:
        raise StageError(
            f"{error.filename or error} is missing, and with it which files were measured; append "
            "from a folder of the new files alone"
        ) from error


def find_growth(
    source: Source, files: pa.Table, known: pa.Table, *, accept: Iterable[str] = ()
) -> Growth:
    """What a source has beyond the files that are known.

    Args:
        files: what the source holds now.
        known: what `read_files` gave.
        accept: with MODIFICATION_TIME, a file of the same size is taken to be as it was.

    Raises:
        StageError: a known file is gone or was changed; the message names the first ones.
    """
    names = files["container"].combine_chunks()
    if not len(known):
        return Growth(names)
    known_names = known["container"].combine_chunks()
    place = pc.index_in(known_names, names)
    _refuse(source, known_names.filter(pc.is_null(place)), "gone", "restore it")
    place = place.to_numpy()
    # Of several rows of one file, the last says how it was when it was measured last.
    last = np.full(len(names), -1)
    last[place] = np.arange(len(known))
    same = known["size"].to_numpy()[last] == files["size"].to_numpy()
    if MODIFICATION_TIME not in accept:
        same &= known["modified"].to_numpy()[last] == files["modified"].to_numpy()
    differing = names.filter(pa.array((last >= 0) & ~same))
    rows = known.filter(pc.is_in(known_names, differing))
    grown, changed = _find_grown(source, rows)
    _refuse(
        source,
        changed,
        "not as it was measured (size, modification time)",
        "restore it; where it was copied without its times, copy it with cp -a or rsync -t or pass "
        f"--accept-mismatch {MODIFICATION_TIME}",
    )
    return Growth(names.filter(pa.array(last < 0)), grown)


def describe_changes(known: pa.Table, files: pa.Table) -> str:
    """ "2 added ('a.json', 'b.json'), 1 removed ('c.json')"; empty where all are as they were.

    Args:
        known: what `read_files` gave.
        files: what the source holds now.
    """
    names, known_names = (table["container"].combine_chunks() for table in (files, known))
    place = pc.index_in(known_names, names)
    is_here = pc.is_valid(place)
    kept, now = known.filter(is_here), files.take(place.drop_null())
    sizes, times = (
        kept[column].to_numpy() != now[column].to_numpy() for column in ("size", "modified")
    )
    # Of files that may grow `size` is where the last whole line ended, perhaps not the file's end.
    is_read = pc.is_valid(kept["content_hash"]).to_numpy()
    sizes &= times | ~is_read | (now["modified"].to_numpy() == 0)
    kept_names = kept["container"].combine_chunks()
    changes = {
        "added": names.filter(pc.invert(pc.is_in(names, known_names))),
        "removed": known_names.filter(pc.invert(is_here)),
        "of another size": kept_names.filter(pa.array(sizes)),
        "of another modification time": kept_names.filter(pa.array(times & ~sizes)),
    }
    return ", ".join(_count_and_name(what, found) for what, found in changes.items() if len(found))


def _count_and_name(what: str, names: pa.LargeBinaryArray) -> str:
    first = ", ".join(repr(os.fsdecode(name.as_py())) for name in names[:_NUM_NAMED])
    more = ", …" if len(names) > _NUM_NAMED else ""
    return f"{len(names):,} {what} ({first}{more})"


def added_files(files: pa.Table, growth: Growth) -> pa.Table:
    """The rows of the files that are new or grew."""
    grown = pa.array(map(os.fsencode, growth.grown), pa.large_binary())
    wanted = pa.concat_arrays([growth.new, grown])
    return files.filter(pc.is_in(files["container"], wanted))


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
    return grown, pa.concat_arrays([unread, pa.array(changed, pa.large_binary())])


def _refuse(source: Source, names: pa.LargeBinaryArray, what: str, remedy: str) -> None:
    """Raise StageError with the first of the names, if there are any."""
    if len(names):
        first = source.root.path(os.fsdecode(pc.min(names).as_py()))
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        raise StageError(
            f"{first}{more}: {what}, but packed already; {remedy}, or pack all data again with "
            "another output.path"
        )

"""The files of the sources: measured ones, so that a message can name later changes; and pictures
that no sample uses.

_packing/files/source-00000.parquet    container, size, modified: one row per file, as listed
"""

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.index.table import Index, open_table, table_writer
from offline_packing.runs.run import Run, open_sources
from offline_packing.sources import Scan, Source
from offline_packing.sources.roots.listing import FILES_SCHEMA, container_hash

_CHUNK: Final = 1 << 16
#: File names that a message lists per kind of change.
_NUM_NAMED: Final = 3


def save_files(folder: Path, sources: Sequence[Source], scans: Sequence[Scan]) -> None:
    """Keep in a folder which files are measured."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, (source, scan) in enumerate(zip(sources, scans, strict=True)):
        if source.options.index is not None:
            continue
        batches = pa.ipc.open_stream(scan.files) if scan.files else _list_batches(source)
        with table_writer(_files_path(folder, i), FILES_SCHEMA) as write:
            for batch in batches:
                write(pa.Table.from_batches([batch]))


def explain_listing(folder: Path, sources: Sequence[Source], name: str) -> str | None:
    """Describe the changes in the files of a source since `save_files` recorded them, by the name
    of a fingerprint's field: source.0.listing. Return None for other fields, without changes, or
    where nothing was recorded."""
    match = re.fullmatch(r"source\.(\d+)\.listing", name)
    if match is None or int(match[1]) >= len(sources):
        return None
    source, path = sources[int(match[1])], _files_path(folder, int(match[1]))
    if source.options.index is not None:
        return f"{name}: {source.options.index} has another index now"
    changes = describe_changes(path, source) if path.exists() else ""
    return f"{name}: the files of {source.path} changed: {changes}" if changes else None


def describe_change(run: Run) -> str:
    """Describe what changed in the sources since they were measured, as far as files show it."""
    sources = open_sources(run.config)
    names = [f"source.{i}.listing" for i in range(len(sources))]
    changes = [explain_listing(run.workspace.files, sources, name) for name in names]
    paths = ", ".join(source.path for source in sources)
    return "; ".join(filter(None, changes)) or f"{paths} no longer gives what was measured"


def describe_changes(known: Path, source: Source) -> str:
    """Describe the changes since a table was saved: "2 added ('a.json', 'b.json'), 1 removed
    ('c.json')". Return "" if there are none."""
    with open_table(known) as table:
        was = table.read(FILES_SCHEMA.names)
    now = pa.Table.from_batches(_list_batches(source), FILES_SCHEMA)
    names, was_names = (table["container"].combine_chunks() for table in (now, was))
    place = pc.index_in(was_names, names)
    removed = was_names.filter(pc.is_null(place))
    was, place = was.filter(pc.is_valid(place)), place.drop_null()
    sizes, times = (
        was[column].to_numpy() != now[column].take(place).to_numpy()
        for column in ("size", "modified")
    )
    kept = was["container"].combine_chunks()
    changes = {
        "added": names.filter(pc.invert(pc.is_in(names, was_names))),
        "removed": removed,
        "of another size": kept.filter(pa.array(sizes)),
        "of another modification time": kept.filter(pa.array(times & ~sizes)),
    }
    lines = []
    for what, found in changes.items():
        first = ", ".join(repr(os.fsdecode(name.as_py())) for name in found[:_NUM_NAMED])
        more = ", …" if len(found) > _NUM_NAMED else ""
        lines += [f"{len(found):,} {what} ({first}{more})"] if len(found) else []
    return ", ".join(lines)


def _files_path(folder: Path, source_id: int) -> Path:
    return folder / f"source-{source_id:05d}.parquet"


def _list_batches(source: Source) -> Iterator[pa.RecordBatch]:
    """Yield the files that a source reads now, in the order of a listing."""
    entries = iter(source.entries())
    while chunk := list(itertools.islice(entries, _CHUNK)):
        names, sizes, times = zip(*chunk, strict=True)
        containers = os.fsencode("\0".join(names)).split(b"\0")
        columns = {"container": containers, "size": sizes, "modified": times}
        yield pa.record_batch(columns, FILES_SCHEMA)


def count_unused_media(samples: Index, scans: Sequence[Scan]) -> int:
    """Count the image and video files that neither belong to a record nor are named by a row."""
    unpaired = {i: np.sort(scan.unpaired_media) for i, scan in enumerate(scans)}
    unused = {i: np.ones(len(hashes), bool) for i, hashes in unpaired.items() if len(hashes)}
    if not unused or samples.info.num_skipped:  # samples that are left out use images, too
        return 0
    for table in samples.parts("source_id", "media"):
        for i in unused:
            rows = table.filter(pc.equal(table["source_id"], i))
            names = rows["media"].combine_chunks().flatten().field("container").unique()
            hashes = [container_hash(name.encode()) for name in names.to_pylist()]
            used = np.array(hashes, np.uint64)
            places = np.minimum(np.searchsorted(unpaired[i], used), len(unpaired[i]) - 1)
            unused[i][places[unpaired[i][places] == used]] = False
    return sum(int(flags.sum()) for flags in unused.values())

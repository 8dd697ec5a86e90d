"""Rows of the index in the order of the packs, whatever the size of the index.

A shard's samples lie all over the index. Rows that do not fit in memory are therefore sorted in two
steps: one pass over the index deals them out to groups of shards, each a scratch file; then
group after group is read back and put in order.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from offline_packing.index.table import INDEX_SCHEMA, Index, key_hash

#: Rows held in memory at a time: some 200 MB of index.
ROWS_IN_MEMORY: Final = 1 << 19
#: Groups, each of which holds a scratch file open.
_MAX_GROUPS: Final = 256

#: Numbers of samples: rows of the index, over all parts.
SampleIds = npt.NDArray[np.integer]


def rows_of_shards(
    samples: Index,
    columns: Sequence[str],
    ids_of_shards: Sequence[SampleIds],
    scratch: Path,
    *,
    rows_in_memory: int = ROWS_IN_MEMORY,
) -> Iterator[pa.Table]:
    """Columns of the rows of each shard, in the given order.

    Args:
        ids_of_shards: row numbers per shard.
        scratch: existing folder; the files in it have no name and vanish with this process.
    """
    groups = _group(ids_of_shards, rows_in_memory)
    if len(groups) == 1:
        ids = np.sort(np.concatenate(groups[0]))
        chosen = [table for _, table in _pick(samples, columns, [ids], rows_in_memory)]
        yield from _in_order(_concat(chosen, columns), ids, groups[0])
        return
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile(dir=scratch)) for _ in groups]
        sorted_ids = [np.sort(np.concatenate(group)) for group in groups]
        _deal_out(samples, columns, sorted_ids, files, rows_in_memory)
        for group, ids, file in zip(groups, sorted_ids, files, strict=True):
            file.seek(0)
            with pa.ipc.open_stream(file) as reader:
                table = reader.read_all()
            file.truncate(0)
            yield from _in_order(table, ids, group)


def name_rows(samples: Index, rows: SampleIds) -> pa.Table:
    """source_id and key of some rows, in the given order."""
    return next(rows_of_shards(samples, ("source_id", "key"), [rows], Path()))


def copy_key(key: str, copy: int) -> str:
    """Key of a copy, the first use being 0: 'a/17', 'a/17#2', 'a/17#3'."""
    return f"{key}#{copy + 1}" if copy else key


def name_copies(rows: pa.Table, copies: SampleIds) -> pa.Table:
    """Rows with the keys of copies: `copies` (num_rows,) are their numbers, 0 for the first use."""
    keys = map(copy_key, rows["key"].to_pylist(), copies.tolist())
    place = rows.schema.get_field_index("key")
    return rows.set_column(place, rows.schema.field(place), pa.array(list(keys), pa.large_string()))


def hash_keys(samples: Index, rows: SampleIds, copies: SampleIds | None) -> npt.NDArray[np.uint64]:
    """(num_rows,) key_hash of rows; `copies` (num_rows,) are their numbers where some are copies,
    whose keys are hashed anew."""
    hashes: npt.NDArray[np.uint64] = samples.array("key_hash")[rows]
    if copies is not None and copies.any():
        chosen = np.flatnonzero(copies)
        named = name_copies(name_rows(samples, rows[chosen]), copies[chosen])
        pairs = zip(named["source_id"].to_pylist(), named["key"].to_pylist(), strict=True)
        hashes[chosen] = [key_hash(*pair) for pair in pairs]
    return hashes


def _group(ids_of_shards: Sequence[SampleIds], rows_in_memory: int) -> list[list[SampleIds]]:
    """Shards in a row that fit in memory together; a larger one stands alone."""
    total = sum(map(len, ids_of_shards))
    limit = max(rows_in_memory, -(-2 * total // _MAX_GROUPS))
    groups: list[list[SampleIds]] = []
    held = 0
    for ids in ids_of_shards:
        if not groups or held + len(ids) > limit:
            groups.append([])
            held = 0
        groups[-1].append(ids)
        held += len(ids)
    return groups


def _deal_out(
    samples: Index,
    columns: Sequence[str],
    sorted_ids: Sequence[SampleIds],
    files: Sequence[IO[bytes]],
    rows_in_memory: int,
) -> None:
    """Write the rows of each group, ascending, as an Arrow stream to its file."""
    schema = _schema(columns)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with ExitStack() as stack:
        writers = [
            stack.enter_context(pa.ipc.new_stream(file, schema, options=options)) for file in files
        ]
        for group, table in _pick(samples, columns, sorted_ids, rows_in_memory):
            writers[group].write_table(table)


def _pick(
    samples: Index, columns: Sequence[str], sorted_ids: Sequence[SampleIds], rows_in_memory: int
) -> Iterator[tuple[int, pa.Table]]:
    """(group, its rows) for each stretch of the index that fits in memory."""
    for first, table in _stretches(samples, columns, sorted_ids, rows_in_memory):
        for group, ids in enumerate(sorted_ids):
            start, end = np.searchsorted(ids, (first, first + len(table)))
            if end > start:
                yield group, table.take(pa.array(ids[start:end] - first))


def _stretches(
    samples: Index, columns: Sequence[str], sorted_ids: Sequence[SampleIds], rows_in_memory: int
) -> Iterator[tuple[int, pa.Table]]:
    """(number of its first row, rows) of neighboring parts that fit in memory together; parts
    without any of the ids are left out."""
    ends = np.cumsum(samples.info.part_rows)
    wanted = np.zeros(len(ends), dtype=bool)
    for ids in sorted_ids:
        wanted[np.searchsorted(ends, ids, side="right")] = True
    first, held = 0, list[pa.Table]()
    for number, (end, is_wanted) in enumerate(zip(ends.tolist(), wanted, strict=True)):
        if is_wanted:
            held.append(samples.part(number, *columns))
        if held and (not is_wanted or sum(map(len, held)) >= rows_in_memory):
            yield first, _concat(held, columns)
            held = []
        if not held:
            first = end
    if held:
        yield first, _concat(held, columns)


def _in_order(
    table: pa.Table, sorted_ids: SampleIds, ids_of_shards: Sequence[SampleIds]
) -> Iterator[pa.Table]:
    """The rows of each shard, of a table that holds them ascending."""
    table = table.combine_chunks()
    for ids in ids_of_shards:
        yield table.take(pa.array(np.searchsorted(sorted_ids, ids)))


def _concat(tables: Sequence[pa.Table], columns: Sequence[str]) -> pa.Table:
    if not tables:
        return _schema(columns).empty_table()
    return pa.concat_tables(tables).combine_chunks()


def _schema(columns: Sequence[str]) -> pa.Schema:
    return pa.schema([INDEX_SCHEMA.field(name) for name in columns])


#: Sizes of records and media, without their other columns.
_SIZES: Final = ("json.size", "media.list.element.size")


def sample_bytes(path: Path) -> npt.NDArray[np.int64]:
    """(num_rows,) bytes of the record and the media of each sample in a part of the index."""
    table = pq.ParquetFile(path).read(columns=list(_SIZES))
    media = table["media"].combine_chunks()
    ends = np.concatenate([[0], np.cumsum(media.flatten().field("size").to_numpy())])
    in_media = np.diff(ends[np.cumsum(media.value_lengths().to_numpy())], prepend=0)
    return in_media + table["json"].combine_chunks().field("size").to_numpy()

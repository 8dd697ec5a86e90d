"""Records that share an id: LLaVA-Instruct gives several conversations of an image one `id`.

A record's own `id` (JSON, JSONL, tables) says where it came from, not which sample it is. Of the
samples that share one, the first keeps it, and every other one whose content differs gets a key
that follows from its content alone:

    {"id": "33471", ...: "What is it?"}     33471
    {"id": "33471", ...: "Which colour?"}   33471@5d0c0a1be0a6a2f7
    {"id": "33471", ...: "What is it?"}     33471, and is set aside as a duplicate

so that keys do not depend on how many share an id, on parts or on workers. Records with equal
content remain duplicates.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from offline_packing.index.table import INDEX_SCHEMA, Index, key_hash, table_writer
from offline_packing.sources import Embedded
from task_encoders.samples import SourceSample

Hashes = npt.NDArray[np.uint64]


def hash_content(sample: SourceSample, media: Iterable[Embedded | None]) -> int:
    """xxh3_64 of what a sample is trained on: its texts, and its media by their names, or by their
    bytes where these are in the record itself."""
    names = (sample.images, sample.videos)
    digest = xxhash.xxh3_64(orjson.dumps([sample.turns, *names, sample.system]))
    for medium in media:
        if medium is not None and medium.data is not None:
            digest.update(xxhash.xxh3_128_digest(medium.data))
    return digest.intdigest()


def repeated_key(key: str, content_hash: int) -> str:
    """Key of a sample that shares its id: '33471@5d0c0a1be0a6a2f7'."""
    return f"{key}@{content_hash:016x}"


def rename_repeated(samples: Index) -> int:
    """Give samples of a measured index that share an id keys of their own; returns their number.

    Parts are replaced whole. Killed and run again, or run twice at once, it does the same: the
    first sample of an id is never renamed, and what was renamed shares no id any more.
    """
    contents = samples.array("content_hash")
    if not contents.any():
        return 0
    hashes = samples.array("key_hash")
    owners = contents[first_of_equal(hashes)]
    renamed = contents != owners
    begin = 0
    for number, num_rows in enumerate(samples.info.part_rows):
        some = slice(begin, begin + num_rows)
        if renamed[some].any():
            _rename_part(samples.path(number), renamed[some], hashes[some])
        begin += num_rows
    return int(np.count_nonzero(renamed))


def first_of_equal(hashes: Hashes) -> npt.NDArray[np.int64]:
    """(num_rows,): the first row that has the same hash, [7, 9, 7, 9] -> [0, 1, 0, 1]."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    begins = np.ones(len(hashes), bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    first = np.empty(len(hashes), np.int64)
    first[order] = order[begins][np.cumsum(begins) - 1]
    return first


def _rename_part(path: Path, renamed: npt.NDArray[np.bool_], hashes: Hashes) -> None:
    """Replace a part of the index by one with other keys in some rows.

    Args:
        hashes: (num_rows,) the rows' key_hash; a row with another one is already renamed.
    """
    with pq.ParquetFile(path) as part, table_writer(path, INDEX_SCHEMA) as write:
        begin = 0
        for number in range(part.num_row_groups):
            rows = part.read_row_group(number)
            some = slice(begin, begin + len(rows))
            pending = renamed[some] & (rows["key_hash"].to_numpy() == hashes[some])
            write(_rename_rows(rows, pending) if pending.any() else rows)
            begin += len(rows)


def _rename_rows(rows: pa.Table, renamed: npt.NDArray[np.bool_]) -> pa.Table:
    keys, key_hashes = rows["key"].to_pylist(), rows["key_hash"].to_numpy().copy()
    contents, source_ids = rows["content_hash"].to_numpy(), rows["source_id"].to_numpy()
    for row in np.flatnonzero(renamed).tolist():
        keys[row] = repeated_key(keys[row], int(contents[row]))
        key_hashes[row] = key_hash(int(source_ids[row]), keys[row])
    columns: dict[str, Any] = {"key": keys, "key_hash": key_hashes}
    for name, values in columns.items():
        field = INDEX_SCHEMA.field(name)
        rows = rows.set_column(
            INDEX_SCHEMA.get_field_index(name), field, pa.array(values, field.type)
        )
    return rows

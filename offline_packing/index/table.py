"""The index: one row per usable sample, and a second table of the samples set aside.

    _packing/index/part-00000.parquet       rows in the order of the source
    _packing/set_aside/part-00000.parquet   key, source, reason, detail
    _packing/index.json                     parts, counts, fingerprint; written last, see info.py

A sample's id is its row number over all parts. Containers are paths relative to the source's root,
so that data and index can move.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from offline_packing.errors import DamagedError
from offline_packing.index.info import IndexInfo
from offline_packing.storage.files import atomic_file, kept_copy
from offline_packing.storage.paths import is_remote, read_each
from task_encoders.storage.paths import REMEDY

LOCATOR_FIELDS: Final = [
    pa.field("kind", pa.string()),
    pa.field("container", pa.large_string()),
    pa.field("offset", pa.int64()),
    pa.field("size", pa.int64()),
    pa.field("column", pa.string()),
]
_MEDIA_FIELDS: Final = [*LOCATOR_FIELDS, pa.field("extension", pa.string())]
_PART_FIELDS: Final = [
    pa.field("key", pa.large_string()),
    pa.field("json", pa.struct(LOCATOR_FIELDS)),
    pa.field("media", pa.list_(pa.int32())),  # places among the sample's; -1: not shown
    pa.field("num_videos", pa.int32()),
    *(pa.field(name, pa.int32()) for name in ("begin", "first", "end")),
]
INDEX_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.large_string()),
        # xxh3_64 of "source_id/key"; of a part of a conversation, of its record's key
        pa.field("key_hash", pa.uint64()),
        # 0 where the key is an identity, see measure/identity.py
        pa.field("content_hash", pa.uint64()),
        # of its texts and media; of a part of a conversation, those of its record
        pa.field("sample_hash", pa.uint64()),
        pa.field("source_id", pa.int32()),
        pa.field("task", pa.string()),
        pa.field("num_tokens", pa.int32()),
        pa.field("num_loss_tokens", pa.int32()),
        pa.field("num_vision_patches", pa.int32()),
        pa.field("num_images", pa.int32()),
        pa.field("num_videos", pa.int32()),
        pa.field("num_turns", pa.int32()),
        pa.field("traits", pa.uint8()),  # flags, see measured.py; null: not measured
        pa.field("grid_thw", pa.list_(pa.int32())),  # (t, h, w) of each medium, one after another
        pa.field("stamp", pa.uint64()),  # of the files' modification times, see measured.py
        pa.field("json", pa.struct(LOCATOR_FIELDS)),
        pa.field("media", pa.large_list(pa.struct(_MEDIA_FIELDS))),
        pa.field("media_hash", pa.large_list(pa.uint64())),  # of the bytes of each medium
        pa.field("group_hash", pa.uint64()),  # of source.fields.group; 0: there is none
        # the record that this is a part of; then json has the size of the turns that the sample has
        # of it. None: the whole record at json
        pa.field("part", pa.struct(_PART_FIELDS)),
    ]
)
SET_ASIDE_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.large_string()),
        pa.field("source", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.large_string()),
    ]
)


def key_hash(source_id: int, key: str) -> int:
    """Identity of a record, or of a sample, in 8 bytes."""
    return xxhash.xxh3_64_intdigest(f"{source_id}/{key}".encode())


@contextmanager
def table_writer(
    path: Path, schema: pa.Schema, notes: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Callable[[pa.Table], None]]:
    """Write a Parquet file table by table; it is complete if the block succeeds, and absent
    otherwise. `notes` go into the file's metadata as they are at the end."""
    with atomic_file(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        yield writer.write_table
        if notes:
            writer.add_key_value_metadata(dict(notes))


def rewrite_part(path: Path, change: Callable[[pa.Table, slice], pa.Table]) -> None:
    """Replace a part of the index by what `change` makes of its rows: it gets some of them, and
    their places in the part."""
    with open_table(path) as part, table_writer(path, INDEX_SCHEMA) as write:
        begin = 0
        for number in range(part.num_row_groups):
            rows = part.read_row_group(number)
            write(change(rows, slice(begin, begin + len(rows))))
            begin += len(rows)


@contextmanager
def open_table(path: Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file to read from, mapped into memory if it is local."""
    if is_remote(path):
        with path.open("rb") as file, pq.ParquetFile(file) as table:
            yield table
    else:
        with pq.ParquetFile(path, memory_map=True) as table:
            yield table


def part_name(number: int) -> str:
    """File name of a part."""
    return f"part-{number:05d}.parquet"


class Index:
    """A complete index, read column by column."""

    def __init__(self, folder: Path, info: IndexInfo) -> None:
        self._folder = folder
        #: the file of each part
        self.paths = [folder / part_name(i) for i in range(len(info.part_rows))]
        self.info = info

    def table(self, *columns: str) -> pa.Table:
        """Columns of all rows; every column where none is named. Raises StageError as `part`."""
        none = INDEX_SCHEMA.empty_table().select(list(columns or INDEX_SCHEMA.names))
        return pa.concat_tables([none, *self.parts(*none.column_names)])

    def parts(self, *columns: str) -> Iterator[pa.Table]:
        """Columns of the rows, part by part. Raises StageError as `part`."""
        return read_each(
            self._folder, lambda number: self.part(number, *columns), range(len(self.paths))
        )

    def part(self, number: int, *columns: str) -> pa.Table:
        """Columns of one part. Raises StageError if the part is missing or has another number of
        rows than index.json says."""
        path, rows = self.paths[number], self.info.part_rows[number]
        expected = self.info.hashes.get(path.parent.name, {}).get(path.name)
        try:
            # Of a part in object storage a copy, since stages ask for column after column.
            with open_table(path if expected is None else kept_copy(path, expected)) as file:
                # Without threads: handing a part to them takes longer than reading it.
                table = file.read(list(columns), use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise DamagedError(f"index part {path} cannot be read: {error}; {REMEDY}") from error
        if len(table) != rows:
            raise DamagedError(
                f"index part {path} has {len(table)} rows, {rows} were written; {REMEDY}"
            )
        return table.select(list(columns))

    def array(self, column: str) -> npt.NDArray[Any]:
        """A numeric column as an array (num_samples,)."""
        kind = INDEX_SCHEMA.field(column).type.to_pandas_dtype()
        values, end = np.empty(self.info.num_samples, kind), 0
        for part in self.parts(column):
            values[end : end + len(part)] = part[column].to_numpy()
            end += len(part)
        return values

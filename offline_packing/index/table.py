"""The index: one row per usable sample, and a second table of the samples set aside.

    _packing/index/part-00000.parquet       rows in the order of the source
    _packing/set_aside/part-00000.parquet   key, source, reason, detail
    _packing/index.json                     parts, counts, fingerprint; written last

A sample's id is its row number over all parts. Containers are paths relative to the source's root,
so that data and index can move.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from offline_packing.errors import DamagedError, StageError
from offline_packing.sources import Locator
from offline_packing.storage.files import atomic_file, read_json, to_json, write_atomically
from task_encoders.sample_encoder import SampleLength

INDEX_VERSION: Final = 4

_LOCATOR_FIELDS: Final = [
    pa.field("kind", pa.string()),
    pa.field("container", pa.large_string()),
    pa.field("offset", pa.int64()),
    pa.field("size", pa.int64()),
    pa.field("column", pa.string()),
]
_MEDIA_FIELDS: Final = [*_LOCATOR_FIELDS, pa.field("extension", pa.string())]
INDEX_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.large_string()),
        pa.field("key_hash", pa.uint64()),  # xxh3_64 of "source_id/key"
        pa.field(
            "content_hash", pa.uint64()
        ),  # 0 where the key is an identity, see measure/identity.py
        pa.field("source_id", pa.int32()),
        pa.field("task", pa.string()),
        pa.field("num_tokens", pa.int32()),
        pa.field("num_loss_tokens", pa.int32()),
        pa.field("num_vision_patches", pa.int32()),
        pa.field("num_images", pa.int32()),
        pa.field("num_videos", pa.int32()),
        pa.field("num_turns", pa.int32()),
        pa.field("traits", pa.uint8()),  # flags, see traits.py
        pa.field("grid_thw", pa.list_(pa.int32())),  # (t, h, w) of each medium, one after another
        pa.field("stamp", pa.uint64()),  # of the files' modification times, see stamps.py
        pa.field("json", pa.struct(_LOCATOR_FIELDS)),
        pa.field("media", pa.large_list(pa.struct(_MEDIA_FIELDS))),
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


@dataclass(frozen=True, slots=True)
class MeasuredSample:
    """One row of the index. `media` holds locator and extension of each image, then of each video;
    `stamp` changes when a file of the sample is written to."""

    key: str
    source_id: int
    task: str
    num_turns: int
    length: SampleLength
    json: Locator
    media: tuple[tuple[Locator, str], ...]
    stamp: int
    traits: int
    num_videos: int = 0
    content_hash: int = 0


@dataclass(frozen=True, slots=True)
class SetAsideSample:
    """One row of the set-aside table."""

    key: str
    source: str
    reason: str
    detail: str


def key_hash(source_id: int, key: str) -> int:
    """What identifies a sample in 8 bytes."""
    return xxhash.xxh3_64_intdigest(f"{source_id}/{key}".encode())


def index_table(samples: Sequence[MeasuredSample]) -> pa.Table:
    """Samples as rows of INDEX_SCHEMA."""
    lengths = [sample.length for sample in samples]
    grids = [[n for grid in length.grid_thw for n in grid] for length in lengths]
    columns: dict[str, Iterable[Any]] = {
        "key": [sample.key for sample in samples],
        "key_hash": np.array([key_hash(s.source_id, s.key) for s in samples], dtype=np.uint64),
        "content_hash": np.array([sample.content_hash for sample in samples], dtype=np.uint64),
        "source_id": [sample.source_id for sample in samples],
        "task": [sample.task for sample in samples],
        "num_tokens": [length.num_tokens for length in lengths],
        "num_loss_tokens": [length.num_loss_tokens for length in lengths],
        "num_vision_patches": [length.num_vision_patches for length in lengths],
        "num_images": [len(sample.media) - sample.num_videos for sample in samples],
        "num_videos": [sample.num_videos for sample in samples],
        "num_turns": [sample.num_turns for sample in samples],
        "traits": np.array([sample.traits for sample in samples], dtype=np.uint8),
        "grid_thw": grids,
        "stamp": np.array([sample.stamp for sample in samples], dtype=np.uint64),
    }
    nested = {"json": _locators([sample.json for sample in samples]), "media": _media(samples)}
    arrays = [
        nested[f.name] if f.name in nested else pa.array(columns[f.name], f.type)
        for f in INDEX_SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA)


def _locators(locators: Sequence[Locator]) -> pa.StructArray:
    return pa.StructArray.from_arrays(_locator_columns(locators), fields=_LOCATOR_FIELDS)


def _locator_columns(locators: Sequence[Locator]) -> list[pa.Array]:
    return [
        pa.array([getattr(locator, name) for locator in locators], kind)
        for name, kind in ((field.name, field.type) for field in _LOCATOR_FIELDS)
    ]


def _media(samples: Sequence[MeasuredSample]) -> pa.LargeListArray:
    """The lists of media, of one array of all of them."""
    offsets = np.cumsum([0, *(len(sample.media) for sample in samples)], dtype=np.int64)
    flat = [medium for sample in samples for medium in sample.media]
    extensions = pa.array([extension for _, extension in flat], pa.string())
    structs = pa.StructArray.from_arrays(
        [*_locator_columns([locator for locator, _ in flat]), extensions], fields=_MEDIA_FIELDS
    )
    return pa.LargeListArray.from_arrays(offsets, structs)


def set_aside_table(samples: Sequence[SetAsideSample]) -> pa.Table:
    """Samples as rows of SET_ASIDE_SCHEMA; text that is not UTF-8 is escaped."""
    rows = [
        {
            name: value.encode("utf-8", "backslashreplace").decode()
            for name, value in asdict(sample).items()
        }
        for sample in samples
    ]
    return pa.Table.from_pylist(rows, SET_ASIDE_SCHEMA)


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file that is complete or absent."""
    with atomic_file(path) as file:
        pq.write_table(table, file, compression="zstd")


@contextmanager
def table_writer(
    path: Path, schema: pa.Schema, notes: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Callable[[pa.Table], None]]:
    """Write a Parquet file table by table; it is complete if the block succeeds, and absent
    otherwise.
    `notes` go into the file's metadata as they are at the end."""
    with atomic_file(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        yield writer.write_table
        if notes:
            writer.add_key_value_metadata(dict(notes))


@dataclass(frozen=True)
class IndexInfo:
    """What index.json holds."""

    fingerprint: dict[str, str | int]
    versions: dict[str, str]
    #: rows of each part, in order
    part_rows: list[int]
    #: samples set aside while measuring, by reason
    set_aside: dict[str, int]
    #: image files that no sample uses
    num_unused_images: int = 0
    #: what samples go without, such as a field with media -> how many (sources/lost_fields.py)
    lost_fields: dict[str, int] = field(default_factory=dict)
    #: sum of num_tokens
    num_tokens: int = 0
    #: samples left out by source.skip; neither in the index nor set aside
    num_skipped: int = 0
    #: xxh3_128 of the files in the folders index, set_aside and files
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)
    version: int = INDEX_VERSION

    @property
    def num_samples(self) -> int:
        """Rows of the index."""
        return sum(self.part_rows)

    @property
    def num_set_aside(self) -> int:
        """Samples set aside while measuring."""
        return sum(self.set_aside.values())

    def save(self, path: Path) -> None:
        """Write index.json: from now on the index is complete."""
        content = asdict(self)
        if not self.num_skipped:  # bytes as they were before there was such a number
            del content["num_skipped"]
        write_atomically(path, to_json(content))

    @classmethod
    def load(cls, path: Path) -> "IndexInfo | None":
        """Read index.json; None if the index is not complete.

        Raises:
            StageError: it is damaged, or of another format version.
        """
        content = read_json(path)
        if content is None:
            return None
        if content.get("version") != INDEX_VERSION:
            raise StageError(
                f"{path} has format version {content.get('version')}, this version reads "
                f"{INDEX_VERSION}; measure again with another output.path"
            )
        try:
            info = cls(**content)
        except TypeError as error:
            raise DamagedError(f"{path} is damaged: {error}; retry measures again") from error
        if not isinstance(info.hashes, dict) or not isinstance(info.part_rows, list):
            raise DamagedError(f"{path} is damaged; retry measures again")
        return info


def part_name(number: int) -> str:
    """File name of a part."""
    return f"part-{number:05d}.parquet"


class Index:
    """A complete index, read column by column."""

    def __init__(self, folder: Path, info: IndexInfo) -> None:
        self._paths = [folder / part_name(i) for i in range(len(info.part_rows))]
        self.info = info

    def path(self, number: int) -> Path:
        """The file of a part."""
        return self._paths[number]

    def table(self, *columns: str) -> pa.Table:
        """Columns of all rows; every column where none is named. Raises StageError as `part`."""
        columns = columns or tuple(INDEX_SCHEMA.names)
        tables = list(self.parts(*columns))
        if not tables:
            return INDEX_SCHEMA.empty_table().select(list(columns))
        return pa.concat_tables(tables)

    def parts(self, *columns: str) -> Iterator[pa.Table]:
        """Columns of the rows, part by part. Raises StageError as `part`."""
        return (self.part(number, *columns) for number in range(len(self._paths)))

    def part(self, number: int, *columns: str) -> pa.Table:
        """Columns of one part.

        Raises:
            StageError: the part is missing or has another number of rows than index.json says.
        """
        path, rows = self._paths[number], self.info.part_rows[number]
        try:
            table = pq.read_table(path, columns=list(columns), memory_map=True)
        except (OSError, pa.ArrowException) as error:
            raise StageError(
                f"index part {path} cannot be read: {error}; retry measures it again"
            ) from error
        if len(table) != rows:
            raise StageError(
                f"index part {path} has {len(table)} rows, {rows} were written; retry "
                "measures it again"
            )
        return table

    def array(self, column: str) -> npt.NDArray[Any]:
        """A numeric column as an array (num_samples,)."""
        return self.table(column)[column].to_numpy()

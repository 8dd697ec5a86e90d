"""The index: one row per usable sample, and a second table of the samples set aside.

    _packing/index/part-00000.parquet       rows in the order of the source
    _packing/set_aside/part-00000.parquet   key, source, reason, detail
    _packing/repeated/part-00000.npy        rows of a part whose id an earlier record has
    _packing/measure.json                   the receipt: files, counts, inputs; written last

A sample's id is its row number over all parts. Containers are relative to the source's root, so
that data and index can move.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from pydantic import ValidationError

from offline_packing.errors import DamagedError, StageError
from offline_packing.sources.lost_fields import SPELLED
from offline_packing.storage.files import adapter, atomic_file, is_remote, kept_copy, read_each
from offline_packing.storage.receipts import Receipt, hash_of, load_receipt, receipt_path
from task_encoders.field_types import NonNegative, first_problem
from task_encoders.packs.manifest import FileName
from task_encoders.storage.paths import REMEDY, path_of

INDEX_VERSION: Final = 4

#: Warnings of IndexInfo.common: the least number and share of all samples, and the text.
_COMMON: Final = MappingProxyType(
    {
        "copies": (1, 0, "samples repeat an earlier one, such as {!r}"),
        "media": (100, 0.01, "samples show the same image or video, such as {!r}"),
        "answers": (100, 0.1, "answers are {}"),
    }
)


@dataclass(frozen=True)
class IndexInfo:
    """The receipt of an index."""

    #: inputs of the stage
    fingerprint: dict[str, str | int | bool]
    versions: dict[str, str]
    #: rows of each part, in order
    part_rows: list[NonNegative]
    #: samples set aside while measuring, by reason
    set_aside: dict[str, NonNegative]
    #: image files that no sample uses
    num_unused_images: NonNegative = 0
    #: unused parts of samples, such as a field with media: the estimated number of samples
    #: (measure/diagnosis.py), and an example with its content
    lost: dict[str, tuple[int, str]] = field(default_factory=dict)
    #: numbers of samples with equal content, and an example: `copies` of earlier ones, samples with
    #: the most frequent image or video (`media`) and, estimated, the most frequent answer
    common: dict[str, tuple[int, str]] = field(default_factory=dict)
    #: sum of num_tokens
    num_tokens: NonNegative = 0
    #: conversations that were cut, and the samples they became
    split: dict[str, NonNegative] = field(default_factory=dict)
    #: samples left out by source.skip; neither in the index nor set aside
    num_skipped: NonNegative = 0
    #: samples with loss weights other than 0 and 1
    num_weighted: NonNegative = 0
    #: images and videos of which only a part is in their hash
    num_part_hashed: NonNegative = 0
    #: warnings of the sources' listings
    source_warnings: list[str] = field(default_factory=list)
    #: xxh3_128 of each file, by its name relative to the output
    files: dict[FileName, str] = field(default_factory=dict)
    #: options of each source, without the ones that change no row
    sources: list[dict[str, Any]] = field(default_factory=list)
    #: number of parts of each source
    source_parts: list[NonNegative] = field(default_factory=list)
    version: Literal[4] = INDEX_VERSION

    @property
    def hash(self) -> str:
        """Hash of all files of the index."""
        return hash_of(self.files)

    @property
    def num_samples(self) -> int:
        """Rows of the index."""
        return sum(self.part_rows)

    @property
    def num_set_aside(self) -> int:
        """Samples set aside while measuring."""
        return sum(self.set_aside.values())

    @property
    def num_records(self) -> int:
        """Records of the samples: fewer, if some were cut into several."""
        more = self.split.get("samples", 0) - self.split.get("conversations", 0)
        return self.num_samples - more

    @property
    def splitting(self) -> str:
        """Line with the number of conversations that were cut; empty if none was."""
        line = "{conversations:,} were cut into {samples:,} samples"
        return line.format_map(self.split) if self.split else ""

    @property
    def warnings(self) -> list[str]:
        """A line for each probable mistake, such as unused parts of samples."""
        lines = list(self.source_warnings)
        spelled = sorted(what for what in self.lost if what.startswith(SPELLED))
        if spelled:
            tokens = [what.removeprefix(SPELLED) for what in spelled]
            count, example = max(self.lost[what] for what in spelled)
            lines.append(
                f"texts hold {', '.join(map(repr, tokens))} (in about {count:,} samples, such as "
                f"{example}), trained as text; where the checkpoint knows them as control tokens: "
                f"model.control_tokens: {json.dumps(tokens, ensure_ascii=False)}"
            )
        for what in sorted(self.lost.keys() - {*spelled}):
            count, example = self.lost[what]
            such = f", such as {example}" if example else ""
            lines.append(f"{what} (about {count:,} samples{such})")
        if self.num_unused_images:
            lines.append(f"{self.num_unused_images:,} image and video files are used by no sample")
        for what, (least, share, line) in _COMMON.items():
            count, example = self.common.get(what, (0, ""))
            total = self.num_samples if what == "media" else self.num_records
            if count >= max(least, share * total) or 1 < count == total:
                about = "about " if what == "answers" else ""
                lines.append(f"{about}{count:,} of {total:,} {line.format(example)}")
        return lines

    def facts(self) -> dict[str, Any]:
        """Return the facts of the receipt."""
        return {k: v for k, v in asdict(self).items() if k not in ("fingerprint", "files")}

    @classmethod
    def load(cls, packing: Path) -> "IndexInfo | None":
        """Read the receipt in a folder `_packing`; None if the index is not complete. Raises
        StageError if it is damaged, or of another format version."""
        receipt, path = load_receipt(packing, "measure"), receipt_path(packing, "measure")
        return None if receipt is None else cls.of(receipt, path)

    @classmethod
    def of(cls, receipt: Receipt, path: Path) -> "IndexInfo":
        """Parse a receipt that was read from `path`. Raises StageError as `load`."""
        content = {**receipt.facts, "fingerprint": receipt.inputs, "files": receipt.files}
        if (version := content.get("version")) != INDEX_VERSION:
            why = f"has format version {version}, this version reads {INDEX_VERSION}"
            raise StageError(f"{path} {why}; measure again with another output.path")
        try:
            found: IndexInfo = adapter(IndexInfo).validate_python(content)
        except ValidationError as error:
            raise DamagedError(f"{path} is damaged: {first_problem(error)}; {REMEDY}") from error
        return found


LOCATOR_FIELDS: Final = [
    pa.field("kind", pa.string()),
    pa.field("container", pa.large_string()),
    pa.field("offset", pa.int64()),
    pa.field("size", pa.int64()),
    pa.field("column", pa.string()),
]
_MEDIA_FIELDS: Final = [*LOCATOR_FIELDS, pa.field("extension", pa.string())]
_KEPT_VALUE: Final = pa.struct({"number": pa.float64(), "text": pa.string()})
_PART_FIELDS: Final = [
    pa.field("key", pa.large_string()),
    pa.field("json", pa.struct(LOCATOR_FIELDS)),
    pa.field("media", pa.list_(pa.int32())),  # indices among the sample's media; -1: not shown
    pa.field("num_videos", pa.int32()),
    *(pa.field(name, pa.int32()) for name in ("begin", "first", "end")),
]
INDEX_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.large_string()),
        # xxh3_64 of "source_id/key", where a part of a conversation has its record's key
        pa.field("key_hash", pa.uint64()),
        # 0 where the key is an identity, see measure/identity.py
        pa.field("content_hash", pa.uint64()),
        # of all texts and media of the sample's record
        pa.field("sample_hash", pa.uint64()),
        pa.field("source_id", pa.int32()),
        pa.field("task", pa.string()),
        pa.field("num_tokens", pa.int32()),
        pa.field("num_loss_tokens", pa.int32()),
        pa.field("num_vision_patches", pa.int32()),
        pa.field("num_images", pa.int32()),
        pa.field("num_videos", pa.int32()),
        pa.field("num_turns", pa.int32()),
        # why the layout cannot hold the sample, and tokens that its reader adds: see Layout.unfit
        pa.field("unfit", pa.string()),
        pa.field("room", pa.int32()),
        pa.field("grid_thw", pa.list_(pa.int32())),  # (t, h, w) of each medium in turn
        pa.field("stamp", pa.uint64()),  # of the files' modification times, see measured.py
        pa.field("json", pa.struct(LOCATOR_FIELDS)),
        pa.field("media", pa.large_list(pa.struct(_MEDIA_FIELDS))),
        pa.field("media_hash", pa.large_list(pa.uint64())),  # of the bytes of each medium
        # of the beginning that a sample may share, see `prefix_row` in measured.py; 0: none
        pa.field("prefix_hash", pa.uint64()),
        pa.field("prefix_media", pa.uint64()),
        *(pa.field(f"prefix_{name}", pa.int32()) for name in ("tokens", "images", "videos")),
        pa.field("group_hash", pa.uint64()),  # of source.fields.group; 0: none
        # of source.keep, by field, see `kept_value`; null: nothing is kept
        pa.field("kept", pa.map_(pa.string(), _KEPT_VALUE)),
        # the record that this is a part of; json then has the size of the part's turns. null: the
        # sample is the whole record at json
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


def escape(text: str) -> str:
    """Write lone surrogates, as in names that are not UTF-8, as \\udcff, to be stored."""
    return text.encode("utf-8", "backslashreplace").decode()


def key_hash(source_id: int, key: str) -> int:
    """Hash the identity of a record, or of a sample, to 8 bytes."""
    return xxhash.xxh3_64_intdigest(f"{source_id}/{key}".encode())


@contextmanager
def table_writer(
    path: Path, schema: pa.Schema, notes: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Callable[[pa.Table], None]]:
    """Write a Parquet file table by table, which is absent if the block fails. `notes`, as they are
    at the end, go into the file's metadata."""
    with atomic_file(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        yield writer.write_table
        if notes:
            writer.add_key_value_metadata(dict(notes))


@contextmanager
def open_table(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file for reading, mapped into memory if it is local."""
    if is_remote(path):
        with path.open("rb") as file, pq.ParquetFile(file) as table:
            yield table
    else:
        with pq.ParquetFile(path, memory_map=True) as table:
            yield table


def part_name(number: int) -> str:
    """Return the file name of a part."""
    return f"part-{number:05d}.parquet"


def load_info(output: str) -> IndexInfo:
    """Load the receipt of an index that format index names. Raises StageError if there is none."""
    info = IndexInfo.load(path_of(output) / "_packing")
    if info is None:
        raise StageError(f"{output} has no complete index to read; run measure there first")
    return info


class Index:
    """Columns of a complete index."""

    def __init__(self, folder: Path, info: IndexInfo) -> None:
        self._folder = folder
        #: the file of each part
        self.paths = [folder / part_name(i) for i in range(len(info.part_rows))]
        self.info = info

    def table(self, *columns: str) -> pa.Table:
        """Return columns of all rows, all columns by default. Raises StageError as `part`."""
        none = INDEX_SCHEMA.empty_table().select(list(columns or INDEX_SCHEMA.names))
        return pa.concat_tables([none, *self.parts(*none.column_names)])

    def parts(self, *columns: str) -> Iterator[pa.Table]:
        """Yield columns of each part. Raises StageError as `part`."""
        return read_each(
            self._folder, lambda number: self.part(number, *columns), range(len(self.paths))
        )

    def part(self, number: int, *columns: str) -> pa.Table:
        """Return columns of one part; records of a repeated id have unique keys. Raises StageError
        if a file is missing, or has another number of rows than the receipt says."""
        path, rows = self.paths[number], self.info.part_rows[number]
        repeated = path.parent.with_name("repeated") / f"{path.stem}.npy"
        renames = not _KEYS.isdisjoint(columns) and self._hash_of(repeated) is not None
        wanted = [*dict.fromkeys((*columns, *_NEEDED))] if renames else list(columns)
        try:
            with open_table(self._at_hand(path)) as file:
                # Without threads: handing a part to them takes longer than reading it.
                table = file.read(wanted, use_threads=False)
            if renames:
                table = rename(table, np.load(self._at_hand(repeated)))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DamagedError(f"index part {path} cannot be read: {error}; {REMEDY}") from error
        if len(table) != rows:
            raise DamagedError(f"{path} has {len(table)} rows, {rows} were written; {REMEDY}")
        return table.select(list(columns))

    def _hash_of(self, path: Path) -> str | None:
        return self.info.files.get(f"_packing/{path.parent.name}/{path.name}")

    def _at_hand(self, path: Path) -> Path:
        """Return a file, or its local copy: stages read column after column."""
        expected = self._hash_of(path)
        return path if expected is None else kept_copy(path, expected)

    def array(self, column: str) -> npt.NDArray[Any]:
        """Return a numeric column as an array (num_samples,)."""
        name = str(INDEX_SCHEMA.field(column).type)  # also NumPy's
        values, end = np.empty(self.info.num_samples, np.dtype(name)), 0
        for part in self.parts(column):
            values[end : end + len(part)] = part[column].to_numpy()
            end += len(part)
        return values


def repeated_key(key: str, content_hash: int) -> str:
    """Return the key of a sample that shares its id: '33471@5d0c0a1be0a6a2f7'."""
    return f"{key}@{content_hash:016x}"


#: Columns that `rename` changes.
_KEYS: Final = frozenset(("key", "key_hash", "part"))
#: Columns that `rename` needs.
_NEEDED: Final = (*_KEYS, "content_hash", "source_id")


def rename(table: pa.Table, rows: npt.NDArray[np.int64]) -> pa.Table:
    """Add a hash of the content to the keys of some rows of a part, with the columns _NEEDED."""
    names = [name for name in INDEX_SCHEMA.names if name in _NEEDED]
    changed = table.select(names).take(rows).to_pylist()
    for row in changed:
        old = (row["part"] or row)["key"]
        new = repeated_key(old, row["content_hash"])
        row["key"] = new + row["key"].removeprefix(old)
        row["key_hash"] = key_hash(row["source_id"], new)
        if row["part"]:
            row["part"]["key"] = new
    places = np.arange(len(table))
    places[rows] = len(table) + np.arange(len(rows))
    for name in _KEYS:
        kind = INDEX_SCHEMA.field(name).type
        own = pa.array([row[name] for row in changed], kind)
        both = pa.concat_arrays([table[name].combine_chunks(), own])
        table = table.set_column(table.column_names.index(name), name, both.take(pa.array(places)))
    return table

"""Rows as records: Parquet files, and Hugging Face datasets saved to disk (Arrow files).

    id: string    image: binary | {bytes, path} | string    caption: string    (or video)
    id: string    images: list of the same                  messages: list of {role, content}

Columns have the names that the fields of a JSON record have, or are named by `source.fields`. An
image or video that is a path, and no bytes, is a file below `image_root` or beside the table.
A record's key is its id, or else `FILE:ROW`, rows counted from 0.
"""

import functools
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

import orjson
import pyarrow as pa
import xxhash

from offline_packing.errors import StageError
from offline_packing.sources.base import Source
from offline_packing.sources.options import FileOptions
from offline_packing.sources.protocol import MAX_JSON_BYTES, Embedded, Scan, SourcePart, record_key
from offline_packing.sources.protocol import SourceRecord as Record
from offline_packing.sources.reading import row_files
from offline_packing.sources.reading.locators import Locator
from offline_packing.sources.reading.row_files import RowFile
from offline_packing.sources.roots.contents import file_names, nothing_found
from task_encoders.samples import SampleError

_DICT_NAME: Final = "dataset_dict.json"
_STATE_NAME: Final = "state.json"
_DAMAGE: Final = (OSError, ValueError, pa.ArrowException)


class TableSource(Source):
    """A part is (container, row groups as a range, first row); of a damaged file, the reason."""

    Options = FileOptions
    #: kind of the locators
    KIND: ClassVar[str]

    @abstractmethod
    def _containers(self) -> list[tuple[str, int]]:
        """Files to be read, and their sizes, in order."""

    def scan(self, samples_per_part: int) -> Scan:
        digest = xxhash.xxh3_128()
        parts: list[SourcePart] = []
        for container, size in self._containers():
            digest.update(os.fsencode(container) + b"\0%d\n" % size)
            parts += self._scan_file(container, samples_per_part)
        return Scan(tuple(parts), digest.hexdigest())

    def _scan_file(self, container: str, samples_per_part: int) -> Iterator[SourcePart]:
        try:
            rows = self._open(container)
        except _DAMAGE as error:
            yield SourcePart((container, " ".join(str(error).split())[:200], 0), 1)
            return
        self._columns(rows.schema, container)
        first = 0
        for last in range(len(rows.group_rows)):
            held = rows.group_starts[last + 1] - rows.group_starts[first]
            following = rows.group_rows[last + 1] if last + 1 < len(rows.group_rows) else None
            if following is None or held + following > samples_per_part:
                items = (container, range(first, last + 1), rows.group_starts[first])
                yield SourcePart(items, held)
                first = last + 1

    def records(self, part: SourcePart) -> Iterator[Record]:
        container, groups, row = part.items
        if isinstance(groups, str):
            yield self._lost(container, container, 0, groups)
            return
        stem = container.rpartition(".")[0]
        end = row + (part.num_records or 0)
        try:
            rows = self._open(container)
            columns = self._columns(rows.schema, container)
            with_bytes = [field.name for field in rows.schema if row_files.holds_bytes(field.type)]
            media_columns = [
                name
                for name in columns
                if name in self.fields.media_columns() and name in with_bytes
            ]
            unread = tuple(name for name in with_bytes if name not in columns)
            for batch in rows.batches(groups, columns):
                column = row_files.record_column(batch.schema.names, media_columns)
                for values in _to_rows(batch):
                    at = Locator(self.KIND, container, row, 0, column)
                    record = self._record(f"{stem}:{row}", at, values, media_columns)
                    yield replace(record, unread=unread) if unread else record
                    row += 1
        except _DAMAGE as error:
            detail = " ".join(str(error).split())[:200]
            for lost in range(row, end):
                yield self._lost(container, f"{stem}:{lost}", lost, detail)

    def _open(self, container: str) -> RowFile:
        try:
            return RowFile.open(self.root, container, self.KIND)
        except SampleError as error:
            raise self.unreadable(container, error) from error

    def _lost(self, container: str, key: str, row: int, detail: str) -> Record:
        at = Locator(self.KIND, container, row, 0)
        return Record(key, at, SampleError("damaged_source", f"{container}: {detail}"))

    def _record(
        self,
        default_key: str,
        at: Locator,
        values: Mapping[str, Any] | SampleError,
        media_columns: Sequence[str],
    ) -> Record:
        if isinstance(values, SampleError):
            return Record(default_key, at, values)
        embedded: dict[str, Embedded] = {}
        key = default_key
        try:
            data, media = row_files.record_json(values, media_columns)
            at = replace(at, size=len(data))
            content = self.parse(data)
            own = record_key(content, "")
            key = own or default_key
        except SampleError as error:
            return Record(key, at, error)
        for name, image in media.items():
            embedded[name] = Embedded(replace(at, size=len(image), column=name), image)
        paired = () if self.task == "captioning" else None
        return Record(key, at, content, paired, embedded, own_id=own != "")

    def _columns(self, schema: pa.Schema, container: str) -> list[str]:
        """The columns that records are made of. Raises StageError where there are none."""
        wanted = self.fields.columns()
        columns = [name for name in schema.names if name in wanted]
        twice = [name for name in columns if columns.count(name) > 1]
        if twice:
            raise StageError(
                f"{self.root.path(container)} has {len(twice)} columns named {twice[0]!r}; write "
                "it again with a name for each"
            )
        named = self.fields.named_columns()
        absent = [f"{name}={at}" for name, at in named.items() if at not in columns]
        if absent or not set(columns) - {"id", self.fields.column("id")}:
            problem = f" (no {absent[0]})" if absent else ""
            example = "source.fields={images: jpg, caption: text}"
            raise StageError(
                f"{self.root.path(container)} has the columns {', '.join(schema.names)}; name "
                f"those to be used{problem}, for example {example}"
            )
        return columns


def _to_rows(batch: pa.RecordBatch) -> Sequence[Mapping[str, Any] | SampleError]:
    """Rows of a batch; one whose text is not UTF-8 as its error."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        return [_to_row(batch, i) for i in range(len(batch))]


def _to_row(batch: pa.RecordBatch, i: int) -> Mapping[str, Any] | SampleError:
    try:
        row: Mapping[str, Any] = batch.slice(i, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return SampleError("bad_json", str(error))
    return row


def _has_suffix(path: Path, suffix: str) -> bool:
    return any(name.lower().endswith(suffix) for name in file_names(path))


class ParquetSource(TableSource):
    """Parquet files: one, or all below a folder."""

    KIND = "parquet_row"

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        return {} if _has_suffix(path, ".parquet") else None

    def is_read(self, container: str) -> bool:
        return container.lower().endswith(".parquet")

    def _containers(self) -> list[tuple[str, int]]:
        found = sorted((name, size) for name, size, _ in self.entries())
        if not found:
            raise nothing_found(self.path, "*.parquet")
        return found


class HuggingFaceOptions(FileOptions):
    """Options of a dataset that may have splits."""

    #: which of them is read (default: train)
    split: str | None = None


class HuggingFaceSource(TableSource):
    """A folder that `datasets` wrote with save_to_disk. Of several splits `split` is read."""

    Options = HuggingFaceOptions
    options: HuggingFaceOptions
    KIND = "arrow_row"

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        return {} if _has_suffix(path, ".arrow") else None

    def is_read(self, container: str) -> bool:
        name = container.rpartition("/")[2].lower()
        if self._data_files is not None:
            return container in self._data_files
        # What `map` and `filter` leave behind holds samples a second time.
        is_cache = name.startswith("cache-")
        return container.startswith(self._split_folder) and name.endswith(".arrow") and not is_cache

    def _containers(self) -> list[tuple[str, int]]:
        found = sorted((name, size) for name, size, _ in self.entries())
        if not found:
            raise StageError(
                f"source path {self.path!r} holds no *.arrow; save the dataset with save_to_disk, "
                "or use format parquet"
            )
        missing = (self._data_files or frozenset()) - {name for name, _ in found}
        if missing and self.file_name is None:
            raise StageError(
                f"{self.root.path(min(missing))}, which {_STATE_NAME} names, does not exist; "
                "restore it or save the dataset again"
            )
        return found

    @functools.cached_property
    def _data_files(self) -> frozenset[str] | None:
        """The files of the dataset; None if nothing lists them."""
        container = f"{self._split_folder}{_STATE_NAME}"
        state = self._read_json(container)
        if state is None:
            return None
        try:
            names = [str(file["filename"]) for file in state["_data_files"]]
        except (LookupError, TypeError) as error:
            raise StageError(
                f"{self.root.path(container)} names no _data_files; save the dataset again"
            ) from error
        return frozenset(f"{self._split_folder}{name}" for name in names)

    @functools.cached_property
    def _split_folder(self) -> str:
        """Folder of the split's files; '' in a dataset without splits."""
        content = self._read_json(_DICT_NAME)
        if content is None:
            return ""
        try:
            splits = list(content["splits"])
        except (LookupError, TypeError) as error:
            raise StageError(f"{self.root.path(_DICT_NAME)} names no splits") from error
        split = self.options.split or "train"
        if split not in splits:
            raise StageError(
                f"{self.path} has the splits {', '.join(map(str, splits))}, not {split!r}; "
                "set source.split"
            )
        return f"{split}/"

    def _read_json(self, container: str) -> Any:
        """Content of a file that describes the dataset; None if there is none."""
        try:
            self.root.entry(container)
        except FileNotFoundError:
            return None
        try:
            return orjson.loads(self.root.read(container, MAX_JSON_BYTES))
        except (SampleError, ValueError) as error:
            raise StageError(f"{self.root.path(container)} cannot be read: {error}") from error

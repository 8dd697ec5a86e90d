"""Rows as records: Parquet files, and Hugging Face datasets saved to disk (Arrow files).

    id: string    image: binary | {bytes, path} | string    caption: string    (or video)
    id: string    images: list of the same                  messages: list of {role, content}

Columns have the names that the fields of a JSON record have, or are named by `source.fields`. An
image or video that is a path, and no bytes, is a file below `image_root` or next to the table.
A record's key is its id, or else `FILE:ROW`, rows counted from 0.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np
import orjson
import pyarrow as pa

from offline_packing.errors import StageError, as_sample_error
from offline_packing.sources.base import Embedded, Scan, Source, SourcePart, SourceRecord
from offline_packing.sources.options import KEPT, FileOptions, follow, kept_value
from offline_packing.sources.reading.locators import Locator
from offline_packing.sources.reading.rows import (
    RowFile,
    holds_bytes,
    holds_pictures,
    record_column,
    record_json,
    unread_type,
)
from offline_packing.sources.roots.listing import hash_files
from offline_packing.storage.memory import machine_memory
from offline_packing.storage.streams import DamagedStreamError
from task_encoders.records.forms import read_cells
from task_encoders.records.record import own_key
from task_encoders.samples import SampleError
from task_encoders.samples.limits import MAX_JSON_BYTES, MAX_ROW_BYTES
from task_encoders.storage.remote_requests import RemoteError

_STATE_NAME: Final = "state.json"


class TableSource(Source):
    """A part is (container, row groups as a range, first row); of a damaged file, no groups."""

    Options = FileOptions
    options: FileOptions
    #: kind of the locators
    KIND: ClassVar[str]

    def scan(self, samples_per_part: int) -> Scan:
        def cut(container: str) -> tuple[list[SourcePart], str]:
            parts, problem, first = list[SourcePart](), "", 0
            try:
                rows = RowFile(self.open_container(container), self.KIND)
            except Exception as error:  # noqa: BLE001 - of this file
                return [SourcePart((container, range(0), 0), 1)], _damage_of(error)
            try:
                self._columns(rows.schema)
            except Exception as error:  # noqa: BLE001 - of this file
                problem = _damage_of(error)
            starts = rows.group_starts
            for end in range(1, len(starts)):
                if end == len(starts) - 1 or starts[end + 1] - starts[first] > samples_per_part:
                    items = (container, range(first, end), starts[first])
                    parts.append(SourcePart(items, starts[end] - starts[first]))
                    first = end
            return parts, problem

        return Scan(self.cut_files(cut), hash_files(self.files()))

    def records(self, part: SourcePart) -> Iterator[SourceRecord]:
        container, groups, row = part.items
        stem = container.rpartition(".")[0]
        end = row + (part.num_records or 0)
        try:
            rows = RowFile(self.open_container(container), self.KIND)
            columns = self._columns(rows.schema)
            with_bytes = [field.name for field in rows.schema if holds_bytes(field.type)]
            media = self.fields.media_columns() & set(with_bytes)
            media_columns = [name for name in columns if name in media]
            media_left = tuple(name for name in with_bytes if name not in columns)
            others = (one for one in rows.schema if one.name not in {*columns, *media_left})
            unread = media_left, tuple(one.name for one in others if "string" in str(one.type))
            column = record_column(columns, media_columns)
            kept = self.fields.beside.get(KEPT, {})
            floats = {at: _float_type(rows.schema, steps) for at, steps in kept.items()}
            for values in self._values(rows, groups, columns, media_columns):
                at = Locator(self.KIND, container, row, 0, column)
                record = self._record(f"{stem}:{row}", at, values, media_columns, floats)
                record.unread = unread
                yield record
                row += 1
        except Exception as error:  # noqa: BLE001 - of this file
            why = _damage_of(error)
            for lost in range(row, end):
                key = f"{stem}:{lost}" if groups else container
                yield self.damaged(key, Locator(self.KIND, container, lost, 0), why)

    def _values(
        self, rows: RowFile, groups: range, columns: Sequence[str], media: Sequence[str]
    ) -> Iterator[Mapping[str, Any] | SampleError]:
        """Yield each row of some groups; for groups above the machine's memory, the error. Smaller
        groups are read a page at a time; a page that is larger than a task's share ends the
        file."""
        limit = machine_memory()
        for group in groups:
            if (size := rows.group_bytes[group]) > limit:
                problem = f"a row group of {size:,} bytes > {limit:,}, the machine's memory"
                error = SampleError("too_costly", f"{problem}; write smaller ones")
                yield from itertools.repeat(error, rows.group_rows[group])
                continue
            for batch in rows.batches(group, columns):
                yield from _to_rows(batch, media)

    def _record(
        self,
        key: str,
        at: Locator,
        values: Mapping[str, Any] | SampleError,
        columns: Sequence[str],
        floats: Mapping[str, Callable[[float], Any]],
    ) -> SourceRecord:
        """Return a row as a record, with media in some `columns`. `floats` are the types of floats
        that are kept, by their place: JSON lacks NaN, and has no float32."""
        try:
            if isinstance(values, SampleError):
                raise values
            data, media = record_json(values, columns)
            at = at._replace(size=len(data))
            content = self.parse(data)
            for place, as_type in floats.items():
                value = follow(values, self.fields.beside[KEPT][place])
                if isinstance(value, float):
                    content[KEPT][place] = kept_value(float(str(as_type(value))))
        except Exception as error:  # noqa: BLE001 - of this record
            return SourceRecord(key, at, as_sample_error(error))
        embedded = {
            name: Embedded(at._replace(size=len(image), column=name), image)
            for name, image in media.items()
        }
        own = own_key(content)
        paired = () if self.task == "captioning" else None
        return SourceRecord(own or key, at, content, paired, embedded, own_id=own != "")

    def parse(self, data: bytes, column: str = "") -> Mapping[str, Any]:
        return read_cells(super().parse(data, column))

    def _columns(self, schema: pa.Schema) -> list[str]:
        """Choose the columns that records are made of. Raises DamagedStreamError where there are
        none."""
        # Pictures are not text, whatever the name of their column ("input", "output") means.
        media = {*self.fields.named.values(), *self.fields.media_columns()}
        pictures = {one.name for one in schema if holds_pictures(one.type)} - media
        columns = self.fields.choose(schema.names, pictures)
        unread = next((schema.field(c) for c in columns if unread_type(schema.field(c).type)), None)
        if unread:
            problem = f"column {unread.name!r} has the type {unread.type}, which is not read"
            raise DamagedStreamError(f"its {problem}; cast it to a plain one, as list or binary")
        return columns


def _to_rows(
    batch: pa.RecordBatch, media: Sequence[str]
) -> Sequence[Mapping[str, Any] | SampleError]:
    """Convert a batch to rows; one that is too large, or whose text is not UTF-8, to its error."""
    num_bytes = batch.nbytes
    if num_bytes > MAX_JSON_BYTES and len(batch) == 1:  # as large rows are handed on
        text_bytes = batch.drop_columns(media).nbytes
        for what, value, limit in (
            ("text", text_bytes, MAX_JSON_BYTES),
            ("values", num_bytes, MAX_ROW_BYTES),
        ):
            if value > limit:
                return [
                    SampleError("too_costly", f"a row with {value:,} bytes of {what} > {limit:,}")
                ]
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        if len(batch) > 1:
            return [row for i in range(len(batch)) for row in _to_rows(batch.slice(i, 1), media)]
        return [SampleError("bad_json", str(error))]


def _float_type(schema: Any, steps: Sequence[str]) -> Callable[[float], Any]:
    """Return a type of floats that writes those at a place in their fewest digits."""
    kind = schema
    try:
        for step in steps:
            kind = kind.value_type if hasattr(kind, "value_type") else kind.field(step).type
    except (KeyError, AttributeError, TypeError):
        return float
    return {pa.float16(): np.float16, pa.float32(): np.float32}.get(kind, float)


def _damage_of(error: Exception) -> str:
    """Tell why a table cannot be read: damaged ones raise errors of any kind. Raises the error
    itself where it is not the file's."""
    if isinstance(error, DamagedStreamError):
        return str(error)
    if isinstance(error, ImportError | StageError | RemoteError):
        raise error
    text = " ".join(str(error).split())[:200]
    if isinstance(error, MemoryError):  # perhaps of a size that is damaged
        return (
            f"a part of it takes more memory than a task may ({text or 'MemoryError'}); restore "
            "it, write it with smaller pages or batches, or set engine.workers lower"
        )
    return f"it cannot be read: {text}; restore it or write it again"


class ParquetSource(TableSource):
    """Parquet files: one, or all below a folder."""

    KIND = "parquet_row"
    ENDINGS = (".parquet",)


class HuggingFaceOptions(FileOptions):
    """Options of a dataset that may have splits."""

    #: which of them is read (default: train)
    split: str | None = None


class HuggingFaceSource(TableSource):
    """A folder that `datasets` wrote with save_to_disk. Of several splits `split` is read."""

    Options = HuggingFaceOptions
    options: HuggingFaceOptions
    KIND = "arrow_row"
    ENDINGS = (".arrow",)

    def is_read(self, container: str) -> bool:
        if self._data_files is not None:
            return container in self._data_files
        # Files that `map` and `filter` leave, cache-*, hold samples a second time.
        is_cache = container.rpartition("/")[2].lower().startswith("cache-")
        in_split = container.startswith(self._split_folder)
        return in_split and super().is_read(container) and not is_cache

    def scan(self, samples_per_part: int) -> Scan:
        scan = super().scan(samples_per_part)
        try:
            info = self._read_json(f"{self._split_folder}dataset_info.json")
            state = self._read_json(f"{self._split_folder}{_STATE_NAME}")
            name = state["_split"] or self._split_folder.rstrip("/")
            expected = int(info["splits"][name]["num_examples"])
        except (LookupError, TypeError, ValueError, StageError):
            return scan  # not all writers count
        found = sum(part.num_records or 0 for part in scan.parts)
        if found == expected or self.file_name is not None:
            return scan
        line = (
            f"{self.root.path(self._split_folder)} holds {found:,} rows, its dataset_info.json "
            f"counts {expected:,}: it was filtered or split, or rows are lost"
        )
        return replace(scan, warnings=(line,))

    def files(self) -> list[tuple[str, int]]:
        found = super().files()
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
        names = self._read_names(f"{self._split_folder}{_STATE_NAME}", "_data_files")
        return None if names is None else frozenset(f"{self._split_folder}{n}" for n in names)

    @functools.cached_property
    def _split_folder(self) -> str:
        """Folder of the split's files; '' in a dataset without splits."""
        splits = self._read_names("dataset_dict.json", "splits")
        if splits is None:
            return ""
        split = self.options.split or "train"
        if split not in splits:
            raise StageError(
                f"{self.path} has the splits {', '.join(splits)}, not {split!r}; set source.split"
            )
        return f"{split}/"

    def _read_names(self, container: str, field: str) -> list[str] | None:
        """Read a list in a file that describes the dataset; None if there is no such file."""
        content = self._read_json(container)
        if content is None:
            return None
        try:
            found = content[field]
            return [str(one["filename"] if isinstance(one, dict) else one) for one in found]
        except (LookupError, TypeError) as error:
            path = self.root.path(container)
            raise StageError(f"{path} names no {field}; save the dataset again") from error

    def _read_json(self, container: str) -> Any:
        """Read a file that describes the dataset; None if there is no such file."""
        try:
            self.root.entry(container)
        except FileNotFoundError:
            return None
        try:
            return orjson.loads(self.root.read(container))
        except (SampleError, ValueError) as error:
            raise StageError(
                f"{self.root.path(container)} cannot be read: {error}; save the dataset again"
            ) from error

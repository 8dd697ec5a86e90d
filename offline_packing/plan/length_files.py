"""Files with the names and lengths of samples, read part by part.

    name<TAB>tokens, name:tokens     text, a sample a line, perhaps below a heading
    CSV, Parquet                     columns `key` and `num_tokens`, or one of their other names

Numbers are held, names are not: 12 bytes a sample beside those of further columns. Names are read
again where they are needed.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import xxhash

from offline_packing.errors import StageError
from offline_packing.index.rows import SampleIds, TablePart, take_rows

#: Accepted names of the two columns.
_NAMES: Final = {
    "key": ("key", "name", "id", "__key__", "sample"),
    "num_tokens": ("num_tokens", "tokens", "token_len", "length", "lengths", "len"),
}
COUNTS: Final = ("num_images", "num_videos", "num_vision_patches")
#: The last separator counts: names may hold colons.
_LINE: Final = r"^(?P<key>.+)[\t:]\s*(?P<num_tokens>\d+)\s*$"
_BLOCK_BYTES: Final = 4 << 20
_ROWS_AT_ONCE: Final = 1 << 18

#: The rows of a table of names and lengths.
SCHEMA: Final = pa.schema([("key", pa.large_string()), ("num_tokens", pa.int32())])


@dataclass(frozen=True)
class Lengths:
    """The samples of a file."""

    path: Path
    #: (num_samples,) num_tokens and further columns by name, int32; sources are numbered
    columns: Mapping[str, npt.NDArray[np.int32]]
    #: (num_samples,) of the names
    key_hashes: npt.NDArray[np.uint64]
    part_rows: list[int]

    def __len__(self) -> int:
        return len(self.key_hashes)

    def parts(self) -> Iterator[TablePart]:
        """The rows of SCHEMA, read again. Raises StageError if there are other ones now."""
        found = (table.select(SCHEMA.names) for table in _tables(self.path))
        for rows in self.part_rows:
            table = next(found, SCHEMA.empty_table())
            if len(table) != rows:
                raise StageError(f"lengths {self.path} changed while it was read; run again")
            yield rows, lambda table=table: table  # type: ignore[misc]

    def name(self, rows: SampleIds) -> pa.Table:
        """source_id and key of some rows, in the given order; one source holds them all."""
        named = next(take_rows(self.parts(), SCHEMA.empty_table(), [rows], Path()))
        none = pa.repeat(pa.scalar(0, pa.int32()), len(named))
        return pa.table({"key": named["key"], "source_id": none})


def read_lengths(path: Path) -> Lengths:
    """The samples of a file. Raises StageError if it cannot be read, lacks columns, or a length is
    not a whole number from 0."""
    columns: dict[str, list[npt.NDArray[Any]]] = {}
    hashes: list[npt.NDArray[np.uint64]] = []
    sources: dict[str | None, int] = {}
    for table in _tables(path):
        hashes.append(_hash(table["key"]))
        for name in table.column_names[1:]:
            values = table[name].combine_chunks()
            if name == "source":
                own = values.dictionary_encode(null_encoding="encode")
                names = own.dictionary.to_pylist()
                numbers = [sources.setdefault(one, len(sources)) for one in names]
                values = np.array(numbers, np.int32)[own.indices.to_numpy()]
            columns.setdefault(name, []).append(np.asarray(values))
    if not hashes:
        raise StageError(f"lengths {path}: nothing to pack, it holds no sample")
    part_rows = [len(some) for some in hashes]
    # Column by column, so that only one is in memory twice.
    joined = {name: np.concatenate(columns.pop(name)) for name in tuple(columns)}
    return Lengths(path, joined, np.concatenate(hashes), part_rows)


def _hash(keys: pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    found = map(xxhash.xxh3_64_intdigest, keys.cast(pa.large_binary()).to_pylist())
    return np.fromiter(found, np.uint64, len(keys))


def _tables(path: Path) -> Iterator[pa.Table]:
    """The samples, some megabytes at a time: key, num_tokens, and the further columns that a plan
    can depend on."""
    try:
        for rows in _batches(path):
            if len(table := _checked(path, rows)):
                yield table
    except (OSError, pa.ArrowException) as error:
        raise StageError(f"lengths {path} cannot be read: {error}") from error


def _batches(path: Path) -> Iterator[pa.Table]:
    """The rows as they are, some megabytes at a time."""
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            wanted = [*_NAMES["key"], *_NAMES["num_tokens"], *COUNTS, "source"]
            names = [name for name in file.schema_arrow.names if name in wanted]
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=names or None):
                yield pa.Table.from_batches([batch])
        return
    block = pa.csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False)
    if path.suffix == ".csv":
        as_text = dict.fromkeys((*_NAMES["key"], "source"), pa.string())  # "007" is not 7
        convert = pa.csv.ConvertOptions(column_types=as_text)
        with pa.csv.open_csv(path, block, convert_options=convert) as reader:
            for batch in reader:
                yield pa.Table.from_batches([batch])
        return
    block.column_names = ["line"]
    one_column = pa.csv.ParseOptions(delimiter="\x01", quote_char=False)
    as_lines = pa.csv.ConvertOptions(column_types={"line": pa.string()})
    with pa.csv.open_csv(path, block, one_column, as_lines) as reader:
        for number, batch in enumerate(reader):
            yield _split_lines(path, batch.column("line"), is_first=number == 0)


def _split_lines(path: Path, lines: pa.Array, *, is_first: bool) -> pa.Table:
    """A sample a line; the file's first line may be a heading, which has no number."""
    found = pc.extract_regex(lines, _LINE)
    bad = np.flatnonzero(found.is_null().to_numpy(zero_copy_only=False))
    if len(bad) and (not is_first or bad[-1] > 0 or re.search(r"\d", lines[0].as_py())):
        raise StageError(
            f"lengths {path}: {lines[bad[-1]].as_py()[:80]!r} is not name<TAB>tokens nor "
            "name:tokens; a table with a heading is to be called .csv or .parquet"
        )
    return pa.Table.from_struct_array(found.drop_null())


def _checked(path: Path, table: pa.Table) -> pa.Table:
    """The columns that count, by the names and types that they have in an index."""
    columns = {}
    for name, others in _NAMES.items():
        found = next((one for one in others if one in table.column_names), None)
        if found is None:
            raise StageError(
                f"lengths {path} has the columns {', '.join(table.column_names)}; name one of them "
                f"{name} (or {', '.join(others[1:])})"
            )
        columns[name] = table[found]
    columns["key"] = columns["key"].cast(pa.large_string())
    has_key = pc.greater(pc.utf8_length(columns["key"]), 0)
    if not pc.all(pc.fill_null(has_key, False), min_count=0).as_py():
        raise StageError(f"lengths {path}: a sample has no key; give each one its own")
    columns["num_tokens"] = _checked_lengths(path, columns)
    for name in set(COUNTS) & set(table.column_names):
        if table[name].null_count:
            raise StageError(f"lengths {path}: {name} is empty; write 0 where there are none")
        columns[name] = table[name].cast(pa.int32())
    if "source" in table.column_names:
        columns["source"] = table["source"].cast(pa.large_string())
    return pa.table(dict(sorted(columns.items())))


def _checked_lengths(path: Path, columns: dict[str, pa.ChunkedArray]) -> pa.ChunkedArray:
    try:
        lengths = columns["num_tokens"].cast(pa.int32())
    except pa.ArrowInvalid as error:
        raise StageError(f"lengths {path}: {error}; num_tokens are whole numbers") from error
    wrong = pc.fill_null(pc.less(lengths, 0), True)
    if pc.any(wrong).as_py():
        row = pc.index(wrong, True).as_py()
        key = columns["key"][row].as_py()
        raise StageError(f"lengths {path}: sample {key!r} has {lengths[row].as_py()} tokens")
    return lengths

"""Lengths measured elsewhere as an index, and the assignment of a plan as a table: the planner for
other pipelines.

    name<TAB>tokens, name:tokens     text, a sample a line, perhaps below a heading
    CSV, Parquet                     columns `key` and `num_tokens`, or one of their other names

Further columns of a table are read under the names that they have in an index: `num_images`,
`num_videos` and `num_vision_patches` for budgets and cost; `source`, where the configuration has
several, for their repeats and weights: their names.
"""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from offline_packing.config.packing import PackingConfig
from offline_packing.errors import StageError
from offline_packing.index.rows import name_copies
from offline_packing.index.table import (
    INDEX_SCHEMA,
    Index,
    IndexInfo,
    key_hash,
    part_name,
    table_writer,
)
from offline_packing.plan.make_plan import make_plan
from offline_packing.plan.plan import summary_text
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.run import Run
from offline_packing.storage.files import atomic_file

#: What the two columns may be called.
_NAMES: Final = {
    "key": ("key", "name", "id", "__key__", "sample"),
    "num_tokens": ("num_tokens", "tokens", "token_len", "length", "lengths", "len"),
}
#: The last separator counts: names may hold colons.
_LINE: Final = r"^(?P<key>.+)[\t:]\s*(?P<num_tokens>\d+)\s*$"
_ROWS_AT_ONCE: Final = 1 << 16
_NO_MEDIUM: Final = {"kind": "", "container": "", "offset": 0, "size": 0, "column": ""}


def plan_lengths(run: Run, lengths: Path, output: Path | None) -> str:
    """Plan samples of which only names and lengths are known; returns the summary. `output` is
    where the assignment is written. Raises StageError as `make_plan`, or if the file cannot be
    read, has no such columns, or a length is no whole number from 0."""
    with _index_of_lengths(run.config, lengths) as samples:
        planned = make_plan(run, samples)
        if output is not None:
            write_assignment(samples, planned.packs, output)
        return summary_text(run, samples, planned.packs, planned.set_aside.reasons)


def write_assignment(samples: Index, plan: PackPlan, path: Path) -> None:
    """A Parquet file of a row per use of a sample, in the order of the packs: key, source_id, pack,
    position in the pack, num_tokens. Rows at the end, without a pack, are what was set aside."""
    aside = np.setdiff1d(np.arange(samples.info.num_samples), plan.sample_ids)
    rows = samples.table("key", "source_id", "num_tokens").combine_chunks()
    rows = rows.take(pa.array(np.concatenate([plan.sample_ids, aside])))
    copies = plan.copy_numbers()
    if copies is not None:
        rows = name_copies(rows, np.concatenate([copies, np.zeros(len(aside), copies.dtype)]))
    sizes = np.diff(plan.pack_offsets)
    starts = np.repeat(plan.pack_offsets[:-1], sizes)
    none = pa.nulls(len(aside), pa.int64())
    packs = [pa.array(np.repeat(np.arange(plan.num_packs), sizes)), none]
    positions = [pa.array(np.arange(len(starts)) - starts), none]
    rows = rows.add_column(2, "pack", pa.chunked_array(packs))
    rows = rows.add_column(3, "position", pa.chunked_array(positions))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        pq.write_table(rows, file, compression="zstd")


@contextmanager
def _index_of_lengths(config: PackingConfig, path: Path) -> Iterator[Index]:
    """An index of lengths, in a folder that vanishes with the block."""
    table = _with_sources(config, path, _read(path))
    _check_counts(config, path, table)
    with tempfile.TemporaryDirectory(prefix="offline-packing-") as name:
        part_rows = []
        for number, batch in enumerate(table.to_batches(_ROWS_AT_ONCE)):
            part_rows.append(len(batch))
            with table_writer(Path(name, part_name(number)), INDEX_SCHEMA) as write:
                write(_as_part(config, pa.Table.from_batches([batch])))
        yield Index(Path(name), IndexInfo({}, {}, part_rows, {}))


def _read(path: Path) -> pa.Table:
    """Columns key and num_tokens, and others."""
    try:
        if path.suffix == ".parquet":
            table = pq.read_table(path)
        elif path.suffix == ".csv":
            as_text = dict.fromkeys((*_NAMES["key"], "source"), pa.string())  # "007" is no 7
            convert = pa.csv.ConvertOptions(column_types=as_text)
            table = pa.csv.read_csv(path, convert_options=convert)
        else:
            table = _read_lines(path)
    except (OSError, pa.ArrowException) as error:
        raise StageError(f"lengths {path} cannot be read: {error}") from error
    for name, others in _NAMES.items():
        found = next((one for one in others if one in table.column_names), None)
        if found is None:
            raise StageError(
                f"lengths {path} has the columns {', '.join(table.column_names)}; name one of them "
                f"{name} (or {', '.join(others[1:])})"
            )
        table = table.rename_columns({found: name})
    has_key = pc.greater(pc.utf8_length(table["key"].cast(pa.large_string())), 0)
    if not pc.all(pc.fill_null(has_key, False)).as_py():
        raise StageError(f"lengths {path}: a sample has no key; give each one its own")
    return table.set_column(
        table.column_names.index("num_tokens"), "num_tokens", _checked_lengths(path, table)
    )


def _read_lines(path: Path) -> pa.Table:
    """A sample a line; the first line may be a heading, which has no number."""
    one_column = pa.csv.ParseOptions(delimiter="\x01", quote_char=False)
    names = pa.csv.ReadOptions(column_names=["line"])
    as_text = pa.csv.ConvertOptions(column_types={"line": pa.string()})
    lines = pa.csv.read_csv(path, names, one_column, as_text)["line"].combine_chunks()
    found = pc.extract_regex(lines, _LINE)
    bad = np.flatnonzero(found.is_null().to_numpy(zero_copy_only=False))
    if len(bad) and (bad[-1] > 0 or re.search(r"\d", lines[0].as_py())):
        raise StageError(
            f"lengths {path}: {lines[bad[-1]].as_py()[:80]!r} is not name<TAB>tokens nor "
            "name:tokens; a table with a heading is to be called .csv or .parquet"
        )
    return pa.Table.from_struct_array(found.drop_null())


def _checked_lengths(path: Path, table: pa.Table) -> pa.ChunkedArray:
    try:
        lengths = table["num_tokens"].cast(pa.int32())
    except pa.ArrowInvalid as error:
        raise StageError(f"lengths {path}: {error}; num_tokens are whole numbers") from error
    wrong = pc.fill_null(pc.less(lengths, 0), True)
    if pc.any(wrong).as_py():
        row = table.filter(wrong).slice(0, 1).to_pylist()[0]
        raise StageError(f"lengths {path}: sample {row['key']!r} has {row['num_tokens']} tokens")
    return lengths


def _with_sources(config: PackingConfig, path: Path, table: pa.Table) -> pa.Table:
    """The table with `source_id`, by the names in its column `source`, where it has one."""
    names, is_known = config.source_names(), "source" in table.column_names
    is_mixed = "mix" in config.pack.assignment
    if (
        len(names) > 1
        and not is_known
        and (is_mixed or any(s.weight or s.repeat != 1 for s in config.source))
    ):
        raise StageError(
            f"lengths {path}: no column source says whose repeat or weight a sample has; add it, "
            f"with {', '.join(names)}"
        )
    if len(names) == 1 or not is_known:
        ids = pa.repeat(pa.scalar(0, pa.int32()), len(table))
    else:
        ids = pc.index_in(table["source"], pa.array(names))
        if ids.null_count:
            other = table["source"].filter(pc.is_null(ids))[0].as_py()
            raise StageError(
                f"lengths {path}: source {other!r} is none of the configuration's: "
                f"{', '.join(names)}"
            )
    return table.append_column("source_id", ids)


def _check_counts(config: PackingConfig, path: Path, table: pa.Table) -> None:
    """Raise StageError if packs depend on something that is not known of every sample."""
    pack, media = config.pack, ["num_images", "num_videos"]
    found = [name for name in (*media, "num_vision_patches") if name in table.column_names]
    needed = [f"num_{name}" for name in pack.budgets]
    needed += ["num_vision_patches"] if "balance" in pack.assignment else []
    needed += ["num_images"] if pack.homogeneous and not {*media} & {*found} else []
    missing = next((name for name in needed if name not in found), None)
    if missing is not None:
        raise StageError(
            f"lengths {path}: pack.budgets, pack.homogeneous or pack.assignment needs a column "
            f"{missing}; add it"
        )
    for name in found:
        if table[name].null_count:
            raise StageError(f"lengths {path}: {name} is empty; write 0 where there are none")


def _as_part(config: PackingConfig, rows: pa.Table) -> pa.Table:
    """Rows of an index: what is not known of them is 0 or empty."""
    keys = rows["key"].cast(pa.large_string()).to_pylist()
    ids = rows["source_id"].to_pylist()
    own = rows.set_column(rows.column_names.index("key"), "key", pa.array(keys, pa.large_string()))
    hashes = np.fromiter(map(key_hash, ids, keys), np.uint64, len(keys))
    known: dict[str, Any] = dict(zip(own.column_names, own, strict=True))
    known["key_hash"] = pa.array(hashes)
    unknown = {"task": config.task, "grid_thw": [], "json": _NO_MEDIUM, "media": []}
    columns = [
        known[field.name].cast(field.type)
        if field.name in known
        else pa.repeat(pa.scalar(unknown.get(field.name, 0), field.type), len(rows))
        for field in INDEX_SCHEMA
    ]
    return pa.table(columns, INDEX_SCHEMA)

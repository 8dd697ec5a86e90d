"""The planner for other pipelines: a table of names and lengths in, a table of places in packs out.

    name<TAB>tokens, name:tokens     text, a sample a line, perhaps below a heading
    CSV, Parquet                     columns `key` and `num_tokens`, or one of their other names

Further columns are read under the names that they have in an index: `num_images`, `num_videos` and
`num_vision_patches`.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from offline_packing.config.sections import PackConfig, ReportConfig
from offline_packing.errors import StageError
from offline_packing.index.rows import name_copies
from offline_packing.index.table import table_writer
from offline_packing.plan.plan import (
    join_plans,
    pack_arguments,
    plan_epochs,
    set_aside_reason,
)
from offline_packing.plan.summary import render_summary
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.figures import plan_figures, sample_figures
from offline_packing.runs.run import listed
from offline_packing.storage.yaml_file import explain_value_error, read_config
from task_encoders.field_types import BudgetName

#: Accepted names of the two columns.
_NAMES: Final = {
    "key": ("key", "name", "id", "__key__", "sample"),
    "num_tokens": ("num_tokens", "tokens", "token_len", "length", "lengths", "len"),
}
_COUNTS: Final = tuple(f"num_{name}" for name in get_args(BudgetName))
#: The last separator counts: names may hold colons.
_LINE: Final = r"^(?P<key>.+)[\t:]\s*(?P<num_tokens>\d+)\s*$"


class LengthsConfig(BaseModel):
    """A configuration with `pack` and `report`; other sections are ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pack: PackConfig = PackConfig()
    report: ReportConfig = ReportConfig()
    source: Any = None
    model: Any = None
    output: Any = None
    engine: Any = None


def plan_lengths(
    config: str | Path, overrides: tuple[str, ...], lengths: Path, output: Path | None
) -> str:
    """Plan the samples in a file of lengths; returns the summary. `output` is where the assignment
    is written, if anywhere. Raises ConfigError for a bad configuration, and StageError if the file
    cannot be read, lacks columns, or a length is not a whole number from 0."""
    settings = read_config(LengthsConfig, config, overrides)
    pack = settings.pack
    for name in ("share_prefixes", "mixture", "where"):
        if getattr(pack, name) is not None:
            raise StageError(
                f"pack.{name} needs samples that were measured, not only lengths; leave it out"
            )
    try:
        samples = _read_lengths(lengths)
    except (OSError, pa.ArrowException) as error:
        raise StageError(f"lengths {lengths} cannot be read: {error}") from error
    rows = pa.table({"key": samples["key"], "row": np.arange(len(samples))})
    firsts = rows.group_by("key").aggregate([("row", "min")])["row_min"].to_numpy()
    kept = np.sort(firsts)

    def column(name: str) -> npt.NDArray[Any]:
        media = {"num_images", "num_videos"}
        if name not in samples.column_names:
            # A table without videos need not say so, unless their number is limited.
            is_other = name in media and media & {*samples.column_names}
            if is_other and name.removeprefix("num_") not in pack.budgets:
                return np.zeros(len(kept), np.int32)
            raise StageError(
                f"lengths {lengths}: pack.budgets, pack.homogeneous or pack.assignment needs a "
                f"column {name}; add it"
            )
        values: npt.NDArray[Any] = samples[name].to_numpy()[kept]
        return values

    try:
        arguments = pack_arguments(pack, column, kept)
        plans = plan_epochs(pack.epochs, column("num_tokens"), **arguments)
    except (TypeError, ValueError) as error:
        raise StageError(f"plan: {explain_value_error(error)}") from error
    plan = (plans[0] if pack.epochs == 1 else join_plans({"": plans})).of(kept)
    num_twice = len(samples) - len(firsts)
    reasons = Counter({"duplicate_key": num_twice} if num_twice else {})
    for kind, first, count in zip(
        *np.unique(plan.set_aside_reasons, return_index=True, return_counts=True), strict=True
    ):
        sample = samples.slice(int(plan.set_aside_ids[first]), 1).to_pylist()[0]
        name = plan.info.reason_names[kind]
        reason, detail = set_aside_reason(name, sample["num_tokens"], pack)
        reasons[reason] += int(count)
        if reason == "overlong" and pack.on_overlong != "set_aside":  # no turns are known
            raise StageError(
                f"sample {sample['key']!r} has {detail}; raise it, or set on_overlong=set_aside"
            )
    if plan.num_packs == 0:
        raise StageError(f"nothing to pack in {lengths}: {listed(reasons.items())}")
    if output is not None:
        write_assignment(samples.select(["key", "num_tokens"]), plan, output)
    packed = samples["num_tokens"].to_numpy()[plan.sample_ids]
    found = sample_figures(len(samples), reasons) | plan_figures(settings.report, packed, plan)
    return render_summary(found)


def write_assignment(samples: pa.Table, plan: PackPlan, path: Path) -> None:
    """A Parquet file with a row per use of a sample, in the order of the packs: the columns of
    `samples`, among them key and at the end num_tokens, and before the last pack and position in
    the pack. Rows at the end, without a pack, are samples set aside."""
    samples = samples.combine_chunks()
    is_aside = np.ones(len(samples), bool)
    is_aside[plan.sample_ids] = False
    aside = np.flatnonzero(is_aside)
    sizes = np.diff(plan.pack_offsets)
    places = {
        "pack": np.repeat(np.arange(plan.num_packs), sizes),
        "position": np.arange(len(plan.sample_ids)) - np.repeat(plan.pack_offsets[:-1], sizes),
    }
    rows = samples.take(pa.array(np.concatenate([plan.sample_ids, aside])))
    if (copies := plan.copy_numbers()) is not None:
        rows = name_copies(rows, np.append(copies, np.zeros(len(aside), copies.dtype)))
    none = pa.nulls(len(aside), pa.int64())
    for name, values in places.items():
        column = pa.chunked_array([pa.array(values, pa.int64()), none])
        rows = rows.add_column(len(rows.column_names) - 1, name, column)
    path.parent.mkdir(parents=True, exist_ok=True)
    with table_writer(path, rows.schema) as write:
        write(rows)


def _read_lengths(path: Path) -> pa.Table:
    """The samples of a file: key, num_tokens, and the further columns that a plan can depend on, by
    the names and types that they have in an index. Raises StageError if it lacks columns, or a
    length is not a whole number from 0."""
    table, columns = _rows(path), {}
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
    try:
        lengths = columns["num_tokens"].cast(pa.int32())
    except pa.ArrowInvalid as error:
        raise StageError(f"lengths {path}: {error}; num_tokens are whole numbers") from error
    wrong = pc.fill_null(pc.less(lengths, 0), True)
    if pc.any(wrong).as_py():
        row = pc.index(wrong, True).as_py()
        key = columns["key"][row].as_py()
        raise StageError(f"lengths {path}: sample {key!r} has {lengths[row].as_py()} tokens")
    columns["num_tokens"] = lengths
    for name in _COUNTS:
        if name in table.column_names:
            if table[name].null_count:
                raise StageError(f"lengths {path}: {name} is empty; write 0 where there are none")
            columns[name] = table[name].cast(pa.int32())
    return pa.table(columns)


def _rows(path: Path) -> pa.Table:
    """The rows as they are."""
    if path.suffix == ".parquet":
        wanted = [*_NAMES["key"], *_NAMES["num_tokens"], *_COUNTS]
        names = [name for name in pq.read_schema(path).names if name in wanted]
        return pq.read_table(path, columns=names or None)
    if path.suffix == ".csv":
        as_text = dict.fromkeys(_NAMES["key"], pa.string())  # "007" is not 7
        convert = pa.csv.ConvertOptions(column_types=as_text)
        return pa.csv.read_csv(path, convert_options=convert)
    # A sample a line; the file's first line may be a heading, which has no number.
    lines = pa.csv.read_csv(
        path,
        pa.csv.ReadOptions(column_names=["line"]),
        pa.csv.ParseOptions(delimiter="\x01", quote_char=False),
        pa.csv.ConvertOptions(column_types={"line": pa.string()}),
    )["line"].combine_chunks()
    found = pc.extract_regex(lines, _LINE)
    bad = np.flatnonzero(found.is_null().to_numpy(zero_copy_only=False))
    if len(bad) and (bad[-1] > 0 or re.search(r"\d", lines[0].as_py())):
        raise StageError(
            f"lengths {path}: {lines[bad[-1]].as_py()[:80]!r} is not name<TAB>tokens nor "
            "name:tokens; a table with a heading is to be called .csv or .parquet"
        )
    return pa.Table.from_struct_array(found.drop_null())

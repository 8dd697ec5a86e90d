"""The planner for other pipelines: samples of which only names and lengths are known.

Further columns of a table are read under the names that they have in an index: `num_images`,
`num_videos` and `num_vision_patches` for budgets. A sample takes less than 64 bytes of memory,
whatever its name: see length_files.py.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from offline_packing.config.sections import PackConfig, ReportConfig
from offline_packing.errors import StageError
from offline_packing.index.rows import SampleIds, TablePart, name_copies, take_rows
from offline_packing.index.set_aside import find_duplicates
from offline_packing.index.table import INDEX_SCHEMA, Index, table_writer
from offline_packing.plan.length_files import SCHEMA, Lengths, read_lengths
from offline_packing.plan.make_plan import (
    join_plans,
    pack_arguments,
    plan_epochs,
    set_aside_reason,
)
from offline_packing.plan.summary import render_figures
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.run import listed
from offline_packing.storage.yaml_file import explain_value_error, read_config

_ROWS_AT_ONCE: Final = 1 << 18


class LengthsConfig(BaseModel):
    """A configuration of which `pack` and `report` are read; a whole one will do."""

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
    samples = read_lengths(lengths)
    _check_columns(pack, samples)
    twice = find_duplicates(samples.key_hashes, samples.name)
    num_tokens = samples.columns["num_tokens"]
    plan = _plan(pack, samples, twice)
    reasons = Counter({"duplicate_key": len(twice)} if len(twice) else {})
    for kind, first, count in zip(
        *np.unique(plan.set_aside_reasons, return_index=True, return_counts=True), strict=True
    ):
        sample = int(plan.set_aside_ids[first])
        name = plan.info.reason_names[kind]
        reason, detail = set_aside_reason(name, int(num_tokens[sample]), pack)
        reasons[reason] += int(count)
        if reason == "overlong" and pack.on_overlong != "set_aside":  # no turns are known
            key = samples.name(np.array([sample]))["key"][0].as_py()
            raise StageError(f"sample {key!r} has {detail}; raise it, or set on_overlong=set_aside")
    if plan.num_packs == 0:
        raise StageError(f"nothing to pack in {lengths}: {listed(reasons.items())}")
    if output is not None:
        _write_assignment(samples.parts, len(samples), SCHEMA, plan, output)
    packed = num_tokens[plan.sample_ids]
    return render_figures(settings.report, len(samples), packed, plan, reasons)


def _plan(pack: PackConfig, samples: Lengths, left_out: SampleIds) -> PackPlan:
    """The plan of all rows but some, epoch after epoch; its ids are rows of the file."""
    kept = np.arange(len(samples), dtype=np.int32)
    if len(left_out):
        kept = np.delete(kept, left_out)

    def column(name: str) -> npt.NDArray[Any]:
        values = samples.columns.get(name)
        if values is None:
            return np.zeros(len(kept), np.int32)
        return values[kept] if len(left_out) else values

    try:
        arguments = pack_arguments(pack, column, kept)
        plans = plan_epochs(pack.epochs, column("num_tokens"), **arguments)
    except (TypeError, ValueError) as error:
        raise StageError(f"plan: {explain_value_error(error)}") from error
    plan = plans[0] if pack.epochs == 1 else join_plans({"": plans})
    if not len(left_out):
        return plan
    return replace(plan, sample_ids=kept[plan.sample_ids], set_aside_ids=kept[plan.set_aside_ids])


def write_assignment(samples: Index, plan: PackPlan, path: Path) -> None:
    """A Parquet file with a row per use of a sample, in the order of the packs: key, source_id,
    pack, position in the pack, cp_size (the pack's ranks) if packs differ in that, num_tokens. Rows
    at the end, without a pack, are what was set aside."""
    schema = pa.schema([INDEX_SCHEMA.field(name) for name in ("key", "source_id", "num_tokens")])

    def parts() -> Iterable[TablePart]:
        for number, rows in enumerate(samples.info.part_rows):
            yield rows, partial(samples.part, number, *schema.names)

    _write_assignment(parts, samples.info.num_samples, schema, plan, path)


def _write_assignment(
    parts: Callable[[], Iterable[TablePart]],
    num_samples: int,
    columns: pa.Schema,
    plan: PackPlan,
    path: Path,
) -> None:
    """`parts` reads the samples' `columns`, the last of which is num_tokens."""
    places = ["pack", "position", *([] if plan.cp_sizes is None else ["cp_size"])]
    ids = [pa.field(name, pa.int64()) for name in places]
    schema = pa.schema([*list(columns)[:-1], *ids, columns.field("num_tokens")])
    copies = plan.copy_numbers()
    is_aside = np.ones(num_samples, bool)
    is_aside[plan.sample_ids] = False
    aside = np.flatnonzero(is_aside)
    num_packed = len(plan.sample_ids)
    starts = [*range(0, num_packed, _ROWS_AT_ONCE)]
    wanted = [plan.sample_ids[start : start + _ROWS_AT_ONCE] for start in starts]
    wanted += [
        aside[start : start + _ROWS_AT_ONCE] for start in range(0, len(aside), _ROWS_AT_ONCE)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = take_rows(parts(), columns.empty_table(), wanted, path.parent)
    with table_writer(path, schema) as write:
        for start, rows in zip(starts, tables, strict=False):
            slots = np.arange(start, start + len(rows))
            if copies is not None:
                rows = name_copies(rows, copies[start : start + len(rows)])
            pack = np.searchsorted(plan.pack_offsets, slots, side="right") - 1
            found = [pack, slots - plan.pack_offsets[pack]]
            if plan.cp_sizes is not None:
                found.append(plan.cp_sizes[pack])
            write(_with_columns(rows, dict(zip(places, found, strict=True))).cast(schema))
        for rows in tables:
            none = pa.nulls(len(rows), pa.int64())
            write(_with_columns(rows, dict.fromkeys(places, none)).cast(schema))


def _with_columns(rows: pa.Table, columns: Mapping[str, Any]) -> pa.Table:
    """The rows with further columns before the last."""
    for name, values in columns.items():
        at = len(rows.column_names) - 1
        rows = rows.add_column(at, name, pa.array(values, pa.int64()))
    return rows


def _check_columns(pack: PackConfig, samples: Lengths) -> None:
    """Raise StageError if packs depend on something that the table does not have."""
    found, media = samples.columns, ("num_images", "num_videos")
    needs_media = pack.homogeneous or (pack.order is not None and pack.order.uniform)
    needed = [f"num_{name}" for name in pack.budgets]
    needed += ["num_vision_patches"] if "balance" in pack.assignment else []
    needed += ["num_images"] if needs_media and not {*media} & {*found} else []
    missing = next((name for name in needed if name not in found), None)
    if missing is not None:
        raise StageError(
            f"lengths {samples.path}: pack.budgets, pack.homogeneous or pack.assignment needs a "
            f"column {missing}; add it"
        )

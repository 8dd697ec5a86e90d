"""Second pass of measuring, for `pack.on_overlong: split_turns`: conversations that fit no pack
become several samples.

    _packing/records/part-00000.parquet   a row per record; removed at the end
    _packing/index/part-00000.parquet     the same rows, with the parts of those that are cut
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.config.sections import SplitTurnsConfig
from offline_packing.engines.local import advance
from offline_packing.index import table as index
from offline_packing.index.info import IndexInfo
from offline_packing.index.measured import MeasuredSample, index_table
from offline_packing.index.rows import name_samples
from offline_packing.index.set_aside import find_duplicates
from offline_packing.index.table import DUPLICATE_KEY, INDEX_SCHEMA, UNCUT, Index, count_rows
from offline_packing.layouts import LAYOUTS
from offline_packing.layouts.shard_tasks import wanted_table_rows
from offline_packing.measure.split_turns import Conversation, fits
from offline_packing.runs.run import Run, open_encoder, open_sources
from offline_packing.runs.tasks import run_tasks
from offline_packing.sources import Source
from offline_packing.sources.reading.row_reader import rows_at_hand
from offline_packing.storage.paths import read_each
from task_encoders.families import ModelOptions
from task_encoders.samples import SampleError


@dataclass(frozen=True)
class RegroupTask:
    """A part of the records' table, whose long conversations are cut."""

    number: int
    sources: tuple[Source, ...]
    model: ModelOptions
    rows: pa.Table
    split: SplitTurnsConfig
    #: (num_rows,) whether an earlier record has the key, which its parts would hide
    is_duplicate: npt.NDArray[np.bool_]
    #: (num_rows,) tokens that a sample of each record may have; and what else a pack may hold
    rooms: npt.NDArray[np.int64]
    budgets: Mapping[str, int]
    index_path: Path
    unpack_folder: Path


def regroup_records(
    run: Run, records: Index, paths: Sequence[Path], left: Sequence[int]
) -> IndexInfo:
    """Make some parts of the index, by their numbers; `paths` are those of all. Returns its content
    without hashes."""
    num_records, pack = records.info.num_samples, run.config.pack
    added = LAYOUTS[run.config.output.layout].admit(records).added_tokens if left else 0
    rooms = np.broadcast_to(np.int64(pack.longest_sample) - added, num_records)
    is_duplicate = np.zeros(num_records, bool)
    is_duplicate[find_duplicates(records.array("key_hash"), partial(name_samples, records))] = True
    ends = np.cumsum(records.info.part_rows)
    starts = ends - records.info.part_rows
    places = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
    sources = tuple(open_sources(run.config))
    tasks = (
        RegroupTask(
            number,
            sources,
            run.config.model,
            records.part(number, *INDEX_SCHEMA.names),
            pack.split_turns,
            is_duplicate[places[number]],
            rooms[places[number]],
            {str(name): limit for name, limit in pack.budgets.items()},
            paths[number],
            run.workspace.unpacked,
        )
        for number in left
    )
    with run.bar("regroup", num_records, "record") as bar:
        bar.update(num_records - sum(records.info.part_rows[number] for number in left))
        for _ in run_tasks(run, regroup_part, tasks, bar.update):
            pass
    rows = list(read_each(run.workspace.index, count_rows, paths))
    made = Index(paths[0].parent, replace(records.info, part_rows=rows))
    split = _count_parts(made)
    info = replace(made.info, split=split, num_tokens=int(made.array("num_tokens").sum()))
    return replace(info, num_records=num_records) if split else info


def _count_parts(samples: Index) -> dict[str, int]:
    """Return `IndexInfo.split` of an index."""
    counts = {"conversations": 0, "samples": 0}
    for rows in samples.parts("source_id", "part"):
        own = rows.filter(rows["part"].is_valid())
        keys = pc.struct_field(own["part"], "key")
        records = pa.table([own["source_id"], keys], ["source_id", "key"])
        counts["conversations"] += len(records.group_by(["source_id", "key"]).aggregate([]))
        counts["samples"] += len(own)
    return counts if counts["samples"] else {}


def regroup_part(task: RegroupTask) -> None:
    """Write one part of the index."""
    left_out = np.where(task.is_duplicate, DUPLICATE_KEY, 0).astype(np.uint8)
    is_cut = ~fits(task.rows, task.rooms, task.budgets) & ~task.is_duplicate
    made: list[MeasuredSample] = []
    owners: list[int] = []  # the row of each
    files = wanted_table_rows(task.rows.filter(pa.array(is_cut)), task.sources)
    with rows_at_hand(files, task.index_path.parent, task.unpack_folder):
        for row in range(len(task.rows)):
            own = _cut(task, row) if is_cut[row] else []
            if own is None:
                left_out[row] = UNCUT
            made += own or []
            owners += [row] * len(own or [])
            advance()
    kept = np.setdiff1d(np.arange(len(task.rows)), owners)
    place = INDEX_SCHEMA.get_field_index("left_out")
    stay = task.rows.set_column(place, INDEX_SCHEMA.field(place), pa.array(left_out)).take(
        pa.array(kept)
    )
    rows = pa.concat_tables([stay, index_table(made)])
    order = np.argsort(np.concatenate([kept, np.array(owners, np.int64)]), kind="stable")
    with index.table_writer(task.index_path, INDEX_SCHEMA) as write:
        write(rows.take(pa.array(order)))


def _cut(task: RegroupTask, row: int) -> list[MeasuredSample] | None:
    """The parts of a record; none if it stays whole, None if no template takes its parts."""
    limits = {"tokens": int(task.rooms[row]), **task.budgets}
    source = task.sources[task.rows["source_id"][row].as_py()]
    try:
        return Conversation(
            source, open_encoder(task.model), task.rows.slice(row, 1), task.split, limits
        ).parts()
    except SampleError:
        return None

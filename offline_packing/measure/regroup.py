"""Second pass of measuring: records become dialogues of several, or parts of one conversation.

    _packing/records/part-00000.parquet   a row per record; removed at the end
    _packing/index/part-00000.parquet     the index: a sample is where its first record was

`source.merge_same_image` and `pack.on_overlong: split_turns` ask for it. Rows of records that they
leave alone are copied.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.config.sections import SplitTurnsConfig
from offline_packing.engines.local import advance
from offline_packing.index import table as index
from offline_packing.index.info import IndexInfo
from offline_packing.index.measured import MeasuredSample, index_table
from offline_packing.index.records import are_parts, record_hashes
from offline_packing.index.rows import samples_of_shards, sums_by_source
from offline_packing.index.table import INDEX_SCHEMA, UNCUT, Index, count_rows, with_left_out
from offline_packing.layouts import LAYOUTS
from offline_packing.layouts.shard_tasks import wanted_table_rows
from offline_packing.measure.merge import Dialogue, find_dialogues
from offline_packing.measure.split_turns import Conversation, fits
from offline_packing.runs.run import Run, open_encoder, open_sources
from offline_packing.runs.tasks import run_tasks
from offline_packing.sources import Source
from offline_packing.sources.reading.row_reader import rows_at_hand
from offline_packing.storage.paths import read_each
from task_encoders.families import ModelOptions
from task_encoders.samples import SampleError

#: Columns whose sums say what merging saved.
_SAVED: Final = ("num_tokens", "num_images")

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RegroupTask:
    """A part of the index: its records in the order of samples, and how many each sample has."""

    number: int
    sources: tuple[Source, ...]
    model: ModelOptions
    rows: pa.Table
    sizes: Ids
    #: how conversations are cut, if they are
    split: SplitTurnsConfig | None
    #: (num_records,) tokens that a sample of each record may have; and what else a pack may hold
    rooms: Ids
    budgets: Mapping[str, int]
    index_path: Path
    unpack_folder: Path


def regroup_records(
    run: Run, records: Index, paths: Sequence[Path], left: Sequence[int]
) -> IndexInfo:
    """Make some parts of the index, by their numbers; `paths` are those of all. Returns its content
    without hashes."""
    num_records = records.info.num_samples
    tasks = _tasks(run, records, paths, left) if left else ()
    with run.bar("regroup", num_records, "record") as bar:
        bar.update(num_records - sum(records.info.part_rows[number] for number in left))
        for _ in run_tasks(run, regroup_part, tasks, bar.update):
            pass
    rows = list(read_each(run.workspace.index, count_rows, paths))
    made = Index(paths[0].parent, replace(records.info, part_rows=rows))
    split, is_part = _count_parts(made)
    info = replace(made.info, split=split, num_tokens=int(made.array("num_tokens").sum()))
    if run.config.merges or split:
        info = replace(info, num_records=num_records)
    if run.config.merges:
        info = replace(info, saved=_saved(run, records, Index(made.paths[0].parent, info), is_part))
    return info


def _count_parts(samples: Index) -> tuple[dict[str, int], npt.NDArray[np.bool_]]:
    """Return `IndexInfo.split` of an index; and (num_samples,) which samples are parts."""
    conversations, found, truncated = 0, [np.empty(0, bool)], 0
    for rows in samples.parts("dialogue_hash", "parts"):
        found.append(are_parts(rows))
        own = rows.filter(pa.array(found[-1]))
        conversations += len(own["dialogue_hash"].unique())
        turns = pc.list_flatten(own["parts"].combine_chunks())
        length = pc.struct_field(turns, ["turns", "answer_length"])
        truncated += len(length) - length.null_count
    is_part = np.concatenate(found)
    if not conversations:
        return {}, is_part
    counts = {"conversations": conversations, "samples": int(is_part.sum())}
    return counts | {"truncated": truncated}, is_part


def _saved(
    run: Run, records: Index, samples: Index, is_part: npt.NDArray[np.bool_]
) -> dict[str, int]:
    """Return the bytes, tokens and images that merging saved; conversations that were cut are not
    counted."""
    cut = np.isin(records.array("key_hash"), record_hashes(samples)[is_part])
    now, before = (
        sums_by_source(one, kept.astype(np.int64), len(run.config.source), _SAVED)
        for one, kept in ((samples, ~is_part), (records, ~cut))
    )
    return {name: sum(before[name]) - sum(now[name]) for name in ("bytes", *_SAVED)}


def _tasks(
    run: Run, records: Index, paths: Sequence[Path], numbers: Sequence[int]
) -> Iterator[RegroupTask]:
    """The tasks of some parts of the index, each made when it is asked for."""
    sources, pack = tuple(open_sources(run.config)), run.config.pack
    merges, encoder = [source.merge for source in sources], open_encoder(run.config.model)
    ids, sizes, parts = find_dialogues(records, merges, encoder)
    added = LAYOUTS[run.config.output.layout].added_tokens(records)
    rooms = np.broadcast_to(np.int64(pack.longest_sample) - added, len(ids))
    bounds = np.searchsorted(parts, np.arange(len(paths) + 1))
    wanted = [slice(bounds[number], bounds[number + 1]) for number in numbers]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    of_parts = [ids[starts[some.start] : starts[some.stop]] for some in wanted]
    tables = samples_of_shards(records, INDEX_SCHEMA.names, of_parts, records.paths[0].parent)
    for number, some, own, rows in zip(numbers, wanted, of_parts, tables, strict=True):
        yield RegroupTask(
            number,
            sources,
            run.config.model,
            rows,
            sizes[some],
            pack.split_turns if run.config.splits else None,
            rooms[own],
            {str(name): limit for name, limit in pack.budgets.items()},
            paths[number],
            run.workspace.unpacked,
        )


def regroup_part(task: RegroupTask) -> None:
    """Write one part of the index."""
    left_out = pc.fill_null(task.rows["left_out"], 0).to_numpy().copy()
    is_cut = np.zeros(len(task.rows), bool)
    if task.split is not None:
        is_cut = ~fits(task.rows, task.rooms, task.budgets) & (left_out == 0)
    first = np.cumsum(task.sizes) - task.sizes
    is_made = (task.sizes > 1) | is_cut[first]
    samples: list[int | MeasuredSample] = []  # rows that stay, and new ones
    wanted = task.rows.filter(pa.array(np.repeat(is_made, task.sizes)))
    files = wanted_table_rows(wanted, task.sources)
    with rows_at_hand(files, task.index_path.parent, task.unpack_folder):
        for own in zip(first.tolist(), task.sizes.tolist(), is_made.tolist(), strict=True):
            start, size, makes = own
            samples += _samples(task, is_cut, left_out, start, size) if makes else [start]
            advance(size)
    kept = [one for one in samples if isinstance(one, int)]
    made = [one for one in samples if isinstance(one, MeasuredSample)]
    stay = with_left_out(left_out, task.rows).take(pa.array(kept, pa.int64()))
    is_kept = np.array([isinstance(one, int) for one in samples], bool)
    # [row, new, row] -> places 0, 2, 1 in the rows that stay followed by the new ones
    places = np.where(is_kept, np.cumsum(is_kept), len(kept) + np.cumsum(~is_kept)) - 1
    rows = pa.concat_tables([stay.select(INDEX_SCHEMA.names), index_table(made)])
    with index.table_writer(task.index_path, INDEX_SCHEMA) as write:
        write(rows.take(pa.array(places)))


def _samples(
    task: RegroupTask,
    is_cut: npt.NDArray[np.bool_],
    left_out: npt.NDArray[np.uint8],
    start: int,
    size: int,
) -> Iterator[int | MeasuredSample]:
    """The samples of some records that follow each other; the row of one that stays as it is, which
    is marked in `left_out` if it should be cut and no template takes its parts."""
    encoder, rows = open_encoder(task.model), task.rows.slice(start, size)
    source = task.sources[rows["source_id"][0].as_py()]
    found = Dialogue(source, encoder, rows).samples() if size > 1 else iter([0])
    for one in found:
        if not isinstance(one, int):
            yield one
            continue
        row = start + one
        parts: list[MeasuredSample] = []
        if is_cut[row]:
            assert task.split is not None
            limits = {"tokens": int(task.rooms[row]), **task.budgets}
            try:
                parts = Conversation(
                    source, encoder, rows.slice(one, 1), task.split, limits
                ).parts()
            except SampleError:
                left_out[row] = UNCUT
        yield from parts or iter([row])

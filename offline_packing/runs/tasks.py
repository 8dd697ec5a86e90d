"""Tasks run by the engine, and the tasks of a plan's shards."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, update_wrapper
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa

from offline_packing.engines.local import Advance
from offline_packing.index.measured import MODIFICATION_TIME
from offline_packing.index.rows import name_copies, samples_of_shards
from offline_packing.index.table import Index
from offline_packing.layouts.shards import (
    COLUMNS,
    PREFIX_COLUMNS,
    PlannedShard,
    ShardTask,
    estimate_pack_bytes,
    lay_out_shards,
    splits_of_plan,
)
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.artifacts import generation_of
from offline_packing.runs.run import Run, open_sources
from task_encoders.storage.remote_requests import REPEATS

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_tasks(
    run: Run,
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    listener: Advance | None = None,
) -> Iterator[Result]:
    """Run tasks as `Engine.run` does, and count the requests that they repeat."""
    counted = update_wrapper(partial(_counted, function), function)  # Ray's dashboard names it
    for result, process, repeats in run.engine.run(counted, tasks, listener):
        if process != os.getpid():
            REPEATS.update(repeats)
        yield result


def _counted(function: Callable[[Task], Result], task: Task) -> tuple[Result, int, Counter[str]]:
    """Run a task. Return its result, its process, and how many requests it had to repeat."""
    before = REPEATS.copy()
    return function(task), os.getpid(), REPEATS - before


def plan_shards(run: Run, samples: Index, plan: PackPlan) -> list[PlannedShard]:
    """Assign packs to shards."""
    output = run.config.output
    if output.max_shard_bytes is None:
        pack_bytes = np.zeros(plan.num_packs, dtype=np.int64)
    else:
        pack_bytes = estimate_pack_bytes(samples, plan, refers=output.media == "refer")
    splits = splits_of_plan(plan, output.split)
    limits = output.packs_per_shard, output.max_shard_bytes, output.shards_per_folder
    return lay_out_shards(pack_bytes, splits, *limits)


def iterate_tasks(
    run: Run,
    samples: Index,
    plan: PackPlan,
    shards: Sequence[PlannedShard],
    *,
    with_sources: bool = True,
    folder: Path | None = None,
) -> Iterator[ShardTask]:
    """Make the task of each shard when it is asked for. Without sources, which need not exist then,
    a task reads neither samples nor media. A task for another `folder` than the output does not
    heed the times of source files: hashes decide whether the shard is the same."""
    if not shards:
        return
    workspace, config = run.workspace, run.config
    folder = folder or workspace.root
    is_output = folder == workspace.root
    sources = tuple(open_sources(config)) if with_sources else ()
    bounds = [plan.pack_offsets[s.first_pack : s.first_pack + s.num_packs + 1] for s in shards]
    ids = [plan.sample_ids[offsets[0] : offsets[-1]] for offsets in bounds]
    columns = COLUMNS if plan.branches is None else (*COLUMNS, *PREFIX_COLUMNS)
    tables = samples_of_shards(samples, columns, ids, workspace.write)
    copies = plan.copy_numbers()
    started = workspace.written_with()
    for shard, offsets, table in zip(shards, bounds, tables, strict=True):
        own = slice(offsets[0], offsets[-1])
        if copies is not None:
            table = name_copies(table, copies[own])
        if plan.branches is not None:
            table = table.append_column("branches", pa.array(plan.branches[own]))
        yield ShardTask(
            shard=shard,
            folder=folder,
            unpack_folder=workspace.unpacked,
            samples=table,
            pack_sizes=np.diff(offsets),
            sources=sources,
            task=config.task,
            key_prefix=str(started.get("output.key_prefix", "")),
            layout=config.output.layout,
            generation=generation_of(started),
            refers=config.output.media == "refer",
            refuses_edits=is_output and MODIFICATION_TIME not in run.accept_mismatch,
        )

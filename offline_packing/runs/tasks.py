"""The tasks of a stage: which are done, which of the others this process is to run, and those of
the shards of a plan.

A task is done when its marker exists: the file that it writes last. An engine that shares tasks
with other ranks runs its share of the remaining ones and ends; a run that has the output to itself
completes the stage.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa

from offline_packing.errors import ShareDoneError
from offline_packing.index.measured import MODIFICATION_TIME
from offline_packing.index.rows import SampleIds, name_copies, samples_of_shards
from offline_packing.index.table import Index
from offline_packing.layouts import LAYOUTS
from offline_packing.layouts.shard_tasks import COLUMNS, ShardTask
from offline_packing.layouts.shards import (
    PlannedShard,
    lay_out_shards,
    splits_of_plan,
)
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.run import Run, open_sources
from offline_packing.storage.files import read_json

logger = logging.getLogger(__name__)

Task = TypeVar("Task")


def unfinished(stage: str, tasks: Sequence[Task], marker: Callable[[Task], Path]) -> list[Task]:
    """The tasks that are not done, in order; `Engine.share` assigns them to ranks."""
    left = [task for task in tasks if not marker(task).exists()]
    if left and len(left) < len(tasks):
        num_done = len(tasks) - len(left)
        logger.info("%s: %d of %d tasks are done already", stage, num_done, len(tasks))
    return left


def check_all_done(
    run: Run, stage: str, tasks: Sequence[Task], marker: Callable[[Task], Path]
) -> None:
    """Raise ShareDoneError if ranks share the stage, which a separate run is to complete."""
    if run.engine.IS_SHARED:
        left = sum(not marker(task).exists() for task in tasks)
        raise ShareDoneError(
            f"this rank's share of {stage} is done, {left} of {len(tasks)} tasks are left to other "
            f"ranks; after them, run {stage} with engine.name=local to complete it"
        )


def plan_shards(run: Run, samples: Index, plan: PackPlan) -> list[PlannedShard]:
    """Assign packs to shards."""
    output = run.config.output
    if output.max_shard_bytes is None:
        pack_bytes = np.zeros(plan.num_packs, dtype=np.int64)
    else:
        pack_bytes = LAYOUTS[output.layout].pack_bytes(samples, plan)
    splits = splits_of_plan(plan, output.split)
    return lay_out_shards(pack_bytes, splits, output.packs_per_shard, output.max_shard_bytes)


def iterate_tasks(
    run: Run,
    samples: Index,
    plan: PackPlan,
    shards: Sequence[PlannedShard],
    *,
    with_sources: bool = True,
) -> Iterator[ShardTask]:
    """The task of each shard, made when it is asked for; without sources, which need not exist
    then, a task reads neither samples nor media."""
    if not shards:
        return
    workspace, config = run.workspace, run.config
    sources = tuple(open_sources(config)) if with_sources else ()
    bounds = [plan.pack_offsets[s.first_pack : s.first_pack + s.num_packs + 1] for s in shards]
    ids = [plan.sample_ids[offsets[0] : offsets[-1]] for offsets in bounds]
    tables = samples_of_shards(samples, COLUMNS, ids, workspace.write)
    copies = plan.copy_numbers()
    output = config.output
    tokenizes = output.pretokenize or LAYOUTS[output.layout].TOKEN_IDS == "always"
    prefix = read_json(workspace.started)["output.key_prefix"]
    for shard, offsets, table in zip(shards, bounds, tables, strict=True):
        yield ShardTask(
            shard=shard,
            folder=workspace.root,
            fragment_path=workspace.fragment(shard.name),
            unpack_folder=workspace.unpacked,
            samples=_as_planned(table, plan, shard, copies),
            pack_sizes=np.diff(offsets),
            sources=sources,
            task=config.task,
            key_prefix=prefix,
            seq_length=config.pack.seq_length,
            layout=config.output.layout,
            tokenizes=config.model if tokenizes else None,
            check_times=MODIFICATION_TIME not in run.accept_mismatch,
        )


def _as_planned(
    table: pa.Table, plan: PackPlan, shard: PlannedShard, copies: SampleIds | None
) -> pa.Table:
    """A shard's samples with the keys of copies, and the ranks of their packs, if these differ."""
    packs = slice(shard.first_pack, shard.first_pack + shard.num_packs)
    offsets = plan.pack_offsets[packs.start : packs.stop + 1]
    if copies is not None:
        table = name_copies(table, copies[offsets[0] : offsets[-1]])
    if plan.cp_sizes is None:
        return table
    cp_sizes = np.repeat(plan.cp_sizes[packs], np.diff(offsets))
    return table.append_column("cp_size", pa.array(cp_sizes))

"""Training cost of each pack of a written folder, and the schedule of its packs."""

import logging
from collections.abc import Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from offline_packing.errors import StageError
from offline_packing.index.rows import of_uses, pack_table
from offline_packing.index.table import Index, IndexInfo
from offline_packing.online.ranks.rank_schedule import RankSchedule
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.artifacts import load_plan
from offline_packing.runs.manifest import hash_plan, read_manifest
from offline_packing.runs.run import Workspace
from task_encoders.families import model_cost, model_options
from task_encoders.families.base.cost import ModelCost
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.loading.schedule import InTurn, Schedule
from task_encoders.packs.manifest import Manifest, PackColumns
from task_encoders.storage.paths import path_of

logger = logging.getLogger(__name__)


def pack_costs(
    folder: PackedFolder, model: ModelCost | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return tokens and cost of each pack, (num_packs,) each, in the folder's order.

    They come from index and plan of the output (`_packing/`), or of each output of a blend; no
    shard is read.

    Args:
        model: default: the model that the packs were measured for.

    Raises:
        StageError: a folder has no index and plan, or they belong to other shards.
    """
    tokens, _, tower, language = _planned(folder, model)
    return tokens.astype(np.int64), tower + language


def pack_columns(folder: PackedFolder) -> PackColumns:
    """Return media, and operations of tower and language model, of each pack, in the folder's
    order: from its manifests, or, if they lack them, from index and plan. Raises StageError as
    `pack_costs`."""
    return folder.columns() or PackColumns(*_planned(folder, None)[1:])


def schedule_of(
    folder: PackedFolder,
    *,
    order: Literal["written", "balanced"],
    num_ranks: int,
    packs_per_row: int,
    seed: int,
    repeat: bool,
) -> Schedule:
    """Return the schedule by which `launch` trains a folder's packs. Its items are numbers of
    packs.

    `balanced`: at each step all ranks train rows of similar cost, in a new order in every epoch.
    Packed with `pack.order.uniform`, all rows of a step have images, or videos, or none has. Raises
    StageError as `pack_costs`.
    """
    if order == "written":
        return InTurn.of(folder, num_ranks, packs_per_row, repeat=repeat)
    columns = pack_columns(folder)
    # Kinds of media and outputs of a blend, of which optimizer steps should hold equal numbers.
    both = columns.media, _outputs(folder)
    traits = [trait == one for trait in both for one in np.unique(trait)[1:]]
    return RankSchedule(
        np.ones(len(folder), np.int64),  # lengths and budget count packs
        columns.cost,
        num_ranks,
        packs_per_row,
        seed,
        tower_cost=columns.tower,
        kinds=columns.media if folder.uniform_ranks else None,
        features=np.stack(traits, axis=1) if traits else None,
    )


def _planned(folder: PackedFolder, model: ModelCost | None) -> tuple[npt.NDArray[Any], ...]:
    """Return tokens, media, tower and language operations of each pack, in the folder's order."""
    columns: list[npt.NDArray[Any]] = []
    for root, numbers, planned in numbers_in_plans(folder):
        samples, plan = artifacts_of(root, manifest := read_manifest(root))
        assert manifest is not None  # artifacts_of refuses None
        cost = model or model_cost(model_options(**manifest.config["model"]))
        table = pack_table(samples, plan, cost)
        each = of_uses(samples, plan, methodcaller("array", "num_tokens"))
        tokens = np.add.reduceat(each, plan.pack_offsets[:-1])
        found: tuple[npt.NDArray[Any], ...] = tokens, table.media, table.tower, table.language
        columns = columns or [np.empty(len(folder), values.dtype) for values in found]
        for column, values in zip(columns, found, strict=True):
            column[numbers] = values[planned]
    return tuple(columns)


def numbers_in_plans(
    folder: PackedFolder,
) -> Iterator[tuple[Path, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield the outputs in a folder, or a blend, and for each the numbers of its packs in the
    folder and in its plan, (num_packs,)."""
    planned, roots = [], list(dict.fromkeys(shard.root for shard in folder.shards))
    places: dict[Path, int] = {}  # the number of each shard's first pack in its plan
    found = {root: one for root in roots if (one := read_manifest(root)) is not None}
    for root, manifest in found.items():
        first = 0
        for line in manifest.shards:
            places[root / line.name] = first
            first += line.packs
    for shard in folder.shards:
        # Callers refuse an output without a manifest; in any other, every shard has its place.
        first = places[shard.path] if shard.root in found else 0
        planned.append(first + np.arange(shard.start, shard.end))
    in_plan, outputs = np.concatenate(planned)[folder.order], _outputs(folder)
    for number, root in enumerate(roots):
        own = np.flatnonzero(outputs == number)
        yield root, own, in_plan[own]


def _outputs(folder: PackedFolder) -> npt.NDArray[np.int64]:
    """Number each pack's output, (num_packs,), as they come first among the shards."""
    roots = list(dict.fromkeys(shard.root for shard in folder.shards))
    numbers = [roots.index(shard.root) for shard in folder.shards]
    return np.repeat(numbers, [shard.num_packs for shard in folder.shards])[folder.order]


def longest_pack(root: Path, multiple: int) -> int:
    """Count the tokens of the longest pack of an output if every sample is padded to a multiple.
    Raises StageError as `pack_costs`."""
    samples, plan = artifacts_of(root, read_manifest(root))
    padded = -(-samples.array("num_tokens")[plan.sample_ids] // multiple) * multiple
    return int(np.add.reduceat(padded, plan.pack_offsets[:-1], dtype=np.int64).max())


def artifacts_of(root: Path, manifest: Manifest | None) -> tuple[Index, PackPlan]:
    """Open the index and the plan that an output's packs were written from."""
    workspace = Workspace(path_of(root))
    receipt, info = workspace.read_plan(), IndexInfo.load(workspace.packing)
    if manifest is None or receipt is None or info is None:
        raise StageError(
            f"{root} has no index and plan (_packing/) that say what its packs cost; copy them "
            "from where it was packed, or give RankSchedule lengths and costs of your own"
        )
    if hash_plan(receipt) != manifest.plan or receipt.inputs.get("index") != info.hash:
        raise StageError(f"{root}: the shards are not those of its plan and index; run write again")
    return Index(workspace.index, info), load_plan(workspace, receipt).packs

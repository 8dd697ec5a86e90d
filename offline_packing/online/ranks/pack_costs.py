"""Training cost of each pack of a written folder, and the schedule of its packs."""

from collections.abc import Iterator
from itertools import accumulate
from operator import methodcaller
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from offline_packing.errors import StageError
from offline_packing.index.rows import of_uses, pack_table
from offline_packing.index.table import Index, IndexInfo
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

_UNKNOWN: Final = (
    "{} has no index and plan (_packing/) that say what its packs cost; copy them from where it "
    "was packed, or give RankSchedule lengths and costs of your own"
)


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
    tokens, costs = np.empty(len(folder), np.int64), np.empty(len(folder))
    for manifest, samples, plan, numbers, places in planned_outputs(folder):
        cost = model or model_cost(model_options(**manifest.config["model"]))
        table = pack_table(samples, plan, cost)
        each = of_uses(samples, plan, methodcaller("array", "num_tokens"))
        tokens[numbers] = np.add.reduceat(each, plan.pack_offsets[:-1])[places]
        costs[numbers] = (table.tower + table.language)[places]
    return tokens, costs


def pack_columns(folder: PackedFolder) -> PackColumns:
    """Return media, and operations of tower and language model, of each pack, in the folder's
    order, from its manifests. Raises StageError if there is none."""
    if (columns := folder.columns()) is None:
        raise StageError(_UNKNOWN.format(folder.path))
    return columns


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
    StageError as `pack_columns`.
    """
    if order == "written":
        return InTurn.of(folder, num_ranks, packs_per_row, repeat=repeat)
    from offline_packing.online.ranks.rank_schedule import RankSchedule  # takes seconds to import

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


def planned_outputs(
    folder: PackedFolder,
) -> Iterator[tuple[Manifest, Index, PackPlan, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield the outputs in a folder, or a blend: manifest, index and plan, and of its packs the
    numbers in the folder and in the plan, (num_packs,). Raises StageError as `pack_costs`."""
    roots = dict.fromkeys(shard.root for shard in folder.shards)
    manifests = {root: read_manifest(root) for root in roots}
    firsts: dict[Path, int] = {}  # the place of each shard's first pack
    for root, manifest in manifests.items():
        lines = () if manifest is None else manifest.shards
        counts = accumulate((line.packs for line in lines), initial=0)
        firsts |= zip((root / line.name for line in lines), counts, strict=False)
    in_shards = [firsts.get(one.path, 0) + np.arange(one.start, one.end) for one in folder.shards]
    places, outputs = np.concatenate(in_shards)[folder.order], _outputs(folder)
    for number, (root, manifest) in enumerate(manifests.items()):
        samples, plan = artifacts_of(root, manifest)
        assert manifest is not None  # it would be refused
        own = np.flatnonzero(outputs == number)
        yield manifest, samples, plan, own, places[own]


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
        raise StageError(_UNKNOWN.format(root))
    if hash_plan(receipt) != manifest.plan or receipt.inputs.get("index") != info.hash:
        raise StageError(f"{root}: the shards are not those of its plan and index; run write again")
    return Index(workspace.index, info), load_plan(workspace, receipt).packs

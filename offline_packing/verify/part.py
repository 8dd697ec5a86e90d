"""A part of what `verify` checks, where all of it would take too long: hashes, or packs drawn at
random."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from offline_packing.layouts.shards import PlannedShard
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.artifacts import check_layout, open_index, open_plan
from offline_packing.runs.run import Run
from offline_packing.runs.tasks import plan_shards, run_tasks
from offline_packing.verify.shard import (
    VerifyResult,
    VerifyTask,
    damage_tasks,
    verify_hashes,
    verify_shard,
    verify_tasks,
)
from task_encoders.packs.manifest import Manifest


@dataclass(frozen=True)
class Drawn:
    """How many samples to check, in whole packs: at least `amount`, or this share of all if it is
    below 1. `seed` decides which packs."""

    amount: float
    seed: int = 0

    def packs(self, plan: PackPlan) -> npt.NDArray[np.int64]:
        """Numbers of the packs, ascending."""
        wanted = self.amount * (len(plan.sample_ids) if self.amount < 1 else 1)
        order = np.random.default_rng(self.seed).permutation(plan.num_packs)
        ends = np.cumsum(np.diff(plan.pack_offsets)[order])
        return np.sort(order[: int(np.searchsorted(ends, wanted)) + 1])

    def shards(self, plan: PackPlan, shards: Sequence[PlannedShard]) -> list[PlannedShard]:
        """The shards of these packs, cut to one pack each."""
        firsts = np.array([shard.first_pack for shard in shards])
        packs = self.packs(plan)
        owners = np.searchsorted(firsts, packs, side="right") - 1
        pairs = zip(owners.tolist(), packs.tolist(), strict=True)
        return [
            replace(
                shards[owner],
                number=number,
                first_pack=pack,
                num_packs=1,
                packs_before=shards[owner].packs_before + pack - shards[owner].first_pack,
            )
            for number, (owner, pack) in enumerate(pairs)
        ]


def _own(tasks: Iterable[VerifyTask], shards: Sequence[PlannedShard]) -> Iterator[VerifyTask]:
    names = {shard.name for shard in shards}
    return (task for task in tasks if task.shard.shard.name in names)


def verify_part(
    run: Run, manifest: Manifest, deep: bool, drawn: Drawn | None, total: VerifyResult
) -> None:
    """Compare the shards' bytes with their hashes, or the packs that are drawn with the plan."""
    samples, stored = open_index(run), open_plan(run)
    check_layout(run, stored.hash)
    shards, check = plan_shards(run, samples, stored.packs), verify_hashes
    if drawn is not None:
        shards, check = drawn.shards(stored.packs, shards), verify_shard
    own, is_part = run.engine.share(shards), drawn is not None
    with run.bar("verify", sum(shard.num_packs for shard in own), "pack") as bar:
        tasks = (
            verify_tasks(run, samples, stored.packs, manifest, own, deep=deep, is_part=True)
            if is_part
            else _own(damage_tasks(run, manifest.shards, manifest.layout), own)
        )
        for report in run_tasks(run, check, tasks, bar.update):
            total.add(report)
    total.num_set_aside = samples.info.num_set_aside + sum(stored.set_aside.values())

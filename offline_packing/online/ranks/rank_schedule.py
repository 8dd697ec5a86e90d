"""Schedule of which rank trains on what at which step, made before training begins.

Items are packs of a written folder, or samples. Micro batches of similar cost are trained at the
same step, so that no rank waits for another:

    cost of 6 micro batches, 2 ranks    9 1 4 8 3 1  ->  sorted  1 1 | 3 4 | 8 9
    in random order of steps and ranks      rank 0   4 1 8
                                            rank 1   3 1 9

All ranks have the same number of steps. Where micro batches do not divide evenly among the ranks,
some are divided, so that each sample comes once. Repeated within an epoch is only what cannot be
divided: with n packs, or n samples that need as many steps, (ranks × steps - n) of them come twice.
"""

import hashlib
import heapq
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from offline_packing.planner.order import reorder_packs
from offline_packing.planner.plan_packs import plan_packs
from offline_packing.planner.request import checked_costs, checked_sizes
from offline_packing.planner.strategies.strategy import Packs, join_packs
from task_encoders.field_types import Count, Integer, NonNegative, checked

logger = logging.getLogger(__name__)

#: Steps that were trained with some number of ranks: (num_ranks, steps).
Stretch = tuple[int, int]


@dataclass(frozen=True)
class EpochSchedule:
    """One epoch, or what was left of it when the number of ranks changed."""

    #: items of each micro batch
    micro_batches: Packs
    #: int64 (num_steps, num_ranks): numbers of micro batches
    table: np.ndarray
    #: float64 (num_steps, num_ranks): what they cost
    cost: np.ndarray

    def items(self, step: int, rank: int) -> np.ndarray:
        """The items of a micro batch, int64 (n,): indices into the schedule's lengths."""
        start, end = self.micro_batches.pack_offsets[self.table[step, rank] :][:2]
        return self.micro_batches.sample_ids[start:end]

    @property
    def idle_share(self) -> float:
        """Share of time that ranks wait for the slowest of each step."""
        available = self.cost.max(axis=1).sum() * self.cost.shape[1] if self.cost.size else 0.0
        return float(1 - self.cost.sum() / available) if available else 0.0


class RankSchedule:
    """The steps of all epochs, from nothing but its arguments: any process computes the same.

    Args:
        lengths: integers (num_items,), tokens of each pack or sample.
        cost: (num_items,) of training on each; default: the length squared. See
            `task_encoders.families.model_cost` for samples, `pack_costs` for packs.
        num_ranks: data parallel ranks. Workers of their loaders change nothing.
        budget: tokens of a micro batch, made of several items, in new company in each epoch; items
            that do not fit are in `set_aside_ids`. None: each item is a micro batch, as packs are.
        seed: decides every random choice, together with the epoch.

    Raises:
        ValueError: an argument is out of range, or there is nothing to schedule.
    """

    @checked
    def __init__(
        self,
        lengths: np.ndarray,
        cost: np.ndarray | None = None,
        num_ranks: Count = 1,
        budget: Count | None = None,
        seed: NonNegative = 0,
    ) -> None:
        self.lengths = checked_sizes("lengths", lengths).astype(np.int64)
        self.cost = self.lengths**2.0 if cost is None else checked_costs(cost)
        self.num_ranks, self.budget, self.seed = num_ranks, budget, seed
        if self.cost.shape != self.lengths.shape:
            raise ValueError(
                f"cost {self.cost.shape} must have a value per length {self.lengths.shape}"
            )
        fits = (self.lengths >= 1) & (self.lengths <= (np.inf if budget is None else budget))
        #: int64 (n,): items without tokens, or longer than the budget
        self.set_aside_ids = np.flatnonzero(~fits)
        self._ids = np.flatnonzero(fits)
        if not len(self._ids):
            raise ValueError(f"none of {len(fits)} items to schedule fits the budget {budget}")
        if len(self.set_aside_ids):
            logger.warning(
                "%d of %d items are set aside: without tokens, or longer than the budget %s",
                len(self.set_aside_ids),
                len(fits),
                budget,
            )

    @cached_property
    def digest(self) -> str:
        """Identifies what is scheduled, with any number of ranks."""
        found = hashlib.sha256(repr((self.budget, self.seed)).encode())
        found.update(self.lengths.tobytes() + self.cost.tobytes())
        return found.hexdigest()[:16]

    def epoch(self, number: int, earlier: Sequence[Stretch] = ()) -> EpochSchedule:
        """The steps of an epoch: O(n log n) for n items, and with a budget what planning takes.

        Args:
            earlier: what was trained of this epoch, in turn, with other numbers of ranks; the rest
                is scheduled for the present number.
        """
        left = self._ids
        for stretch, (num_ranks, steps) in enumerate(earlier):
            before = self._schedule(left, num_ranks, (self.seed, number, stretch))
            trained = reorder_packs(before.micro_batches, np.unique(before.table[:steps]))
            left = np.setdiff1d(left, trained.sample_ids, assume_unique=True)
        return self._schedule(left, self.num_ranks, (self.seed, number, len(earlier)))

    def _schedule(self, ids: np.ndarray, num_ranks: int, seed: Sequence[int]) -> EpochSchedule:
        packs = self._micro_batches(ids, num_ranks, seed)
        offsets = packs.pack_offsets
        cost = np.add.reduceat(self.cost[packs.sample_ids], offsets[:-1]) if len(ids) else ids
        table = _similar_at_each_step(cost, num_ranks, np.random.default_rng(seed))
        return EpochSchedule(packs, table, cost[table].astype(np.float64))

    def _micro_batches(self, ids: np.ndarray, num_ranks: int, seed: Sequence[int]) -> Packs:
        """Each item alone; or under the budget, if possible a multiple of num_ranks of them."""
        if self.budget is None or not len(ids):
            return Packs(ids, np.arange(len(ids) + 1))
        planning_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        plan = plan_packs(self.lengths[ids], self.budget, seed=planning_seed)
        packs = Packs(ids[plan.sample_ids], plan.pack_offsets)
        odd = packs.num_packs % num_ranks
        if not odd:
            return packs
        # The rows of most samples: small ones are easily divided.
        by_size = np.argsort(np.diff(packs.pack_offsets), kind="stable")
        last = reorder_packs(packs, by_size[-odd:])
        rest = reorder_packs(packs, np.sort(by_size[:-odd]))
        divided = self._divide(last.sample_ids, num_ranks)
        if divided is None:
            return self._split(packs, num_ranks - odd)
        return join_packs([rest, _as_packs(divided)])

    def _divide(self, ids: np.ndarray, num_ranks: int) -> list[list[int]] | None:
        """Samples as one micro batch of similar cost per rank: the costliest first, each to the
        rank with the lowest cost that has room. None if that fails."""
        parts: list[list[int]] = [[] for _ in range(num_ranks)]
        spent, room = np.zeros(num_ranks), np.full(num_ranks, self.budget)
        for item in ids[np.argsort(-self.cost[ids], kind="stable")].tolist():
            open_ranks = np.flatnonzero(room >= self.lengths[item])
            if not len(open_ranks):
                return None
            rank = open_ranks[spent[open_ranks].argmin()]
            parts[rank].append(item)
            spent[rank] += self.cost[item] or np.finfo(float).tiny
            room[rank] -= self.lengths[item]
        return parts if all(parts) else None

    def _split(self, packs: Packs, count: int) -> Packs:
        """Micro batches of the same samples, `count` more of them if there are as many samples:
        again and again the costliest that has several becomes two of similar cost."""
        offsets = packs.pack_offsets
        several = np.flatnonzero(np.diff(offsets) > 1)
        cost = np.add.reduceat(self.cost[packs.sample_ids], offsets[:-1])[several]
        chosen = several[np.argsort(-cost, kind="stable")[:count]]
        whole = [packs.sample_ids[offsets[i] : offsets[i + 1]] for i in chosen]
        parts = [(-self.cost[ids].sum(), ids.tolist()) for ids in whole]
        heapq.heapify(parts)
        alone: list[list[int]] = []
        while count and parts:
            count -= 1
            for half in self._divide(np.array(heapq.heappop(parts)[1]), 2) or ():
                if len(half) > 1:
                    heapq.heappush(parts, (-self.cost[half].sum(), half))
                else:
                    alone.append(half)
        rest = reorder_packs(packs, np.setdiff1d(np.arange(packs.num_packs), chosen))
        return join_packs([rest, _as_packs([*alone, *(ids for _, ids in parts)])])


def _as_packs(parts: Sequence[Sequence[int]]) -> Packs:
    sizes = [len(part) for part in parts]
    return Packs(np.array([*chain(*parts)], np.int64), np.cumsum([0, *sizes]))


def _similar_at_each_step(cost: np.ndarray, num_ranks: int, rng: np.random.Generator) -> np.ndarray:
    """(num_steps, num_ranks): each micro batch once, and the fewest repeated that fill all steps.

    An incomplete group, anywhere in the order by cost, is filled with the next in cost: these are
    in other groups, so that no step holds one twice, if there are enough.
    """
    order = np.argsort(cost, kind="stable")
    odd = len(order) % num_ranks
    if odd:
        start = num_ranks * rng.integers(len(order) // num_ranks + 1)
        next_in_cost = np.concatenate([order[start + odd :], order[:start][::-1], order])
        order = np.insert(order, start + odd, np.resize(next_in_cost, num_ranks - odd))
    groups = rng.permutation(order.reshape(-1, num_ranks))
    return rng.permuted(groups, axis=1)


class RankSampler:
    """One rank's micro batches, each a list of items: a `batch_sampler` of torch's DataLoader.

    Iterating yields what is left of the present epoch, and moves on to the next. The state is that
    of the next micro batch to be asked for; loader processes ask ahead of what they deliver, so
    with them take `ScheduledLoader`'s.
    """

    @checked
    def __init__(self, schedule: RankSchedule, rank: Integer) -> None:
        if not 0 <= rank < schedule.num_ranks:
            raise ValueError(f"rank {rank} is not one of {schedule.num_ranks} ranks")
        self.schedule, self.rank = schedule, rank
        self._epoch, self._step = 0, 0
        self._earlier: tuple[Stretch, ...] = ()
        self._current: tuple[Any, EpochSchedule] | None = None

    def __len__(self) -> int:
        """Micro batches left in this epoch."""
        return len(self._scheduled().table) - self._step

    def __iter__(self) -> Iterator[list[int]]:
        epoch, scheduled = self._epoch, self._scheduled()
        for step in range(self._step, len(scheduled.table)):
            self._step = step + 1
            yield scheduled.items(step, self.rank).tolist()
        self._epoch, self._step, self._earlier = epoch + 1, 0, ()

    def state_dict(self) -> dict[str, Any]:
        """State of plain values; the same on all ranks at the same step."""
        return {
            "epoch": self._epoch,
            "step": self._step,
            "num_ranks": self.schedule.num_ranks,
            "earlier": [list(stretch) for stretch in self._earlier],
            "digest": self.schedule.digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: with the same number of ranks exactly, with another
        with what is left of the epoch. Raises ValueError if other items were scheduled then."""
        if state["digest"] != self.schedule.digest:
            raise ValueError(
                "the state is of a schedule of other lengths, costs, budget or seed; restore it "
                "with those, or begin anew"
            )
        self._epoch, self._step = state["epoch"], state["step"]
        earlier = [(ranks, steps) for ranks, steps in state["earlier"]]
        if state["num_ranks"] != self.schedule.num_ranks:
            earlier += [(state["num_ranks"], self._step)] if self._step else []
            self._step = 0
        self._earlier = tuple(earlier)

    def _scheduled(self) -> EpochSchedule:
        wanted = self._epoch, self._earlier
        if self._current is None or self._current[0] != wanted:
            self._current = wanted, self.schedule.epoch(*wanted)
        return self._current[1]

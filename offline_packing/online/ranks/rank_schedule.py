"""Schedule of the items of each rank at each step, made before training begins.

Items are packs of a written folder, or samples. Micro batches of similar cost are trained at the
same step, so that no rank waits for another:

    cost of 6 micro batches, 2 ranks    9 1 4 8 3 1  ->  sorted  1 1 | 3 4 | 8 9
    in random order of steps and ranks      rank 0   4 1 8
                                            rank 1   3 1 9

With `tower_cost`, micro batches of a step are alike in both phases, the vision tower's and the
language model's, after each of which ranks wait for each other. With `kinds`, they are of one kind.

All ranks have the same number of steps. If micro batches do not divide evenly among the ranks, some
are divided, so that each sample comes once. Only indivisible ones are repeated within an epoch:
with n packs, or n samples that each need a micro batch, (ranks × steps - n) of them come twice; the
same of each kind.
"""

import hashlib
import heapq
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Final

import numpy as np

from offline_packing.planner.plan_packs import plan_packs
from offline_packing.planner.ranks.deal import BLOCK, PackCosts, deal_steps
from offline_packing.planner.samples import checked_costs, checked_sizes
from offline_packing.planner.strategies.strategy import Packs, join_packs, reorder_packs
from task_encoders.field_types import Count, NonNegative, checked
from task_encoders.loading.schedule import Stretch

logger = logging.getLogger(__name__)

#: States of another method would go on elsewhere.
_METHOD: Final = 2

#: Arguments with a value per item.
_ARRAYS: Final = ("cost", "tower_cost", "kinds", "features")


@dataclass(frozen=True)
class EpochSchedule:
    """One epoch, or the rest of it when the number of ranks changed."""

    #: items of each micro batch
    micro_batches: Packs
    #: int64 (num_steps, num_ranks): numbers of micro batches
    table: np.ndarray
    #: stretches of the next epoch that this one trains: none
    begun: tuple[Stretch, ...] = ()

    def __len__(self) -> int:
        """Count the steps."""
        return len(self.table)

    def items(self, step: int, rank: int) -> np.ndarray:
        """Return the items of a micro batch, int64 (n,): indices into the schedule's lengths."""
        start, end = self.micro_batches.pack_offsets[self.table[step, rank] :][:2]
        return self.micro_batches.sample_ids[start:end]

    def trained(self, steps: int) -> np.ndarray:
        """Return the items of all ranks' micro batches in the first steps, int64 (n,)."""
        return reorder_packs(self.micro_batches, self.table[:steps].ravel()).sample_ids


class RankSchedule:
    """The steps of all epochs, a function of its arguments: any process computes the same.

    Args:
        lengths: integers (num_items,), tokens of each pack or sample.
        cost: (num_items,) of training on each, the tower's included; default: the length squared.
            See `task_encoders.families.model_cost` for samples, `pack_costs` for packs.
        num_ranks: data parallel ranks. Workers of their loaders change nothing.
        budget: tokens of a micro batch, made of several items that are regrouped in each epoch;
            items that do not fit are in `set_aside_ids`. None: each item, such as a pack, is a
            micro batch.
        seed: decides every random choice, together with the epoch.
        tower_cost: (num_items,), the vision tower's part of `cost`; the time of both phases is then
            minimised. The sum's idle share may grow by a hundredth for it.
        kinds: integers (num_items,) that do not differ within a step, as FSDP needs it: 1 with
            images, 0 without.
        features: (num_items, num_features), further quantities to balance over optimizer steps of 8
            micro batches: tokens with loss, each source's tokens.

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
        tower_cost: np.ndarray | None = None,
        kinds: np.ndarray | None = None,
        features: np.ndarray | None = None,
    ) -> None:
        self.lengths = checked_sizes("lengths", lengths).astype(np.int64)
        self.cost = self.lengths**2.0 if cost is None else checked_costs(cost)
        self.tower_cost = None if tower_cost is None else checked_costs(tower_cost, "tower_cost")
        self.kinds = None if kinds is None else np.asarray(kinds)
        self.features = None if features is None else np.asarray(features, np.float64)
        self.num_ranks, self.budget, self.seed = num_ranks, budget, seed
        self._check_arrays()
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

    def _check_arrays(self) -> None:
        for name in _ARRAYS:
            array = getattr(self, name)
            if array is not None and array.shape[:1] != self.lengths.shape:
                raise ValueError(
                    f"{name} {array.shape} must have a value per length {self.lengths.shape}"
                )
        if self.kinds is not None and (self.kinds.ndim != 1 or self.kinds.dtype.kind not in "iub"):
            raise ValueError(
                f"kinds has shape {self.kinds.shape} and type {self.kinds.dtype}; pass an integer "
                "per length"
            )
        if self.features is not None and self.features.ndim != 2:
            raise ValueError(f"features {self.features.shape} must have two dimensions")
        if self.tower_cost is not None and (above := self.tower_cost > self.cost).any():
            first = int(above.argmax())
            raise ValueError(
                f"tower_cost[{first}] is {self.tower_cost[first]:g} > cost {self.cost[first]:g}; "
                "cost is the sum of the tower's and the language model's"
            )

    @cached_property
    def digest(self) -> str:
        """Identifies the scheduled items, with any number of ranks."""
        found = hashlib.sha256(repr((self.budget, self.seed, _METHOD)).encode())
        for name in ("lengths", *_ARRAYS):
            array = getattr(self, name)
            if array is not None:
                found.update(np.ascontiguousarray(array, array.dtype.newbyteorder("=")).tobytes())
        return found.hexdigest()[:16]

    def epoch(self, number: int, earlier: Sequence[Stretch] = ()) -> EpochSchedule:
        """Schedule an epoch: O(n log n) for n items, with a budget plus the time of planning.

        Args:
            earlier: stretches of this epoch that other numbers of ranks trained; the rest is
                scheduled for the present number.
        """
        left = self._ids
        for stretch, (num_ranks, steps) in enumerate(earlier):
            before = self._schedule(left, num_ranks, (self.seed, number, stretch))
            left = np.setdiff1d(left, before.trained(steps))
        return self._schedule(left, self.num_ranks, (self.seed, number, len(earlier)))

    def _schedule(self, ids: np.ndarray, num_ranks: int, seed: Sequence[int]) -> EpochSchedule:
        """Make micro batches, each of one kind, and deal them to steps."""
        kinds = np.zeros(len(ids), np.int64) if self.kinds is None else self.kinds[ids]
        packs = Packs(ids, np.arange(len(ids) + 1))
        if self.budget is not None and len(ids):
            each = np.unique(kinds)
            own = [self._fill(self.budget, ids[kinds == kind], num_ranks, seed) for kind in each]
            packs, kinds = join_packs(own), np.repeat(each, [part.num_packs for part in own])

        def sums(values: np.ndarray) -> np.ndarray:
            starts = packs.pack_offsets[:-1]
            return np.add.reduceat(values[packs.sample_ids], starts, dtype=np.float64)

        cost = sums(self.cost)
        tower = None if self.tower_cost is None else sums(self.tower_cost)
        features = None if self.features is None else sums(self.features)
        rng = np.random.default_rng(seed)
        table = deal_steps(PackCosts.of(cost, tower, kinds, features), num_ranks, rng)
        if not seed[2]:  # where the blocks of an endless sequence of epochs begin
            table = np.roll(table, -seed[1] * len(table) % BLOCK, axis=0)
        return EpochSchedule(packs, table)

    def _fill(self, budget: int, ids: np.ndarray, num_ranks: int, seed: Sequence[int]) -> Packs:
        """Put the samples `ids` into as few micro batches as `budget` tokens allow, if possible a
        multiple of num_ranks of them."""
        planning_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        plan = plan_packs(self.lengths[ids], budget, seed=planning_seed)
        packs = Packs(ids[plan.sample_ids], plan.pack_offsets)
        odd = packs.num_packs % num_ranks
        if not odd:
            return packs
        # The rows of most samples: small ones are easily divided.
        by_size = np.argsort(np.diff(packs.pack_offsets), kind="stable")
        last = reorder_packs(packs, by_size[-odd:])
        rest = reorder_packs(packs, np.sort(by_size[:-odd]))
        divided = self._divide(budget, last.sample_ids, num_ranks)
        if divided is None:
            return self._split(budget, packs, num_ranks - odd)
        return join_packs([rest, _as_packs(divided)])

    def _divide(self, budget: int, ids: np.ndarray, count: int) -> list[list[int]] | None:
        """Divide samples into `count` micro batches of similar cost: the costliest first, each to
        that with the lowest cost that has room. None if that fails."""
        parts: list[list[int]] = [[] for _ in range(count)]
        spent, room = np.zeros(count), np.full(count, budget)
        for item in ids[np.argsort(-self.cost[ids], kind="stable")].tolist():
            open_parts = np.flatnonzero(room >= self.lengths[item])
            if not len(open_parts):
                return None
            part = open_parts[spent[open_parts].argmin()]
            parts[part].append(item)
            spent[part] += self.cost[item] or np.finfo(float).tiny
            room[part] -= self.lengths[item]
        return parts if all(parts) else None

    def _split(self, budget: int, packs: Packs, count: int) -> Packs:
        """Make up to `count` more micro batches of the same samples: the costliest of several
        samples becomes two of similar cost, again and again."""
        offsets = packs.pack_offsets
        several = np.flatnonzero(np.diff(offsets) > 1)
        costs = np.add.reduceat(self.cost[packs.sample_ids], offsets[:-1])[several]
        chosen = several[np.argsort(-costs, kind="stable")[:count]]
        whole = [packs.sample_ids[offsets[i] : offsets[i + 1]] for i in chosen]
        parts = [(-self.cost[ids].sum(), ids.tolist()) for ids in whole]
        heapq.heapify(parts)
        alone: list[list[int]] = []
        while count and parts:
            count -= 1
            largest = np.array(heapq.heappop(parts)[1])
            for half in self._divide(budget, largest, 2) or ():
                if len(half) > 1:
                    heapq.heappush(parts, (-self.cost[half].sum(), half))
                else:
                    alone.append(half)
        rest = reorder_packs(packs, np.setdiff1d(np.arange(packs.num_packs), chosen))
        return join_packs([rest, _as_packs([*alone, *(ids for _, ids in parts)])])


def _as_packs(parts: Sequence[Sequence[int]]) -> Packs:
    return Packs(np.array([*chain(*parts)], np.int64), np.cumsum([0, *map(len, parts)]))

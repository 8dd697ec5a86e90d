"""Ranks that read the packs: which reads which pack at which step, and how long ranks wait.

`RankLayout`: every rank reads packs of its own. `ContextParallel`: a pack goes over 1, 2, 4 …
ranks, and a slot of packs over all. A pack over cp ranks holds up to cp * tokens_per_rank tokens,
each sample padded to what cp ranks can cut. The packs of a slot are trained at the same time; their
sizes add up to the ranks. Configurations are checked with these, so this imports nothing that
compiles.
"""

from dataclasses import dataclass

import numpy as np

from task_encoders.field_types import Count, check_fields
from task_encoders.loading.folder_shards import steps_of_reading
from task_encoders.packs.pack_format import cut_multiple


@dataclass(frozen=True)
class RankLayout:
    """The loader that will read the packs: data-parallel ranks, and loader workers on each."""

    num_ranks: int
    #: workers per rank; 0 (loading in the main process) reads like 1
    num_workers: int = 1
    #: whether the packs of each step are of one kind: all have images, videos, or neither
    uniform: bool = False

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_workers < 0:
            raise ValueError(
                f"order has num_ranks {self.num_ranks} and num_workers {self.num_workers}; "
                "num_ranks must be at least 1 and num_workers at least 0"
            )

    @property
    def round(self) -> int:
        """Packs that all workers of all ranks read in one turn. If it divides the number of packs,
        all epochs read the same steps, and so does any divisor of the ranks."""
        return self.num_ranks * max(1, self.num_workers)

    def steps(self, num_packs: int) -> np.ndarray:
        """Training step at which each place in the written order is read: int64 (num_packs,)."""
        return steps_of_reading(num_packs, self.num_ranks, self.num_workers)

    def full_steps(self, num_packs: int) -> np.ndarray:
        """Places in the written order that are read at each step at which every rank has a pack:
        int64 (num_steps, num_ranks)."""
        step = self.steps(num_packs)
        is_full = np.bincount(step) == self.num_ranks
        kept = np.flatnonzero(is_full[step])
        return kept[np.argsort(step[kept], kind="stable")].reshape(-1, self.num_ranks)

    def mixed_steps(self, kinds: np.ndarray) -> int:
        """Steps whose packs are not of one kind, or that not every rank has: ``kinds`` (num_packs,)
        in written order."""
        table = kinds[self.full_steps(len(kinds))]
        incomplete = len(np.unique(self.steps(len(kinds)))) - len(table)
        return incomplete + int((table != table[:, :1]).any(axis=1).sum())

    def idle_shares(self, cost: np.ndarray, tower: np.ndarray | None = None) -> tuple[float, float]:
        """`idle_shares` of packs (num_packs,) in written order, over the steps at which every rank
        has one."""
        places = self.full_steps(len(cost))
        of_tower = np.zeros(places.shape) if tower is None else tower[places]
        return idle_shares(cost[places].astype(np.float64), of_tower)


def idle_shares(cost: np.ndarray, tower: np.ndarray) -> tuple[float, float]:
    """Shares of time that ranks wait, (num_steps, num_ranks) arrays: for the largest sum of each
    step; and for the largest tower cost plus the largest language cost."""
    times = np.array([phase_times(cost, tower), cost.max(axis=1, initial=0)]).sum(axis=1)
    two, one = (float(1 - cost.mean(axis=1).sum() / time) if time else 0.0 for time in times)
    return max(0.0, one), max(0.0, two)


def phase_times(cost: np.ndarray, tower: np.ndarray) -> np.ndarray:
    """(num_steps,) time of each step in both phases."""
    return np.asarray(tower.max(axis=1, initial=0) + (cost - tower).max(axis=1, initial=0))


@dataclass(frozen=True)
class ContextParallel:
    """Ranks that train a slot together, and the tokens of a pack that each has room for."""

    #: a power of two
    ranks: Count
    tokens_per_rank: Count

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ranks & (self.ranks - 1):
            raise ValueError(
                f"ranks is {self.ranks}; packs go over 1, 2, 4 … ranks: take a power of two, the "
                "ranks of several such groups read several slots at a time"
            )

    @property
    def sizes(self) -> list[int]:
        """Ranks that a pack may go over, ascending."""
        return [1 << power for power in range(self.ranks.bit_length())]

    def check(self, seq_length: int, multiple: int) -> None:
        """Raise ValueError for a longest pack that the ranks cannot hold or cut."""
        if seq_length > self.ranks * self.tokens_per_rank:
            raise ValueError(
                f"seq_length {seq_length} > {self.ranks} ranks x {self.tokens_per_rank} tokens per "
                "rank, the longest pack under context_parallel; lower it, or raise these"
            )
        for name, value, unit in (
            ("tokens_per_rank", self.tokens_per_rank, cut_multiple(1, multiple)),
            ("seq_length", seq_length, cut_multiple(self.ranks, multiple)),
        ):
            if value % unit:
                raise ValueError(
                    f"{name} {value} is not a multiple of {unit}, which context_parallel needs to "
                    f"cut packs for up to {self.ranks} ranks; take {max(value // unit, 1) * unit}"
                )

    def capacities(self, seq_length: int) -> np.ndarray:
        """Tokens that a pack over 1, 2, 4 … ranks may hold: int64 (num_sizes,)."""
        return np.minimum(np.array(self.sizes) * self.tokens_per_rank, seq_length)


def slot_offsets(cp_sizes: np.ndarray, ranks: int) -> np.ndarray:
    """Offsets of the slots of packs, by the ranks of each: [4, 2, 2, 8] of 8 -> [0, 3, 4]. Raises
    ValueError if the sizes, integers (num_packs,), do not add up to slots."""
    ends = np.cumsum(cp_sizes, dtype=np.int64)
    offsets = np.append(0, np.flatnonzero(ends % ranks == 0) + 1)
    full = np.arange(1, len(offsets)) * ranks
    if offsets[-1] != len(ends) or not np.array_equal(ends[offsets[1:] - 1], full):
        raise ValueError(f"the ranks of packs do not add up to slots of {ranks} ranks")
    return offsets


def idle_in_slots(cost: np.ndarray, cp_sizes: np.ndarray, ranks: int) -> float:
    """Share of time that ranks wait for the costliest pack per rank of their slot. ``cost``
    (num_packs,) of whole packs; communication is not counted."""
    if not len(cost):
        return 0.0
    slowest = np.maximum.reduceat(cost / cp_sizes, slot_offsets(cp_sizes, ranks)[:-1])
    return float(1 - cost.sum() / (slowest.sum() * ranks)) if slowest.any() else 0.0

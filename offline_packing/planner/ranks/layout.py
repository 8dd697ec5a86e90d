"""Ranks that each read packs of their own: which reads which pack at which step, and how long ranks
wait. Configurations are checked with these, so this imports nothing that compiles.
"""

from dataclasses import dataclass

import numpy as np

from task_encoders.loading.folder_shards import steps_of_reading


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
        """Return the training step at which each place in the written order is read: int64
        (num_packs,)."""
        return steps_of_reading(num_packs, self.num_ranks, self.num_workers)

    def full_steps(self, num_packs: int) -> np.ndarray:
        """Return the places in the written order that are read at each step at which every rank has
        a pack: int64 (num_steps, num_ranks)."""
        step = self.steps(num_packs)
        is_full = np.bincount(step) == self.num_ranks
        kept = np.flatnonzero(is_full[step])
        return kept[np.argsort(step[kept], kind="stable")].reshape(-1, self.num_ranks)

    def mixed_steps(self, kinds: np.ndarray) -> int:
        """Count the steps whose packs are not of one kind, or that not every rank has: ``kinds``
        (num_packs,) in written order."""
        table = kinds[self.full_steps(len(kinds))]
        incomplete = len(np.unique(self.steps(len(kinds)))) - len(table)
        return incomplete + int((table != table[:, :1]).any(axis=1).sum())

    def idle_shares(self, cost: np.ndarray, tower: np.ndarray | None = None) -> tuple[float, float]:
        """Return `idle_shares` of packs (num_packs,) in written order, over the steps at which
        every rank has a pack."""
        places = self.full_steps(len(cost))
        of_tower = np.zeros(places.shape) if tower is None else tower[places]
        return idle_shares(cost[places].astype(np.float64), of_tower)


def idle_shares(cost: np.ndarray, tower: np.ndarray) -> tuple[float, float]:
    """Return the shares of time that ranks wait, of (num_steps, num_ranks) arrays: for the largest
    sum of each step; and for the largest tower cost plus the largest language cost."""
    times = np.array([phase_times(cost, tower), cost.max(axis=1, initial=0)]).sum(axis=1)
    two, one = (float(1 - cost.mean(axis=1).sum() / time) if time else 0.0 for time in times)
    return max(0.0, one), max(0.0, two)


def phase_times(cost: np.ndarray, tower: np.ndarray) -> np.ndarray:
    """Return the time of each step in both phases, (num_steps,)."""
    return np.asarray(tower.max(axis=1, initial=0) + (cost - tower).max(axis=1, initial=0))

"""Order in which the packs are written, and so trained on."""

from dataclasses import dataclass

import numpy as np
from numba import njit

from offline_packing.planner.strategies.kernels import random_state, shuffle_between
from offline_packing.planner.strategies.strategy import Packs

_SAMPLE_ORDER_STREAM = 1  # random numbers of its own: other choices stay as they are


@dataclass(frozen=True)
class RankLayout:
    """The loader that will read the packs: data-parallel ranks, and loader workers on each."""

    num_ranks: int
    #: workers per rank; 0 (loading in the main process) reads like 1
    num_workers: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_workers < 0:
            raise ValueError(
                f"order has num_ranks {self.num_ranks} and num_workers {self.num_workers}; "
                "num_ranks must be at least 1 and num_workers at least 0"
            )

    def steps(self, num_packs: int) -> np.ndarray:
        """Training step at which each place in the written order is read: int64 (num_packs,).

        Energon cuts the packs into num_ranks * num_workers contiguous slices, rank after rank and
        worker after worker; a rank takes one pack from each of its workers in turn. What does not
        divide evenly makes some slices one pack longer, in the order of a generalized bit
        reversal (``Sharder.split_samples_to_workers``).
        """
        workers = max(1, self.num_workers)
        slices = self.num_ranks * workers
        size, longer = divmod(num_packs, slices)
        sizes = np.full(slices, size)
        sizes[_bit_reversal(np.arange(slices))[:longer]] += 1
        worker = np.repeat(np.arange(slices) % workers, sizes)
        starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        return (np.arange(num_packs) - starts) * workers + worker


def _bit_reversal(indices: np.ndarray) -> np.ndarray:
    """[0 1 2 3 4 5 6 7] -> [0 4 2 6 1 5 3 7]: both halves in this order, interleaved."""
    if len(indices) <= 2:
        return indices
    middle = len(indices) // 2
    left, right = _bit_reversal(indices[:middle]), _bit_reversal(indices[middle:])
    interleaved = np.stack([left, right[:middle]], axis=1).ravel()
    return np.append(interleaved, right[middle:])  # an odd number leaves one


def cost_grouped_order(cost: np.ndarray, layout: RankLayout, seed: int) -> np.ndarray:
    """An order in which all ranks read packs of similar cost at the same step.

    ``cost`` (num_packs,) per pack. Packs sorted by cost are cut into one group per step, the
    groups are shuffled over the steps and the packs over the ranks. Returns a permutation, int64
    (num_packs,): place i of the written order gets pack ``order[i]``. It serves the given layout;
    another number of ranks reads other packs at the same step.
    """
    rng = np.random.default_rng(seed)
    step = layout.steps(len(cost))
    turn = rng.permutation(step.max(initial=-1) + 1)  # the step that reads each group, by cost
    places = np.lexsort((rng.random(len(cost)), turn[step]))
    order = np.empty(len(cost), np.int64)
    order[places] = np.argsort(cost, kind="stable")
    return order


def idle_share(cost: np.ndarray, layout: RankLayout) -> float:
    """Share of time that ranks wait for the slowest: ``cost`` (num_packs,) in written order. Counts
    the steps at which every rank has a pack."""
    step = layout.steps(len(cost))
    full = np.bincount(step) == layout.num_ranks
    slowest = np.zeros(len(full))
    np.maximum.at(slowest, step, cost)
    spent = cost[full[step]].sum()
    available = slowest[full].sum() * layout.num_ranks
    return float(1 - spent / available) if available else 0.0


@njit(cache=True)
def _gather_packs(packs: Packs, order: np.ndarray, out: Packs) -> None:
    end = 0
    for place in range(order.shape[0]):
        pack = order[place]
        for source in range(packs.pack_offsets[pack], packs.pack_offsets[pack + 1]):
            out.sample_ids[end] = packs.sample_ids[source]
            end += 1
        out.pack_offsets[place + 1] = end


def reorder_packs(packs: Packs, order: np.ndarray) -> Packs:
    """The chosen packs in the given order: place i gets pack ``order[i]``, each at most once."""
    size = int(np.diff(packs.pack_offsets)[order].sum())
    offsets = np.zeros(len(order) + 1, np.int64)
    reordered = Packs(np.empty(size, packs.sample_ids.dtype), offsets)
    _gather_packs(packs, order, reordered)
    return reordered


def order_samples(packs: Packs, lengths: np.ndarray, how: str, seed: int) -> Packs:
    """The same packs, the samples in each in random order, longest first, or as they were composed.
    ``lengths`` integers (num_samples,); equal ones keep their order under longest_first."""
    if how == "composed":
        return packs
    if how == "longest_first":
        order = np.lexsort((-lengths[packs.sample_ids], packs.pack_of_slot()))
        return Packs(packs.sample_ids[order], packs.pack_offsets)
    sample_ids = packs.sample_ids.copy()
    shuffle_between(sample_ids, packs.pack_offsets, random_state([seed, _SAMPLE_ORDER_STREAM]))
    return Packs(sample_ids, packs.pack_offsets)

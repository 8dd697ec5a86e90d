"""Packers that take samples one by one: first fit and next fit, sorted, shuffled or in order.

First-fit-decreasing, first fit shuffled in chunks and shuffle-and-pack are the three algorithms of
NeMo's sequence packing for NeVA. There first fit scans all open packs for every sample, O(n**2);
here the first pack with room is found in a tree, O(n log n), and without budgets
first-fit-decreasing is decided on the histogram of lengths. The packs are the same.
"""

from functools import partial

import numpy as np
from numba import njit
from pydantic import Field

from offline_packing.planner.strategies.histogram import greedy_knapsack, pack_with
from offline_packing.planner.strategies.peers.placing import FIRST, place_in_order
from offline_packing.planner.strategies.strategy import (
    Packs,
    Strategy,
    StrategyOptions,
    join_packs,
    under_limits,
)
from task_encoders.threads import in_threads


def _first_fit_decreasing(sizes: np.ndarray, limits: np.ndarray, *, seed: int) -> Packs:
    """The same under budgets, sample by sample."""
    return place_in_order(sizes, limits, np.argsort(-sizes[:, 0], kind="stable"), FIRST)


#: Longest sample first, each into the first pack with room for it. The first pack ends up with what
#: a greedy knapsack would choose for it: the longest sample that still fits, again and again; then
#: the second pack, and so on. So the packs, their order and their samples are the same, found with
#: multiplicity; ``seed`` is unused.
first_fit_decreasing = Strategy(
    partial(pack_with, greedy_knapsack), under_limits=_first_fit_decreasing
)


class FirstFitShuffleOptions(StrategyOptions):
    """Division of the samples."""

    chunk_size: int = Field(20_000, ge=1, description="samples that are packed independently")
    num_threads: int = Field(1, ge=1, description="threads that pack them; changes no pack")


@partial(under_limits, options=FirstFitShuffleOptions)
def first_fit_shuffle(
    sizes: np.ndarray, limits: np.ndarray, *, options: FirstFitShuffleOptions, seed: int
) -> Packs:
    """Samples in a seeded random order, each into the first pack of its chunk with room. Chunks of
    ``chunk_size`` samples are packed independently, on ``num_threads`` threads; the packs follow in
    the order of the chunks, so that the plan does not depend on the number of threads."""
    order = np.random.default_rng(seed).permutation(len(sizes))
    chunks = np.split(order, range(options.chunk_size, len(order), options.chunk_size))
    place = partial(place_in_order, sizes, limits, choice=FIRST)
    return join_packs(list(in_threads(place, chunks, options.num_threads)))


@njit(cache=True)
def _next_fit(sizes: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Offsets int64 (num_packs + 1,) of packs that are closed when the next sample does not fit."""
    num_samples, num_limits = sizes.shape
    offsets = np.zeros(num_samples + 1, np.int64)
    num_packs = 0
    used = limits.copy()  # of the open pack: there is none yet
    for sample in range(num_samples):
        fits = True
        for limit in range(num_limits):
            fits &= used[limit] + sizes[sample, limit] <= limits[limit]
        if not fits:
            offsets[num_packs] = sample
            num_packs += 1
            used[:] = 0
        used += sizes[sample]
    offsets[num_packs] = num_samples
    return offsets[: num_packs + 1].copy()


@under_limits
def shuffle_and_pack(sizes: np.ndarray, limits: np.ndarray, *, seed: int) -> Packs:
    """Samples in a seeded random order, a new pack whenever the next one does not fit. O(n)."""
    order = np.random.default_rng(seed).permutation(len(sizes))
    return Packs(order, _next_fit(sizes[order], limits))


class SequentialOptions(StrategyOptions):
    """Limits beside tokens."""

    max_samples: int | None = Field(None, ge=1, description="samples that a pack holds at most")


@partial(under_limits, options=SequentialOptions)
def sequential(
    sizes: np.ndarray, limits: np.ndarray, *, options: SequentialOptions, seed: int
) -> Packs:
    """Add samples in their order until the next one does not fit, then start a new pack. O(n).

    The greedy packing of nanoVLM's data pipeline, and with ``max_samples`` the two batch modes of
    VeOmni: a token budget (``dyn_bsz``) or a fixed number of samples. ``seed`` is unused: this is
    the strategy that keeps the order of the samples.
    """
    if options.max_samples is not None:
        sizes = np.column_stack([sizes, np.ones(len(sizes), np.int64)])
        limits = np.append(limits, options.max_samples)
    return Packs(np.arange(len(sizes)), _next_fit(sizes, limits))

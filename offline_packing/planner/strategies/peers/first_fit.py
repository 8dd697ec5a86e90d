"""Packers that take the samples as they come: first fit and next fit, sorted or shuffled or not.

First-fit-decreasing, first fit shuffled in chunks and shuffle-and-pack are the three algorithms of
NeMo's sequence packing for NeVA. There first fit scans all open packs for every sample, O(n**2);
here the first pack with room is found in a tree of residuals, O(n log n), and first-fit-decreasing
is decided on the histogram of lengths. The packs are the same.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numba import njit
from pydantic import Field

from offline_packing.planner.strategies.histogram import greedy_knapsack, pack_with
from offline_packing.planner.strategies.strategy import (
    Packs,
    Strategy,
    StrategyOptions,
    group_into_packs,
)

#: Longest sample first, each into the first pack with room for it. The first pack ends up with what
#: a greedy knapsack would choose for it: the longest sample that still fits, again and again; then
#: the second pack, and so on. So the packs, their order and their samples are the same, found with
#: multiplicity; ``seed`` is unused.
first_fit_decreasing = Strategy(partial(pack_with, greedy_knapsack))


@njit(cache=True, nogil=True)
def _first_fit(lengths: np.ndarray, seq_length: int) -> tuple[np.ndarray, int]:
    """Pack of every sample, int64 (num_samples,), and the number of packs.

    Leaves of ``residual`` are packs, an inner node holds the largest residual below it; packs that
    are not open yet have the residual ``seq_length``, so the search never fails. Packs without room
    for the shortest sample are never looked at, which is the effect of NeMo's ``completed_bins``.
    """
    num_leaves = 1
    while num_leaves < lengths.shape[0]:
        num_leaves *= 2
    residual = np.full(2 * num_leaves, seq_length, np.int32)
    pack_of = np.empty(lengths.shape[0], np.int64)
    for sample in range(lengths.shape[0]):
        node = 1
        while node < num_leaves:
            node *= 2
            if residual[node] < lengths[sample]:
                node += 1
        pack_of[sample] = node - num_leaves
        residual[node] -= lengths[sample]
        while node > 1:
            node //= 2
            residual[node] = max(residual[2 * node], residual[2 * node + 1])
    return pack_of, pack_of.max() + 1


class FirstFitShuffleOptions(StrategyOptions):
    """How the samples are divided."""

    chunk_size: int = Field(20_000, ge=1, description="samples that are packed independently")
    num_threads: int = Field(1, ge=1, description="threads that pack them; changes no pack")


@partial(Strategy, options=FirstFitShuffleOptions)
def first_fit_shuffle(
    lengths: np.ndarray, seq_length: int, *, options: FirstFitShuffleOptions, seed: int = 0
) -> Packs:
    """Samples in a seeded random order, each into the first pack of its chunk with room. Chunks of
    ``chunk_size`` samples are packed independently, on ``num_threads`` threads; the packs follow in
    the order of the chunks, so that the plan does not depend on the number of threads."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    starts = range(0, len(lengths), options.chunk_size)
    chunks = [lengths[order[start : start + options.chunk_size]] for start in starts]
    with ThreadPoolExecutor(options.num_threads) as pool:
        results = list(pool.map(partial(_first_fit, seq_length=seq_length), chunks))
    before = np.cumsum([0, *(num_packs for _, num_packs in results)])
    parts = [pack_of + first for (pack_of, _), first in zip(results, before, strict=False)]
    return group_into_packs(order, np.concatenate([order[:0], *parts]), int(before[-1]))


@njit(cache=True)
def _next_fit(lengths: np.ndarray, seq_length: int, max_samples: int) -> np.ndarray:
    """Offsets int64 (num_packs + 1,) of packs that are closed when the next sample does not fit."""
    offsets = np.zeros(lengths.shape[0] + 1, np.int64)
    num_packs = 0
    tokens = seq_length  # of the open pack: none yet
    for sample in range(lengths.shape[0]):
        full = tokens + lengths[sample] > seq_length
        if full or sample - offsets[num_packs - 1] == max_samples:
            offsets[num_packs] = sample
            num_packs += 1
            tokens = 0
        tokens += lengths[sample]
    offsets[num_packs] = lengths.shape[0]
    return offsets[: num_packs + 1].copy()


@Strategy
def shuffle_and_pack(lengths: np.ndarray, seq_length: int, *, seed: int = 0) -> Packs:
    """Samples in a seeded random order, a new pack whenever the next one does not fit. O(n)."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    return Packs(order, _next_fit(lengths[order], seq_length, len(lengths)))


class SequentialOptions(StrategyOptions):
    """Limits beside tokens."""

    max_samples: int | None = Field(None, ge=1, description="samples that a pack holds at most")


@partial(Strategy, options=SequentialOptions)
def sequential(
    lengths: np.ndarray, seq_length: int, *, options: SequentialOptions, seed: int = 0
) -> Packs:
    """Add samples in their order until the next one does not fit, then start a new pack. O(n).

    The greedy packing of nanoVLM's data pipeline, and with ``max_samples`` the two batch modes of
    VeOmni: a token budget (``dyn_bsz``) or a fixed number of samples. ``seed`` is unused: this is
    the strategy that keeps the order of the samples.
    """
    limit = options.max_samples or len(lengths)
    return Packs(np.arange(len(lengths)), _next_fit(lengths, seq_length, limit))

"""First fit: sorted, shuffled in chunks, and the linear shuffle-and-pack.

The three algorithms of NeMo's sequence packing for NeVA. There first fit scans all open packs for
every sample, O(n**2); here the first pack with room is found in a tree of residuals, O(n log n),
and first-fit-decreasing is decided on the histogram of lengths. The packs are the same.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from numba import njit
from pydantic import Field

from offline_packing.planner.strategies.by_sample import check_lengths, group_into_packs
from offline_packing.planner.strategies.expand import expand_composition
from offline_packing.planner.strategies.histogram import count_lengths, greedy_knapsack
from offline_packing.planner.strategies.packs import Packs
from offline_packing.planner.strategies.peers.sequential import next_fit
from offline_packing.planner.strategies.strategy import Strategy, StrategyOptions


def first_fit_decreasing(num_tokens: np.ndarray, seq_length: int, *, seed: int = 0) -> Packs:
    """Longest sample first, each into the first pack with room for it.

    The first pack ends up with what a greedy knapsack would choose for it: the longest sample that
    still fits, again and again; then the second pack, and so on. So the packs, their order and
    their samples are those of :func:`greedy_knapsack`, found with multiplicity. ``seed`` is unused.

    ``num_tokens`` integers (num_samples,) in 1..seq_length, else ValueError.
    """
    lengths = check_lengths(num_tokens, seq_length)
    counts = count_lengths(lengths, seq_length)
    return expand_composition(greedy_knapsack(counts), lengths, counts)


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
    num_packs = 0
    for sample in range(lengths.shape[0]):
        node = 1
        while node < num_leaves:
            node *= 2
            if residual[node] < lengths[sample]:
                node += 1
        pack_of[sample] = node - num_leaves
        num_packs = max(num_packs, node - num_leaves + 1)
        residual[node] -= lengths[sample]
        while node > 1:
            node //= 2
            residual[node] = max(residual[2 * node], residual[2 * node + 1])
    return pack_of, num_packs


class FirstFitShuffleOptions(StrategyOptions):
    """How the samples are divided."""

    chunk_size: int = Field(20_000, ge=1, description="samples that are packed independently")
    num_threads: int = Field(1, ge=1, description="threads that pack them; changes no pack")


def _first_fit_shuffle(
    num_tokens: np.ndarray, seq_length: int, *, options: FirstFitShuffleOptions, seed: int = 0
) -> Packs:
    """Samples in a seeded random order, each into the first pack of its chunk with room.

    Chunks of ``chunk_size`` samples are packed independently, on ``num_threads`` threads; the packs
    follow in the order of the chunks, so that the plan does not depend on the number of threads.

    ``num_tokens`` integers (num_samples,) in 1..seq_length, else ValueError.
    """
    lengths = check_lengths(num_tokens, seq_length)
    chunk_size = options.chunk_size
    order = np.random.default_rng(seed).permutation(len(lengths))
    shuffled = lengths[order]
    bounds = [*range(0, len(lengths), chunk_size), len(lengths)]
    chunks = [shuffled[start:end] for start, end in pairwise(bounds)]
    with ThreadPoolExecutor(options.num_threads) as pool:
        results = list(pool.map(_first_fit, chunks, [seq_length] * len(chunks)))
    pack_of = np.empty(len(lengths), np.int64)
    num_packs = 0
    for start, (chunk_pack_of, chunk_packs) in zip(bounds, results, strict=False):
        pack_of[start : start + len(chunk_pack_of)] = chunk_pack_of + num_packs
        num_packs += chunk_packs
    return group_into_packs(order, pack_of, num_packs)


first_fit_shuffle = Strategy(_first_fit_shuffle, FirstFitShuffleOptions)


def shuffle_and_pack(num_tokens: np.ndarray, seq_length: int, *, seed: int = 0) -> Packs:
    """Samples in a seeded random order, a new pack whenever the next one does not fit. O(n).

    ``num_tokens`` integers (num_samples,) in 1..seq_length, else ValueError.
    """
    lengths = check_lengths(num_tokens, seq_length)
    order = np.random.default_rng(seed).permutation(len(lengths))
    return Packs(order, next_fit(lengths[order], seq_length, max_samples=None))

"""Packing decided on the histogram of lengths, with multiplicity.

Every function takes ``counts``, int64 (seq_length + 1,): ``counts[l]`` samples have length l and
``counts[0]`` is 0. The cost depends on the number of different lengths, not of samples.
"""

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from numba import njit

from offline_packing.planner.strategies.composition import (
    Composer,
    Composition,
    as_rows,
    expand_composition,
    from_entries,
    packs_within,
)
from offline_packing.planner.strategies.kernels import (
    add_samples,
    bitset_add,
    bitset_at_least,
    bitset_at_most,
    bitset_of,
    bitset_remove,
    list_of,
)
from offline_packing.planner.strategies.strategy import Packs, Strategy

logger = logging.getLogger(__name__)


@njit(cache=True)
def count_lengths(num_tokens: np.ndarray, seq_length: int) -> np.ndarray:
    """Histogram int64 (seq_length + 1,) of lengths that are all in 1..seq_length. Unlike
    ``np.bincount`` it makes no int64 copy of the lengths."""
    counts = np.zeros(seq_length + 1, np.int64)
    for sample in range(num_tokens.shape[0]):
        counts[num_tokens[sample]] += 1
    return counts


def lower_bound(counts: np.ndarray) -> int:
    """No packing of these lengths has fewer packs: max of L1 and L2.

    L1 = ceil(tokens / seq_length). L2 (Martello and Toth, 1990) adds that samples above half of
    the capacity never share a pack, and that what is left beside them holds only so much.
    """
    capacity = len(counts) - 1
    samples_below = np.append(0, np.cumsum(counts))  # samples shorter than l
    tokens_below = np.append(0, np.cumsum(counts * np.arange(capacity + 1)))
    half = capacity // 2
    # For each length ``small`` up to half: samples that share no pack with any of it, the further
    # ones above half, and what the room beside these leaves of the tokens from small to half.
    small = np.arange(half + 1)
    most = capacity - small + 1
    alone = samples_below[-1] - samples_below[most]
    shared = samples_below[most] - samples_below[half + 1]
    room = shared * capacity - (tokens_below[most] - tokens_below[half + 1])
    overflow = tokens_below[half + 1] - tokens_below[small] - room
    packs = alone + shared + np.maximum(0, -(-overflow // capacity))
    return max(-(-int(tokens_below[-1]) // capacity), int(packs.max()))


@njit(cache=True)
def _best_fit_decreasing(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entries [length, repeat] and patterns [end of entries, multiplicity].

    Packs with equal content are one *group*; groups of equal residual form a linked list. A group
    is made by placing a length into the packs of another one, its parent, and ends as a pattern
    unless all of its packs became parts of further groups.
    """
    capacity = counts.shape[0] - 1
    placed = list_of((0, 0, 0))  # parent or -1, length, repeat of each group
    packs_of, next_group = list_of(0), list_of(0)  # the next one of equal residual, or -1
    first_group = np.full(capacity + 1, -1, np.int64)
    residuals = np.zeros((capacity >> 6) + 1, np.uint64)
    for length in range(capacity, 0, -1):
        left = counts[length]
        while left > 0:
            residual = bitset_at_least(residuals, length)
            group = first_group[residual] if residual >= 0 else -1
            space = residual if residual >= 0 else capacity
            repeat = space // length
            packs = left // repeat
            if group >= 0:
                packs = min(packs, packs_of[group])
            if packs == 0:  # too few left to fill one pack's space
                packs = 1
                repeat = left
            if group >= 0:
                packs_of[group] -= packs
                if packs_of[group] == 0:
                    first_group[residual] = next_group[group]
                    if first_group[residual] < 0:
                        bitset_remove(residuals, residual)
            rest = space - repeat * length
            next_group.append(first_group[rest])
            if rest > 0:
                bitset_add(residuals, rest)
                first_group[rest] = len(placed)
            placed.append((group, length, repeat))
            packs_of.append(packs)
            left -= packs * repeat
    # From the last group to the first, each from its last length to its first, and all reversed.
    entries, patterns = list_of((0, 0)), list_of((0, 0))
    for group in range(len(placed) - 1, -1, -1):
        if packs_of[group] > 0:
            patterns.append((len(entries), packs_of[group]))
            node = np.int64(group)
            while node >= 0:
                entries.append(placed[node][1:])
                node = placed[node][0]
    rows = as_rows(patterns)[::-1]
    rows[:, 0] = len(entries) - rows[:, 0]
    return as_rows(entries)[::-1], rows


def best_fit_decreasing(counts: np.ndarray, *, seed: int = 0) -> Composition:
    """Longest first, each into the fullest pack with room: the same packs as sample by sample.
    Equal lengths are placed together: as many as fit into the space of as many equal packs as there
    are. ``seed`` is unused, the method is deterministic."""
    return from_entries(*_best_fit_decreasing(counts))


@njit(cache=True)
def _greedy_knapsack(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entries [length, repeat] and patterns [end of entries, multiplicity]."""
    counts = counts.copy()
    capacity = counts.shape[0] - 1
    present = bitset_of(counts)
    entries, patterns = list_of((0, 0)), list_of((0, 0))
    while bitset_at_most(present, capacity) > 0:
        start = len(entries)
        space = capacity
        length = bitset_at_most(present, space)
        while length > 0:
            entries.append((length, min(space // length, counts[length])))
            space -= length * entries[-1][1]
            length = bitset_at_most(present, min(space, length - 1))
        packs = packs_within(entries, start, counts)
        for length, repeat in entries[start:]:
            add_samples(counts, present, length, -packs * repeat)
        patterns.append((len(entries), packs))
    return as_rows(entries), as_rows(patterns)


def greedy_knapsack(counts: np.ndarray, *, seed: int = 0) -> Composition:
    """Fill one pack after the other, each time with the longest sample that still fits. The greedy
    knapsack of LLaMA-Factory's and nanoVLM's loaders, without their quadratic search. ``seed`` is
    unused, the method is deterministic."""
    return from_entries(*_greedy_knapsack(counts))


def by_histogram(compose: Composer, under_limits: Callable[..., Packs] | None = None) -> Strategy:
    """The strategy of a composer, samples of equal length taken in their order; under further
    limits ``under_limits(sizes, limits, seed=seed)``, if it can honour any."""

    def pack(sizes: np.ndarray, limits: np.ndarray, *, seed: int) -> Packs:
        if under_limits is not None and len(limits) > 1:
            return under_limits(sizes, limits, seed=seed)
        lengths = np.ascontiguousarray(sizes[:, 0], np.int32)
        counts = count_lengths(lengths, int(limits[0]))
        return expand_composition(compose(counts, seed=seed), lengths, counts)

    return Strategy(pack, lengths_only=under_limits is None)


def even_packs(part: np.ndarray, samples_per_pack: int) -> np.ndarray:
    """Even packs of at most ``samples_per_pack`` samples. Very long ones are put beside the very
    shortest, as many as it takes. Returns the packs of at most seq_length tokens, as lengths, int64
    (num_packs, samples_per_pack), with 0 for none. ``part`` int64 (seq_length + 1,)."""
    lengths = np.repeat(np.arange(len(part)), part)[::-1]
    best = np.zeros((0, samples_per_pack), np.int64)
    num_long = 0
    while num_long * samples_per_pack <= len(lengths):
        shortest = len(lengths) - num_long * (samples_per_pack - 1)
        extreme = np.append(lengths[:num_long], lengths[shortest:])
        packs = np.concatenate(
            [
                fold(some, -(-len(some) // samples_per_pack), samples_per_pack)
                for some in (extreme, lengths[num_long:shortest])
            ]
        )
        fitting = packs[packs.sum(axis=1) < len(part)]
        if len(fitting) > len(best):
            best = fitting
        if len(fitting) == len(packs):
            break
        num_long = max(2 * num_long, len(packs) - len(fitting))
    return best


def fold(lengths: np.ndarray, num_packs: int, samples_per_pack: int) -> np.ndarray:
    """Packs of all samples: the longest that remain go to the packs with the fewest tokens, one
    each. ``lengths`` descending. Returns int64 (num_packs, samples_per_pack), 0 for no sample."""
    packs = np.zeros((num_packs, samples_per_pack), np.int64)
    for place in range(samples_per_pack):
        longest = lengths[place * num_packs : (place + 1) * num_packs]
        emptiest = np.argsort(packs.sum(axis=1), kind="stable")[: len(longest)]
        packs[emptiest, place] = longest
    return packs


@cache
def announce_compilation() -> None:
    """Log, once per process, that the kernels are not in numba's cache yet, and where it is. numba
    writes an index file per compiled function; one that is older than the source is stale."""
    folder = Path(count_lengths.stats.cache_path)
    compiled = [file.stat().st_mtime for file in folder.glob("histogram.count_lengths-*.nbi")]
    source = Path(__file__).stat().st_mtime
    if not compiled or max(compiled) < source:
        logger.info(
            "compiling the planner; this takes 10 to 30 seconds the first time, then it is read "
            "from %s",
            folder,
        )

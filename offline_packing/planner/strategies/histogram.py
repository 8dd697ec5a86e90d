"""Packing decided on the histogram of lengths, with multiplicity.

Every function takes ``counts``, int64 (seq_length + 1,): ``counts[l]`` samples have length l and
``counts[0]`` is 0. The cost depends on the number of different lengths, not of samples.
"""

import numpy as np
from numba import njit

from offline_packing.planner.strategies.composition import Composition, flatten_chains
from offline_packing.planner.strategies.kernels import (
    bitset_add,
    bitset_at_least,
    bitset_at_most,
    bitset_remove,
    doubled,
    with_pair,
)


@njit(cache=True)
def count_lengths(num_tokens: np.ndarray, seq_length: int) -> np.ndarray:
    """Histogram int64 (seq_length + 1,) of lengths that are all in 1..seq_length.

    Unlike ``np.bincount`` it makes no int64 copy of the lengths.
    """
    counts = np.zeros(seq_length + 1, np.int64)
    for sample in range(num_tokens.shape[0]):
        counts[num_tokens[sample]] += 1
    return counts


@njit(cache=True)
def _martello_toth(counts: np.ndarray) -> int:
    capacity = counts.shape[0] - 1
    samples_below = np.zeros(capacity + 2, np.int64)  # samples shorter than l
    tokens_below = np.zeros(capacity + 2, np.int64)
    for length in range(capacity + 1):
        samples_below[length + 1] = samples_below[length] + counts[length]
        tokens_below[length + 1] = tokens_below[length] + counts[length] * length
    half = capacity // 2
    best = (tokens_below[capacity + 1] + capacity - 1) // capacity
    for small in range(half + 1):
        alone = samples_below[capacity + 1] - samples_below[capacity - small + 1]
        shared = samples_below[capacity - small + 1] - samples_below[half + 1]
        room = shared * capacity - (tokens_below[capacity - small + 1] - tokens_below[half + 1])
        overflow = tokens_below[half + 1] - tokens_below[small] - room
        extra = max(0, (overflow + capacity - 1) // capacity)
        best = max(best, alone + shared + extra)
    return best


def lower_bound(counts: np.ndarray) -> int:
    """No packing of these lengths has fewer packs: max of L1 and L2.

    L1 = ceil(tokens / seq_length). L2 (Martello and Toth, 1990) adds that samples above half of
    the capacity never share a pack, and that what is left beside them holds only so much.
    """
    return int(_martello_toth(counts))


@njit(cache=True)
def _best_fit_decreasing(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes [parent, length, repeat], and leaf node and multiplicity of every pattern.

    Packs with equal content are one *group*; groups of equal residual form a linked list.
    """
    capacity = counts.shape[0] - 1
    nodes = np.empty((4096, 3), np.int32)
    groups = np.empty((4096, 2), np.int64)  # [multiplicity, next group of equal residual or -1]
    num_groups = 0  # group g ends at node g: each placement makes one node and one group
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
                packs = min(packs, groups[group, 0])
            if packs == 0:  # too few left to fill one pack's space
                packs = 1
                repeat = left
            if group >= 0:
                groups[group, 0] -= packs
                if groups[group, 0] == 0:
                    first_group[residual] = groups[group, 1]
                    if first_group[residual] < 0:
                        bitset_remove(residuals, residual)
            if num_groups == groups.shape[0]:
                nodes = doubled(nodes)
                groups = doubled(groups)
            nodes[num_groups, 0] = group
            nodes[num_groups, 1] = length
            nodes[num_groups, 2] = repeat
            rest = space - repeat * length
            groups[num_groups, 0] = packs
            groups[num_groups, 1] = first_group[rest]
            if rest > 0:
                bitset_add(residuals, rest)
                first_group[rest] = num_groups
            num_groups += 1
            left -= packs * repeat
    multiplicity = groups[:num_groups, 0]
    leaves = np.nonzero(multiplicity)[0]
    return nodes[:num_groups], leaves, multiplicity[leaves]


def best_fit_decreasing(counts: np.ndarray, *, seed: int = 0) -> Composition:
    """Longest first, each into the fullest pack with room: the same packs as sample by sample.

    Equal lengths are placed together: as many as fit into the space of as many equal packs as
    there are. ``seed`` is unused, the method is deterministic.
    """
    nodes, leaves, multiplicity = _best_fit_decreasing(counts)
    entries, offsets = flatten_chains(nodes, leaves)
    return Composition(entries[:, 0].copy(), entries[:, 1].copy(), offsets, multiplicity)


@njit(cache=True)
def _greedy_knapsack(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entries [length, repeat] and patterns [end of entries, multiplicity]."""
    counts = counts.copy()
    capacity = counts.shape[0] - 1
    present = np.zeros((capacity >> 6) + 1, np.uint64)
    for length in range(1, capacity + 1):
        if counts[length] > 0:
            bitset_add(present, length)
    entries = np.empty((4096, 2), np.int32)
    patterns = np.empty((4096, 2), np.int64)
    num_entries = 0
    num_patterns = 0
    while bitset_at_most(present, capacity) > 0:
        start = num_entries
        space = capacity
        packs = np.int64(1) << 62
        length = bitset_at_most(present, space)
        while length > 0:
            repeat = min(space // length, counts[length])
            packs = min(packs, counts[length] // repeat)
            entries = with_pair(entries, num_entries, length, repeat)
            num_entries += 1
            space -= repeat * length
            length = bitset_at_most(present, min(space, length - 1))
        for entry in range(start, num_entries):
            length = entries[entry, 0]
            counts[length] -= packs * entries[entry, 1]
            if counts[length] == 0:
                bitset_remove(present, length)
        patterns = with_pair(patterns, num_patterns, num_entries, packs)
        num_patterns += 1
    return entries[:num_entries], patterns[:num_patterns]


def greedy_knapsack(counts: np.ndarray, *, seed: int = 0) -> Composition:
    """Fill one pack after the other, each time with the longest sample that still fits.

    The greedy knapsack of LLaMA-Factory's and nanoVLM's loaders, without their quadratic search.
    ``seed`` is unused, the method is deterministic.
    """
    entries, patterns = _greedy_knapsack(counts)
    return from_entries(entries, patterns)


def from_entries(entries: np.ndarray, patterns: np.ndarray) -> Composition:
    """Composition of entries [length, repeat] and patterns [end of entries, multiplicity]."""
    offsets = np.concatenate([[0], patterns[:, 0]]).astype(np.int64)
    return Composition(
        entries[:, 0].astype(np.int32), entries[:, 1].astype(np.int32), offsets, patterns[:, 1]
    )

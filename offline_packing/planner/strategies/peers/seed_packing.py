"""Compiled phases of the hash-bucket strategy, on the histogram of lengths.

A length and its samples are one bucket; the kernels work on the number of samples in each.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from offline_packing.planner.strategies.kernels import (
    bitset_add,
    bitset_at_least,
    bitset_at_most,
    bitset_remove,
    doubled,
    with_pair,
)


@njit(cache=True)
def _diverse_pack(
    lengths: np.ndarray, counts: np.ndarray, capacity: int, repeats: np.ndarray
) -> bool:
    """One pack round robin over ``lengths`` (ascending); True if it is full.

    A length leaves the round when it is used up or does not fit any more.
    """
    repeats[:] = 0
    running = counts > 0
    while capacity > 0 and running.any():
        for index in range(lengths.shape[0]):
            if running[index] and lengths[index] <= capacity:
                repeats[index] += 1
                capacity -= lengths[index]
                running[index] = repeats[index] < counts[index]
            else:
                running[index] = False
    return capacity == 0


@njit(cache=True)
def _greedy_pack(
    lengths: np.ndarray, counts: np.ndarray, capacity: int, repeats: np.ndarray
) -> bool:
    """One pack longest first; True if it is full.

    Each length divides the next, so this fills the pack whenever any choice of samples does.
    """
    for index in range(lengths.shape[0] - 1, -1, -1):
        repeats[index] = min(counts[index], capacity // lengths[index])
        capacity -= repeats[index] * lengths[index]
    return capacity == 0


@njit(cache=True)
def pack_divisors(
    lengths: np.ndarray, counts: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray]:
    """Exactly full packs of lengths that each divide the next and ``capacity``.

    Packs are as diverse as possible; where that cannot fill one more pack (a deadlock), one pack is
    filled greedily, and then diversity has its turn again. What stays is less than one pack.
    ``lengths`` int64 (k,) ascending, ``counts`` int64 (k,): samples of each length. Returns entries
    int32 [length, repeat] and patterns int64 [end of entries, multiplicity].
    """
    counts = counts.copy()
    entries = np.empty((64, 2), np.int32)
    patterns = np.empty((64, 2), np.int64)
    repeats = np.zeros(lengths.shape[0], np.int64)
    num_entries = 0
    num_patterns = 0
    while True:
        packs = np.int64(1)
        if _diverse_pack(lengths, counts, capacity, repeats):
            # The same choice repeats for as long as no length runs out.
            packs = min([counts[i] // repeats[i] for i in range(len(repeats)) if repeats[i] > 0])
        elif not _greedy_pack(lengths, counts, capacity, repeats):
            return entries[:num_entries], patterns[:num_patterns]
        if num_entries + lengths.shape[0] > entries.shape[0]:
            entries = doubled(entries)
        for index in range(lengths.shape[0]):
            if repeats[index] > 0:
                entries[num_entries, 0] = lengths[index]
                entries[num_entries, 1] = repeats[index]
                num_entries += 1
                counts[index] -= packs * repeats[index]
        patterns = with_pair(patterns, num_patterns, num_entries, packs)
        num_patterns += 1


class _Buckets(NamedTuple):
    """Samples by length, and two ways to find a length."""

    #: int64 (capacity + 1,): samples of each length
    counts: np.ndarray
    #: bit set of the lengths with samples
    present: np.ndarray
    #: int64 (2 * leaves,): tournament tree over the lengths for most samples per token; empty if
    #: never asked
    densest: np.ndarray


@njit(cache=True)
def _make_buckets(counts: np.ndarray, with_densest: bool) -> _Buckets:
    num_leaves = 0
    if with_densest:
        num_leaves = 1
        while num_leaves < counts.shape[0]:
            num_leaves *= 2
    present = np.zeros((counts.shape[0] >> 6) + 1, np.uint64)
    buckets = _Buckets(counts.copy(), present, np.zeros(2 * num_leaves, np.int64))
    for length in range(1, counts.shape[0]):
        if counts[length] > 0:
            _add_samples(buckets, length, 0)
    return buckets


@njit(cache=True)
def _denser(counts: np.ndarray, a: int, b: int) -> int:
    """The length of more samples per token, the shorter if equal; 0 is no length."""
    if a == 0 or b == 0:
        return max(a, b)
    by_a = counts[a] * b
    by_b = counts[b] * a
    if by_a == by_b:
        return min(a, b)
    return a if by_a > by_b else b


@njit(cache=True)
def _densest_up_to(buckets: _Buckets, last: int) -> int:
    """The densest length in 1..last with samples, or 0. Walks up the tournament tree."""
    node = buckets.densest.shape[0] // 2 + last
    best = buckets.densest[node]
    while node > 1:
        if node % 2 == 1:
            best = _denser(buckets.counts, buckets.densest[node - 1], best)
        node //= 2
    return best


@njit(cache=True)
def _add_samples(buckets: _Buckets, length: int, number: int) -> None:
    """Put ``number`` samples (negative: take them) into a bucket, and update its indices."""
    counts, present, densest = buckets
    counts[length] += number
    if counts[length] > 0:
        bitset_add(present, length)
    else:
        bitset_remove(present, length)
    if densest.shape[0] == 0:
        return
    node = densest.shape[0] // 2 + length
    densest[node] = length if counts[length] > 0 else 0
    while node > 1:
        node //= 2
        densest[node] = _denser(counts, densest[2 * node], densest[2 * node + 1])


@njit(cache=True)
def _choose_filler(buckets: _Buckets, room: int, num_samples: int, min_samples: int) -> int:
    """Next length for a pack of ``num_samples`` so far, or -1 if nothing fits.

    Far from the required number of samples the shortest, close to it the length with most samples
    per token, beyond it the longest that fits.
    """
    if num_samples >= min_samples:
        length = bitset_at_most(buckets.present, room)
    elif 5 * num_samples < 4 * min_samples:
        length = bitset_at_least(buckets.present, 1)
    else:
        length = _densest_up_to(buckets, room)
    return length if 0 < length <= room else -1


@njit(cache=True)
def _fill_pack(
    buckets: _Buckets, pack: np.ndarray, min_samples: int, max_samples: int
) -> tuple[int, int]:
    """Fill up a pack that holds the seed ``pack[0]``; returns its samples and the room left."""
    num_samples = 1
    room = buckets.counts.shape[0] - 1 - pack[0]
    while room > 0 and num_samples < max_samples:
        length = _choose_filler(buckets, room, num_samples, min_samples)
        if length < 0:
            break
        _add_samples(buckets, length, -1)
        pack[num_samples] = length
        num_samples += 1
        room -= length
    return num_samples, room


@njit(cache=True)
def pack_seeds(
    seeds: np.ndarray,
    fillers: np.ndarray,
    min_samples: int,
    max_samples: int,
    min_tokens: int,
    reuse_failed: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Packs that start with one seed each and are filled up from ``fillers``.

    ``seeds`` int64 (k, 2) rows [length, number], in the order they are tried; ``fillers`` int64
    (capacity + 1,) samples of each length. A pack with fewer than ``min_samples`` samples or
    ``min_tokens`` tokens is undone; its seed becomes a filler if ``reuse_failed``.
    Returns the lengths in all packs, int32, and the end of each pack in them, int64 (num_packs,).
    """
    # The densest length is only asked for between 80% of min_samples and min_samples.
    buckets = _make_buckets(fillers, 5 * (min_samples - 1) >= 4 * min_samples)
    lengths = np.empty(seeds[:, 1].sum() + fillers.sum(), np.int32)
    ends = np.empty(seeds[:, 1].sum(), np.int64)
    end = 0
    num_packs = 0
    for kind in range(seeds.shape[0]):
        for _ in range(seeds[kind, 1]):
            pack = lengths[end:]
            pack[0] = seeds[kind, 0]
            num_samples, room = _fill_pack(buckets, pack, min_samples, max_samples)
            if num_samples >= min_samples and fillers.shape[0] - 1 - room >= min_tokens:
                end += num_samples
                ends[num_packs] = end
                num_packs += 1
                continue
            for place in range(1, num_samples):
                _add_samples(buckets, pack[place], 1)
            if not reuse_failed:
                break  # another seed of this length would fail on the same fillers
            _add_samples(buckets, seeds[kind, 0], 1)
    return lengths[:end].copy(), ends[:num_packs].copy()

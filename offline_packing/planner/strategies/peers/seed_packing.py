"""Compiled phases of the hash-bucket strategy, on the histogram of lengths.

A length and its samples are one bucket; the kernels work on the number of samples in each. They
return entries int64 [length, repeat] and patterns int64 [end of entries, multiplicity].
"""

import numpy as np
from numba import njit

from offline_packing.planner.strategies.composition import as_rows, packs_within
from offline_packing.planner.strategies.kernels import (
    add_samples,
    bitset_at_least,
    bitset_at_most,
    bitset_of,
    list_of,
)


@njit(cache=True)
def _diverse_pack(lengths: np.ndarray, counts: np.ndarray, room: int, repeats: np.ndarray) -> bool:
    """One pack round robin over ``lengths`` (ascending); True if it is full. A length leaves the
    round when it is used up or does not fit any more."""
    repeats[:] = 0
    running = counts > 0
    while room > 0 and running.any():
        for index in range(lengths.shape[0]):
            if running[index] and lengths[index] <= room:
                repeats[index] += 1
                room -= lengths[index]
                running[index] = repeats[index] < counts[index]
            else:
                running[index] = False
    return room == 0


@njit(cache=True)
def _greedy_pack(lengths: np.ndarray, counts: np.ndarray, room: int, repeats: np.ndarray) -> bool:
    """One pack longest first; True if it is full. Each length divides the next, so this fills the
    pack whenever any choice of samples does."""
    for index in range(lengths.shape[0] - 1, -1, -1):
        repeats[index] = min(counts[index], room // lengths[index])
        room -= repeats[index] * lengths[index]
    return room == 0


@njit(cache=True)
def pack_divisors(lengths: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Exactly full packs of lengths that each divide the next and the capacity.

    Packs are as diverse as possible; where that cannot fill one more pack (a deadlock), one pack is
    filled greedily, and then diversity has its turn again. What stays is less than one pack.
    ``lengths`` int64 (k,) ascending, ``counts`` int64 (capacity + 1,): samples of each length.
    """
    counts = counts.copy()
    capacity = counts.shape[0] - 1
    entries, patterns = list_of((0, 0)), list_of((0, 0))
    repeats = np.zeros(lengths.shape[0], np.int64)
    while True:
        diverse = _diverse_pack(lengths, counts[lengths], capacity, repeats)
        if not diverse and not _greedy_pack(lengths, counts[lengths], capacity, repeats):
            return as_rows(entries), as_rows(patterns)
        start = len(entries)
        for index in np.flatnonzero(repeats):
            entries.append((lengths[index], repeats[index]))
        # A diverse choice repeats for as long as no length runs out.
        packs = packs_within(entries, start, counts) if diverse else 1
        counts[lengths] -= packs * repeats
        patterns.append((len(entries), packs))


@njit(cache=True)
def _densest_up_to(counts: np.ndarray, last: int) -> int:
    """The length in 1..last with most samples per token, the shorter if equal, or 0."""
    best = 0
    for length in range(1, last + 1):
        if counts[length] > 0 and (best == 0 or counts[length] * best > counts[best] * length):
            best = length
    return best


@njit(cache=True)
def _choose_filler(
    counts: np.ndarray, present: np.ndarray, room: int, num_samples: int, min_samples: int
) -> int:
    """Next length for a pack of ``num_samples`` so far, or -1 if nothing fits. Far from the
    required number of samples the shortest, close to it the length with most samples per token,
    beyond it the longest that fits."""
    if num_samples >= min_samples:
        length = bitset_at_most(present, room)
    elif 5 * num_samples < 4 * min_samples:
        length = bitset_at_least(present, 1)
    else:
        length = _densest_up_to(counts, room)
    return length if 0 < length <= room else -1


@njit(cache=True)
def pack_seeds(
    seeds: np.ndarray, fillers: np.ndarray, limits: tuple[int, int, int], reuse_failed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Packs that start with one seed each and are filled up from ``fillers``.

    ``seeds`` int64 (k, 2) rows [length, number], in the order they are tried; ``fillers`` int64
    (capacity + 1,) samples of each length; ``limits``: samples of a pack at least and at most, and
    tokens at least. A pack below them is undone; its seed becomes a filler if ``reuse_failed``.
    """
    min_samples, max_samples, min_tokens = limits
    counts, present = fillers.copy(), bitset_of(fillers)
    capacity = counts.shape[0] - 1
    entries, patterns = list_of((0, 0)), list_of((0, 0))
    for seed, number in seeds:
        for _ in range(number):
            start = len(entries)
            entries.append((seed, 1))
            room = capacity - seed
            while room > 0 and len(entries) - start < max_samples:
                size = len(entries) - start
                length = _choose_filler(counts, present, room, size, min_samples)
                if length < 0:
                    break
                add_samples(counts, present, length, -1)
                entries.append((length, 1))
                room -= length
            if len(entries) - start >= min_samples and capacity - room >= min_tokens:
                patterns.append((len(entries), 1))
                continue
            for length, _ in entries[start + 1 :]:
                add_samples(counts, present, length, 1)
            del entries[start:]
            if not reuse_failed:
                break  # another seed of this length would fail on the same fillers
            add_samples(counts, present, seed, 1)
    return as_rows(entries), as_rows(patterns)

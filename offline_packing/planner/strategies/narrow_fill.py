"""Exact fills for lengths of little spread: packs of k or k + 1 samples.

If all samples are of similar length (a fixed number of vision tokens plus a short text), there is
no short one to fill a gap: a pack is full with k samples longer than the average or k + 1 shorter
ones. Choosing longest first, or around the mean that a pack needs, leaves samples of medium length
that fill neither. So the samples are divided first: a range of lengths whose mean is
seq_length / (k + 1) for the packs of k + 1, and the rest, whose mean is then seq_length / k. In
either part random samples nearly fill a pack, and the last two are looked up to end exactly.

If even the shortest samples are too long for this number of packs of k + 1, no packing is full: the
shortest fill packs of k + 1 as long as they can, and the packs of k have room to spare.
"""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from offline_packing.planner.strategies.composition import (
    Composer,
    Composition,
    from_packs,
    join_compositions,
)
from offline_packing.planner.strategies.kernels import (
    Kernel,
    add_samples,
    bitset_at_least,
    bitset_at_most,
    bitset_of,
    random_below,
    random_state,
    shuffle_between,
)
from offline_packing.planner.strategies.longest_first import exact_fill

_TRIES = 50  # random starts of one pack before a part counts as used up
_MAX_SPREAD = 1_000_000  # patterns of packs that cannot be full, with each its own samples


class _Pool(NamedTuple):
    """Samples that are in no pack yet, to be taken at random or by their length."""

    #: int64 (capacity + 1,): samples of each length
    counts: np.ndarray
    #: bit set of the lengths with samples
    present: np.ndarray
    #: int32 (num_samples,): lengths in random order, a ring
    queue: np.ndarray
    #: int64 (2,): head and tail of the queue
    ends: np.ndarray
    #: int64 (capacity + 1,): entries of the queue whose sample was taken by its length
    stale: np.ndarray


@Kernel
def _take(pool: _Pool, length: int) -> None:
    """Take a sample by its length; its entry stays in the queue, to be skipped there."""
    add_samples(pool.counts, pool.present, length, -1)
    pool.stale[length] += 1


@Kernel
def _draw(pool: _Pool) -> int:
    """Take a random sample, and return its length; there must be one."""
    while True:
        length = pool.queue[pool.ends[0] % pool.queue.shape[0]]
        pool.ends[0] += 1
        if pool.stale[length] == 0:
            add_samples(pool.counts, pool.present, length, -1)
            return length
        pool.stale[length] -= 1


@Kernel
def _put_back(pool: _Pool, length: int) -> None:
    if pool.stale[length] > 0:
        pool.stale[length] -= 1
    else:
        pool.queue[pool.ends[1] % pool.queue.shape[0]] = length
        pool.ends[1] += 1
    add_samples(pool.counts, pool.present, length, 1)


@Kernel
def _find_pair(pool: _Pool, space: int, state: np.ndarray) -> int:
    """Find the shorter of two lengths with samples that add up to ``space``, or -1."""
    first = max(bitset_at_least(pool.present, 1), space - (pool.counts.shape[0] - 1))
    if first > space // 2:
        return -1
    start = first + random_below(state, space // 2 - first + 1)
    for low, high in ((start, space // 2), (first, start - 1)):
        length = bitset_at_least(pool.present, low)
        while 0 < length <= high:
            other = space - length
            if pool.counts[other] > (1 if other == length else 0):
                return length
            length = bitset_at_least(pool.present, length + 1)
    return -1


@Kernel
def _draw_pack(pool: _Pool, pack: np.ndarray, first: int, state: np.ndarray) -> bool:
    """Fill ``pack``, int32 (k,), exactly, from a sample of length ``first``. If no two samples fill
    it up, everything is put back."""
    capacity = pool.counts.shape[0] - 1
    size = pack.shape[0]
    _take(pool, first)
    pack[0] = first
    tokens = first
    spare = _draw(pool)
    for place in range(1, size - 2):
        # Of two candidates, take the one that brings the pack closer to an even filling.
        wanted = capacity * (place + 1) // size - tokens
        length = _draw(pool)
        if abs(spare - wanted) < abs(length - wanted):
            length, spare = spare, length
        pack[place] = length
        tokens += length
    _put_back(pool, spare)
    length = _find_pair(pool, capacity - tokens, state)
    if length < 0:
        for place in range(size - 2):
            _put_back(pool, pack[place])
        return False
    pack[size - 2] = length
    pack[size - 1] = capacity - tokens - length
    _take(pool, pack[size - 2])
    _take(pool, pack[size - 1])
    return True


@Kernel
def _fill_part(part: np.ndarray, samples_per_pack: int, state: np.ndarray) -> np.ndarray:
    """Fill packs of ``samples_per_pack`` >= 3 samples from ``part`` exactly. ``part`` int64
    (capacity + 1,) counts per length, of a mean near capacity / samples_per_pack. Returns the
    lengths, int32 (num_packs, samples_per_pack)."""
    capacity = part.shape[0] - 1
    num_samples = part.sum()
    tokens = (part * np.arange(part.shape[0])).sum()
    queue = np.repeat(np.arange(part.shape[0], dtype=np.int32), part)
    ends = np.array([0, num_samples])
    shuffle_between(queue, ends, state)
    pool = _Pool(part.copy(), bitset_of(part), queue, ends, np.zeros_like(part))
    packs = np.empty((num_samples // samples_per_pack, samples_per_pack), np.int32)
    num_packs = 0
    failures = 0
    while num_samples >= samples_per_pack and failures < _TRIES:
        # Extremes first, from the side that moves the mean of the rest to where it should be.
        if failures % 2 == 1:
            first = _draw(pool)
            _put_back(pool, first)
        elif tokens * samples_per_pack > num_samples * capacity:
            first = bitset_at_most(pool.present, capacity)
        else:
            first = bitset_at_least(pool.present, 1)
        if _draw_pack(pool, packs[num_packs], first, state):
            num_packs += 1
            num_samples -= samples_per_pack
            tokens -= capacity
            failures = 0
        else:
            failures += 1
    return packs[:num_packs]


def _divide(counts: np.ndarray) -> tuple[int, np.ndarray, np.ndarray, bool]:
    """Split ``counts`` into parts for packs of k and of k + 1 samples. The second part is a range
    of the sorted samples: the number that its packs need, with a sum at the capacity of these
    packs, or just below. Returns k, the counts of both parts, and whether packs of both can be
    full; else only packs of the second."""
    capacity = len(counts) - 1
    samples_below = np.append(0, np.cumsum(counts))  # samples shorter than l
    tokens_below = np.append(0, np.cumsum(counts * np.arange(len(counts))))
    num_samples, num_tokens = int(samples_below[-1]), int(tokens_below[-1])
    num_packs = num_tokens // capacity
    if num_packs == 0:
        return 0, counts, np.zeros_like(counts), True
    per_pack = num_samples * capacity / num_tokens
    k = int(per_pack)

    def tokens_between(start: int, end: int) -> int:
        ends = np.array([start, end])
        lengths = np.searchsorted(samples_below, ends, side="right") - 1
        tokens = tokens_below[lengths] + (ends - samples_below[lengths]) * lengths
        return int(tokens[1] - tokens[0])

    def shortest_per_pack(packs: int) -> int:
        return -(-tokens_between(0, packs * (k + 1)) // packs)

    larger_packs = min(round((per_pack - k) * num_packs), num_samples // (k + 1))
    is_full = larger_packs == 0 or shortest_per_pack(larger_packs) <= capacity
    if not is_full:
        larger_packs = bisect_right(range(1, larger_packs), capacity, key=shortest_per_pack)
    size = larger_packs * (k + 1)
    starts = range(num_samples - size + 1)
    low = bisect_right(starts, larger_packs * capacity, key=lambda s: tokens_between(s, s + size))
    low = max(1, low) - 1
    end = np.clip(low + size - samples_below[:-1], 0, counts)
    start = np.clip(low - samples_below[:-1], 0, counts)
    return k, counts - (end - start), end - start, is_full


def narrow_fill(counts: np.ndarray, *, seed: int = 0, max_patterns: int = 20_000) -> Composition:
    """Fill packs of k and k + 1 samples, k the mean number of samples that fill a pack; where the
    packs of k cannot be full, make even ones; pack the rest, which is almost everything where
    lengths are not narrow, by exact fills. Each pattern serves enough packs that about
    ``max_patterns`` patterns suffice; what such patterns leave is filled by patterns that serve
    fewer."""
    left = counts.copy()
    state, found = random_state(seed), list[Composition]()

    def take(packs: np.ndarray, copies: int) -> None:
        found.append(from_packs(packs, copies))
        np.subtract(left, found[-1].used_counts(len(left)), out=left)

    num_packs = int(left @ np.arange(len(left))) // (len(left) - 1)
    copies = max(1, num_packs // max_patterns)
    while True:
        k, smaller, larger, is_full = _divide(left // copies)
        if k < 3:
            break
        before = left.sum()
        if is_full:
            take(_fill_part(smaller, k, state), copies)
        take(_fill_part(larger, k + 1, state), copies)
        if not is_full and left.sum() == before:
            take(even_packs(larger, k + 1), copies)
        # Dividing again what two parts could not use takes the means to where they should be.
        if left.sum() == before:
            if copies == 1:
                break
            copies //= 2
    copies = 1 + num_packs // _MAX_SPREAD
    while k >= 3 and not is_full and copies > 0:
        take(even_packs(left // copies, k), copies)
        copies //= 2
    return join_compositions([*found, exact_fill(left)])


def is_narrow(counts: np.ndarray) -> bool:
    """Tell whether these lengths suit narrow fills: deviation below half the mean."""
    lengths = np.arange(len(counts), dtype=np.float64)
    samples, tokens, squares = counts.sum(), counts @ lengths, counts @ lengths**2
    # variance < (mean / 2) ** 2, times the squared number of samples
    return bool(samples * squares - tokens**2 < tokens**2 / 4)


def fills_by_fitness(counts: np.ndarray) -> tuple[Composer, Composer]:
    """Return the two methods of exact fills, first the one that is made for such lengths."""
    return (narrow_fill, exact_fill) if is_narrow(counts) else (exact_fill, narrow_fill)


def even_packs(part: np.ndarray, samples_per_pack: int) -> np.ndarray:
    """Make even packs of at most ``samples_per_pack`` samples. Very long ones are put beside the
    very shortest, until they fit. Returns the packs of at most seq_length tokens, as lengths, int64
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
    """Pack all samples: the longest that remain go to the packs with the fewest tokens, one each.
    ``lengths`` descending. Returns int64 (num_packs, samples_per_pack), 0 for no sample."""
    packs = np.zeros((num_packs, samples_per_pack), np.int64)
    for place in range(samples_per_pack):
        longest = lengths[place * num_packs : (place + 1) * num_packs]
        emptiest = np.argsort(packs.sum(axis=1), kind="stable")[: len(longest)]
        packs[emptiest, place] = longest
    return packs

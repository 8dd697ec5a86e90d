"""Packs of the few samples that wait while a stream is packed, in microseconds.

Other strategies walk a histogram of seq_length + 1 counts; here the cost depends on the samples. A
pack is a sample, then others until little room is left, then the subset of the next ones that fills
this room best, found by dynamic programming: a bit set of the sums that a subset of the first i
candidates has, for each i. One step adds a candidate of length l, a shift by l bits.

*By age*, where a pack holds many samples: the oldest begin a pack, and the oldest fill it. Almost
any few dozen samples have a subset that fills it exactly, and what waits has the lengths of the
stream: lengths chosen first to last would leave those that fit nowhere.

*Longest first*, where it holds few: a long sample needs one other that fits nearly, and two where
one would do are missing elsewhere. So the longest that fits joins if the rest can then be filled
exactly; else one of the next shorter ones, for which that holds, or that comes closest.
"""

from typing import NamedTuple

import numpy as np

from offline_packing.planner.strategies.kernels import Kernel, bitset_at_most
from offline_packing.planner.strategies.strategy import Packs, group_into_packs

_MEAN_SAMPLES = 24  # mean samples for whose room a subset is sought
_CANDIDATES = 32  # for a whole pack; more for less room
_LONGEST_SAMPLES = 8  # the same where they are chosen longest first, in the longest that fit
_WORDS_PER_SAMPLE = 24  # there, so that the longest of many are not the only candidates
_TRIES = 12  # lengths that may join before the subset
#: words of bit sets: for each new sample, and for each word that the set of a whole pack has
_WORK_PER_SAMPLE, _WORK_PER_WORD = 2000, 100
_ONE = np.uint64(1)


class _Pool(NamedTuple):
    """Samples by their place in the order in which they are tried."""

    #: int64 (n,)
    lengths: np.ndarray
    #: int64 (n,): -1 without a pack
    pack_of: np.ndarray
    #: int64 (n + 1,): a free place, or n, points to itself, another to one nearer to the next free
    next_free: np.ndarray
    #: uint64: room for the bit sets of one search
    words: np.ndarray
    #: int64: places of its candidates, from index 1 on
    candidates: np.ndarray
    #: int64 (1,): words that may still be computed
    work: np.ndarray


@Kernel
def _free_from(pool: _Pool, place: int) -> int:
    """Find the first place without a pack from here on, or n."""
    free = place
    while pool.next_free[free] != free:
        free = pool.next_free[free]
    while pool.next_free[place] != free:
        after = pool.next_free[place]
        pool.next_free[place] = free
        place = after
    return free


@Kernel
def _first_within(pool: _Pool, start: int, room: int) -> int:
    """Find the first free place from ``start`` on, where lengths descend, that ``room`` suffices
    for."""
    end = pool.lengths.shape[0]
    while start < end:
        middle = (start + end) // 2
        if pool.lengths[middle] > room:
            start = middle + 1
        else:
            end = middle
    return _free_from(pool, start)


@Kernel
def _put(pool: _Pool, place: int, pack: int) -> int:
    """Put a sample into a pack, and return its length."""
    pool.pack_of[place] = pack
    pool.next_free[place] = place + 1
    return pool.lengths[place]


@Kernel
def _seek_subset(pool: _Pool, start: int, room: int) -> tuple[int, int]:
    """Find the most tokens within ``room`` > 0 of free samples from ``start`` on, and the number of
    candidates among which they are. Ends at an exact fill."""
    num_words = (room >> 6) + 1
    words = pool.words
    words[:num_words] = 0
    words[0] = 1
    most = words.shape[0] // num_words - 1
    number = 0
    place = _free_from(pool, start)
    while place < pool.lengths.shape[0] and number < most:
        length = pool.lengths[place]
        if length <= room:
            before = number * num_words
            number += 1
            after = number * num_words
            pool.candidates[number] = place
            skipped = length >> 6
            shift, back = np.uint64(length & 63), np.uint64(63 - (length & 63))
            carry = np.uint64(0)  # bits that the shift moves out of a word
            for word in range(skipped):
                words[after + word] = words[before + word]
            for word in range(skipped, num_words):
                source = words[before + word - skipped]
                words[after + word] = words[before + word] | (source << shift) | carry
                carry = (source >> _ONE) >> back
            if (words[after + (room >> 6)] >> np.uint64(room & 63)) & _ONE:
                break
        place = _free_from(pool, place + 1)
    pool.work[0] -= (number + 1) * num_words
    sums = words[number * num_words : (number + 1) * num_words]
    return bitset_at_most(sums, room), number


@Kernel
def _put_subset(pool: _Pool, room: int, tokens: int, number: int, pack: int) -> None:
    """Put the subset into a pack that was just sought for this ``room``."""
    num_words = (room >> 6) + 1
    while tokens > 0:
        number -= 1
        word = pool.words[number * num_words + (tokens >> 6)]
        if (word >> np.uint64(tokens & 63)) & _ONE == 0:  # the first candidates do not suffice
            tokens -= _put(pool, pool.candidates[number + 1], pack)


@Kernel
def _fill_by_age(pool: _Pool, num_first: int, seq_length: int) -> int:
    """Number of packs made until the work is used up; the first begins with ``num_first`` samples,
    if not 0."""
    num_samples = pool.lengths.shape[0]
    reach = _MEAN_SAMPLES * (pool.lengths.sum() // num_samples + 1)
    num_packs = 0
    oldest = 0
    while oldest < num_samples and pool.work[0] > 0:
        room = seq_length
        for place in range(oldest, oldest + max(1, num_first)):
            room -= _put(pool, place, num_packs)
        num_first = 0
        place = _free_from(pool, oldest)
        while place < num_samples and room > reach:
            if pool.lengths[place] <= room:
                room -= _put(pool, place, num_packs)
            place = _free_from(pool, place + 1)
        if room > 0:
            tokens, number = _seek_subset(pool, oldest, room)
            _put_subset(pool, room, tokens, number, num_packs)
        num_packs += 1
        oldest = _free_from(pool, oldest)
    return num_packs


@Kernel
def _join_well(pool: _Pool, start: int, room: int, pack: int) -> None:
    """Fill a pack with a sample, of the lengths from ``start`` on, and a subset of shorter ones."""
    best = best_place = last = tries = number = 0
    place = start
    while place < pool.lengths.shape[0] and tries < _TRIES and best < room:
        length = pool.lengths[place]
        if length != last:
            last = length
            tries += 1
            tokens = 0
            shorter = _first_within(pool, place + 1, room - length)
            if shorter < pool.lengths.shape[0]:
                tokens, number = _seek_subset(pool, shorter, room - length)
            pool.work[0] -= 8
            if length + tokens > best:
                best = length + tokens
                best_place = place
        place = _free_from(pool, place + 1)
    length = _put(pool, best_place, pack)
    if best > length:
        if best < room:  # others were tried after it
            shorter = _first_within(pool, best_place, room - length)
            _, number = _seek_subset(pool, shorter, room - length)
        _put_subset(pool, room - length, best - length, number, pack)


@Kernel
def _fill_longest_first(pool: _Pool, num_first: int, seq_length: int, num_packs: int) -> None:
    """Fill packs after ``num_packs`` others; the first begins with ``num_first`` samples, after
    which lengths descend. Without work left, the longest that fits joins."""
    num_samples = pool.lengths.shape[0]
    descending = num_first
    longest = 0
    while longest < num_samples:
        room = seq_length
        for place in range(longest, longest + max(1, num_first)):
            room -= _put(pool, place, num_packs)
        num_first = 0
        place = _first_within(pool, max(longest, descending), room)
        while place < num_samples:
            if pool.work[0] > 0 and room <= _LONGEST_SAMPLES * pool.lengths[place]:
                _join_well(pool, place, room, num_packs)
                break
            room -= _put(pool, place, num_packs)
            place = _first_within(pool, place, room)
        num_packs += 1
        longest = _free_from(pool, longest)


def subset_fill(lengths: np.ndarray, num_due: int, seq_length: int, num_new: int) -> Packs:
    """Pack all samples, int64 (num_samples,) lengths from the oldest to the newest. The first
    ``num_due`` begin one pack if it has room for them; ``num_new`` samples bound the work."""
    num_samples, tokens = len(lengths), int(lengths.sum())
    num_first = num_due if lengths[:num_due].sum() <= seq_length else 0
    num_words = (seq_length >> 6) + 1
    words = np.empty(max((_CANDIDATES + 1) * num_words, _WORDS_PER_SAMPLE * num_samples), np.uint64)
    candidates = np.empty(num_samples + 1, np.int64)
    work = np.array([_WORK_PER_SAMPLE * num_new + _WORK_PER_WORD * num_words])

    def pool_of(places: np.ndarray, num_words: int) -> _Pool:
        free, nowhere = np.arange(len(places) + 1), np.full(len(places), -1)
        return _Pool(lengths[places], nowhere, free, words[:num_words], candidates, work)

    places, num_packs = np.arange(num_samples), 0
    pack_of = np.full(num_samples, -1)
    long_tokens = int(lengths[lengths > seq_length // 2].sum())
    if 8 * tokens < 3 * seq_length * num_samples and 4 * long_tokens < tokens:
        pool = pool_of(places, (_CANDIDATES + 1) * num_words)
        num_packs, num_first = _fill_by_age(pool, num_first, seq_length), 0
        pack_of = pool.pack_of
        places = np.flatnonzero(pack_of < 0)
    if len(places):
        rest = places[num_first:]
        longest_first = rest[np.argsort(-lengths[rest], kind="stable")]
        order = np.concatenate([places[:num_first], longest_first])
        pool = pool_of(order, len(words))
        _fill_longest_first(pool, num_first, seq_length, num_packs)
        pack_of[order] = pool.pack_of
    return group_into_packs(np.arange(num_samples), pack_of)

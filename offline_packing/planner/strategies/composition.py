"""Composition of packs from lengths, before samples are assigned.

A *pattern* is a multiset of lengths that fills one pack; a *composition* says how many packs use
each pattern. Lengths are integers up to ``seq_length``, so a composition is found on the histogram
of lengths and its size hardly depends on the number of samples.

A histogram is ``counts``, int64 (seq_length + 1,): ``counts[l]`` samples have length l and
``counts[0]`` is 0.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import numpy as np

from offline_packing.planner.strategies.kernels import (
    Kernel,
    counting_sort,
    random_state,
    shuffle_between,
)
from offline_packing.planner.strategies.strategy import Packs, Strategy

#: entries [length, times], or patterns [end of entries, multiplicity]
Pairs = list[tuple[Any, Any]]


class Composition(NamedTuple):
    """Patterns and how often each is used.

    Two packs [5, 2, 2] and one pack [4]:
    ``lengths [5, 2, 4]``, ``times [1, 2, 1]``, ``offsets [0, 2, 3]``, ``multiplicity [2, 1]``.
    """

    #: int32 (num_entries,): length of each entry
    lengths: np.ndarray
    #: int32 (num_entries,): how often the pattern holds that length, >= 1
    times: np.ndarray
    #: int64 (num_patterns + 1,): entries of pattern j are offsets[j]:offsets[j + 1]
    offsets: np.ndarray
    #: int64 (num_patterns,): number of packs that use pattern j, >= 1
    multiplicity: np.ndarray
    #: proved by the composer: no packing of these lengths has fewer packs; 0 if it proved nothing
    lower_bound: int = 0

    @property
    def num_packs(self) -> int:
        """Number of packs, counted with multiplicity."""
        return int(self.multiplicity.sum())

    def pattern_tokens(self) -> np.ndarray:
        """Return the tokens in one pack of each pattern: int64 (num_patterns,)."""
        tokens = np.cumsum(np.append(0, self.lengths.astype(np.int64) * self.times))
        return np.diff(tokens[self.offsets])

    def used_counts(self, size: int) -> np.ndarray:
        """Count the lengths that the packs use: int64 (size,)."""
        per_entry = self.times * np.repeat(self.multiplicity, np.diff(self.offsets))
        used = np.bincount(self.lengths, weights=per_entry, minlength=size)
        return used.astype(np.int64)


#: Decides the packs on ``counts``, int64 (seq_length + 1,): f(counts, *, seed=0).
Composer = Callable[..., Composition]


def from_entries(entries: np.ndarray, patterns: np.ndarray) -> Composition:
    """Make a composition of int64 entries [length, times] and patterns [end of entries,
    multiplicity]."""
    lengths, times = np.ascontiguousarray(entries.T, np.int32)
    ends, multiplicity = np.ascontiguousarray(patterns.T)
    return Composition(lengths, times, np.append(0, ends), multiplicity)


def unseeded(kernel: Callable[..., tuple[np.ndarray, np.ndarray]]) -> Composer:
    """Make the composer of a kernel that turns counts into entries and patterns, as `from_entries`
    takes them; its ``seed`` is unused."""

    @wraps(kernel, updated=())
    def compose(counts: np.ndarray, *, seed: int = 0) -> Composition:
        return from_entries(*kernel(counts))

    return compose


def from_packs(packs: np.ndarray, copies: int) -> Composition:
    """Make a composition of packs as lengths, (num_packs, samples_per_pack), 0 for none; each
    serves ``copies``."""
    packs = np.sort(packs, axis=1)
    lengths = packs[packs > 0].astype(np.int32)
    offsets = np.append(0, np.cumsum(np.count_nonzero(packs, axis=1)))
    return Composition(lengths, np.ones_like(lengths), offsets, np.full(len(packs), copies))


def join_compositions(parts: Sequence[Composition]) -> Composition:
    """Join the packs of all parts, in their order, into one composition; there must be one."""
    sizes = np.concatenate([[0], *(np.diff(part.offsets) for part in parts)])
    return Composition(
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.times for part in parts]),
        np.cumsum(sizes, dtype=np.int64),
        np.concatenate([part.multiplicity for part in parts]),
    )


def select_patterns(composition: Composition, chosen: np.ndarray) -> Composition:
    """Return the patterns with these indices, in this order, with their multiplicity."""
    lengths, times, starts, multiplicity, _ = composition
    sizes = np.diff(starts)[chosen]
    offsets = np.append(0, np.cumsum(sizes))
    entries = np.repeat(starts[:-1][chosen] - offsets[:-1], sizes) + np.arange(offsets[-1])
    return Composition(lengths[entries], times[entries], offsets, multiplicity[chosen])


@Kernel
def as_rows(pairs: Pairs) -> np.ndarray:
    """Return the pairs as int64 (n, 2)."""
    rows = np.empty((len(pairs), 2), np.int64)
    for row in range(len(pairs)):
        rows[row, 0], rows[row, 1] = pairs[row]
    return rows


@Kernel
def add_runs(entries: Pairs, lengths: np.ndarray) -> None:
    """Append an entry for each run of equal lengths: [5, 2, 2] -> (5, 1), (2, 2)."""
    start = 0
    for place in range(1, lengths.shape[0] + 1):
        if place == lengths.shape[0] or lengths[place] != lengths[start]:
            entries.append((lengths[start], place - start))
            start = place


@Kernel
def packs_within(entries: Pairs, start: int, counts: np.ndarray) -> int:
    """Number of packs of the pattern ``entries[start:]`` the counts allow."""
    packs = 1 << 62
    for entry in range(start, len(entries)):
        length, times = entries[entry]
        packs = min(packs, counts[length] // times)
    return packs


@Kernel
def _fill_packs(composition: Composition, ids: np.ndarray, next_id: np.ndarray, out: Packs) -> None:
    """Take the ``ids`` of each length in their order, pattern after pattern, pack after pack.
    ``next_id[l]``: where the ids of length l begin, and then the first that is not taken."""
    lengths, times, offsets, multiplicity, _ = composition
    pack = 0
    end = 0
    for pattern in range(multiplicity.shape[0]):
        for _ in range(multiplicity[pattern]):
            for entry in range(offsets[pattern], offsets[pattern + 1]):
                source = next_id[lengths[entry]]
                for _ in range(times[entry]):
                    out.sample_ids[end] = ids[source]
                    source += 1
                    end += 1
                next_id[lengths[entry]] = source
            pack += 1
            out.pack_offsets[pack] = end


def expand_composition(
    composition: Composition, num_tokens: np.ndarray, counts: np.ndarray, *, seed: int | None = None
) -> Packs:
    """Give every place in the composition a sample of its length.

    ``num_tokens`` int32 (num_samples,), ``counts`` its histogram, which the composition uses up
    exactly. With a ``seed`` the choice among equal lengths is random, else in sample order.
    Packs come out in the order of the composition. O(num_samples).
    """
    id_type = np.int32 if len(num_tokens) < 2**31 else np.int64
    ids = np.empty(len(num_tokens), id_type)
    starts = np.append(0, np.cumsum(counts))
    counting_sort(num_tokens, starts, ids)
    if seed is not None:
        shuffle_between(ids, starts, random_state(seed))
    packs = Packs(np.empty_like(ids), np.zeros(composition.num_packs + 1, np.int64))
    _fill_packs(composition, ids, starts[:-1].copy(), packs)
    assert packs.pack_offsets[-1] == len(num_tokens), "the composition must use every sample once"
    return packs


def room_of(num_tokens: np.ndarray, seq_length: int) -> int:
    """Return the tokens that a pack can hold of these: composing takes memory and time of this
    number."""
    return max(1, min(seq_length, int(num_tokens.sum(dtype=np.int64))))


@Kernel
def count_lengths(num_tokens: np.ndarray, seq_length: int) -> np.ndarray:
    """Count lengths that are all in 1..seq_length: int64 (seq_length + 1,). Unlike ``np.bincount``
    this makes no int64 copy of the lengths."""
    counts = np.zeros(seq_length + 1, np.int64)
    for sample in range(num_tokens.shape[0]):
        counts[num_tokens[sample]] += 1
    return counts


def lower_bound(counts: np.ndarray) -> int:
    """Prove that no packing of these lengths has fewer packs: return the largest of three bounds.

    L1 = ceil(tokens / seq_length). L2 (Martello and Toth, 1990) adds that samples above half of the
    capacity never share a pack, and that the room beside them is limited. The third counts samples:
    of those of some length and more, no pack holds more than the number of the shortest that fit.
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
    # The shortest from ``small`` on fit up to length ``end``, and of ``end`` itself some.
    small = np.append(0, np.flatnonzero(counts[: half + 1]))
    most = capacity - small + 1
    alone = samples_below[-1] - samples_below[most]
    filled = tokens_below[small] + capacity
    end = np.searchsorted(tokens_below, filled, side="right") - 1
    fitting = samples_below[end] - samples_below[small]
    fitting += (filled - tokens_below[end]) // np.maximum(1, end)
    others = samples_below[most] - samples_below[small]
    by_number = alone - (-others // np.maximum(1, fitting))
    return max(-(-int(tokens_below[-1]) // capacity), int(packs.max()), int(by_number.max()))


#: functions that `dual_feasible_bound` tries at most, and about how many values of all of them
_MAX_FUNCTIONS, _MAX_VALUES = 200, 200_000
_MAX_PARTS = 16  # equal parts of a pack whose ends are tried first
_MANY_LENGTHS = 20_000  # different lengths from which the simple bounds must do


def dual_feasible_bound(counts: np.ndarray) -> tuple[int, np.ndarray]:
    """Return a lower bound of the number of packs, and the prices that prove it, in packs: float64
    (seq_length + 1,). It is sharper than :func:`lower_bound` where lengths waste room in any pack,
    such as multiples of an image's tokens and a short text, and takes some milliseconds. 0 where
    different lengths are very many.

    A dual feasible function gives each length a price, so that no pattern costs more than a pack.
    Tried are u^(k) of Fekete and Schepers (2001), which rounds to k parts of a pack, and the
    rounding to multiples of k of Carlier, Clautiaux and Moukrim (2007); each also after samples
    below a threshold are left out, and samples that fit beside none of the others are whole packs
    (Martello and Toth's function).
    """
    capacity, sizes = len(counts) - 1, np.flatnonzero(counts)
    prices = np.zeros(len(counts))
    if not 0 < len(sizes) < _MANY_LENGTHS:
        return 0, prices
    number = min(_MAX_FUNCTIONS, max(2 * _MAX_PARTS, _MAX_VALUES // len(sizes))) // 2
    k = np.arange(1, number + 1)[:, np.newaxis]
    parts, rest = np.divmod((k + 1) * sizes, capacity)
    values = [np.where(rest == 0, k * parts, (k + 1) * parts)]
    wholes = [k * (k + 1)]
    lows = sizes[2 * sizes <= capacity]
    ends = capacity // np.arange(2, _MAX_PARTS + 1) + 1
    k = np.unique(np.append(ends, lows[:: 1 + len(lows) // (number - len(ends))]))
    k = k[2 * k <= capacity, np.newaxis]
    top, below = capacity // k, np.minimum(sizes, capacity - sizes) // k
    centred = np.where(2 * sizes == capacity, top, 2 * below)
    values.append(np.where(2 * sizes > capacity, 2 * (top - below), centred))
    wholes.append(2 * top)
    value, whole = np.concatenate(values), np.concatenate(wholes)
    # Of each function the sum over the samples from a threshold on, those alone at a whole pack.
    lows = np.append(0, lows)
    first, last = np.searchsorted(sizes, [lows, capacity - lows + 1])
    sums = np.cumsum(value * counts[sizes], axis=1)
    sums = np.concatenate([np.zeros_like(whole), sums], axis=1)
    samples = np.append(0, np.cumsum(counts[sizes]))
    worth = sums[:, last] - sums[:, first] + (samples[-1] - samples[last]) * whole
    row, column = np.unravel_index(np.argmax(worth / whole), worth.shape)
    chosen = slice(first[column], last[column])
    prices[sizes[chosen]] = value[row, chosen] / whole[row]
    prices[sizes[last[column] :]] = 1.0
    return int((-(-worth // whole)).max()), prices


def by_histogram(compose: Composer, under_limits: Callable[..., Packs] | None = None) -> Strategy:
    """Make the strategy of a composer: samples of equal length are taken in their order. Under
    further limits the strategy is ``under_limits(sizes, limits, seed=seed)``, if it can honour
    any."""

    def pack(sizes: np.ndarray, limits: np.ndarray, *, seed: int) -> Packs:
        if under_limits is not None and len(limits) > 1:
            return under_limits(sizes, limits, seed=seed)
        lengths = np.ascontiguousarray(sizes[:, 0], np.int32)
        counts = count_lengths(lengths, room_of(lengths, int(limits[0])))
        return expand_composition(compose(counts, seed=seed), lengths, counts)

    return Strategy(pack, lengths_only=under_limits is None)

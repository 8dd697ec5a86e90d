"""Composition of packs from lengths, before samples are assigned.

A *pattern* is a multiset of lengths that fills one pack; a *composition* says how many packs use
each pattern. Lengths are integers up to ``seq_length``, so a composition is found on the histogram
of lengths and its size hardly depends on the number of samples.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from offline_packing.planner.strategies.kernels import (
    counting_sort,
    random_state,
    shuffle_between,
)
from offline_packing.planner.strategies.strategy import Packs

#: entries [length, repeat], or patterns [end of entries, multiplicity]
Pairs = list[tuple[Any, Any]]


class Composition(NamedTuple):
    """Patterns and how often each is used.

    Two packs [5, 2, 2] and one pack [4]:
    ``lengths [5, 2, 4]``, ``repeats [1, 2, 1]``, ``offsets [0, 2, 3]``, ``multiplicity [2, 1]``.
    """

    #: int32 (num_entries,): length of each entry
    lengths: np.ndarray
    #: int32 (num_entries,): how often the pattern holds that length, >= 1
    repeats: np.ndarray
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
        """Tokens in one pack of each pattern: int64 (num_patterns,)."""
        tokens = np.cumsum(np.append(0, self.lengths.astype(np.int64) * self.repeats))
        return np.diff(tokens[self.offsets])

    def used_counts(self, size: int) -> np.ndarray:
        """Histogram of the lengths that the packs use: int64 (size,)."""
        per_entry = self.repeats * np.repeat(self.multiplicity, np.diff(self.offsets))
        used = np.bincount(self.lengths, weights=per_entry, minlength=size)
        return used.astype(np.int64)


#: Decides the packs on ``counts``, int64 (seq_length + 1,): f(counts, *, seed=0).
Composer = Callable[..., Composition]


def from_entries(entries: np.ndarray, patterns: np.ndarray) -> Composition:
    """Composition of int64 entries [length, repeat] and patterns [end of entries, multiplicity]."""
    lengths, repeats = np.ascontiguousarray(entries.T, np.int32)
    ends, multiplicity = np.ascontiguousarray(patterns.T)
    return Composition(lengths, repeats, np.append(0, ends), multiplicity)


def from_packs(packs: np.ndarray, copies: int) -> Composition:
    """``packs`` as lengths, (num_packs, samples_per_pack), 0 for none; each serves ``copies``."""
    packs = np.sort(packs, axis=1)
    lengths = packs[packs > 0]
    entries = np.stack([lengths, np.ones_like(lengths)], axis=1)
    ends = np.cumsum(np.count_nonzero(packs, axis=1))
    return from_entries(entries, np.stack([ends, np.full(len(packs), copies)], axis=1))


_NO_PAIRS = np.zeros((0, 2), np.int64)
#: no packs
EMPTY = from_entries(_NO_PAIRS, _NO_PAIRS)


def join_compositions(parts: Sequence[Composition]) -> Composition:
    """One composition with the packs of all parts, in their order."""
    parts = [EMPTY, *parts]
    sizes = np.concatenate([[0], *(np.diff(part.offsets) for part in parts)])
    return Composition(
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.repeats for part in parts]),
        np.cumsum(sizes, dtype=np.int64),
        np.concatenate([part.multiplicity for part in parts]),
    )


def select_patterns(composition: Composition, chosen: np.ndarray) -> Composition:
    """The patterns with these indices, in this order, with their multiplicity."""
    lengths, repeats, starts, multiplicity, _ = composition
    sizes = np.diff(starts)[chosen]
    offsets = np.append(0, np.cumsum(sizes))
    entries = np.repeat(starts[:-1][chosen] - offsets[:-1], sizes) + np.arange(offsets[-1])
    return Composition(lengths[entries], repeats[entries], offsets, multiplicity[chosen])


@njit(cache=True)
def as_rows(pairs: Pairs) -> np.ndarray:
    """The pairs as int64 (n, 2)."""
    rows = np.empty((len(pairs), 2), np.int64)
    for row in range(len(pairs)):
        rows[row, 0], rows[row, 1] = pairs[row]
    return rows


@njit(cache=True)
def add_runs(entries: Pairs, lengths: np.ndarray) -> None:
    """Append an entry for each run of equal lengths: [5, 2, 2] -> (5, 1), (2, 2)."""
    start = 0
    for place in range(1, lengths.shape[0] + 1):
        if place == lengths.shape[0] or lengths[place] != lengths[start]:
            entries.append((lengths[start], place - start))
            start = place


@njit(cache=True)
def packs_within(entries: Pairs, start: int, counts: np.ndarray) -> int:
    """Number of packs of the pattern ``entries[start:]`` the counts allow."""
    packs = 1 << 62
    for entry in range(start, len(entries)):
        length, repeat = entries[entry]
        packs = min(packs, counts[length] // repeat)
    return packs


@njit(cache=True)
def _fill_packs(composition: Composition, ids: np.ndarray, next_id: np.ndarray, out: Packs) -> None:
    """Take the ``ids`` of each length in their order, pattern after pattern, pack after pack.
    ``next_id[l]``: where the ids of length l begin, and then the first that is not taken."""
    lengths, repeats, offsets, multiplicity, _ = composition
    pack = 0
    end = 0
    for pattern in range(multiplicity.shape[0]):
        for _ in range(multiplicity[pattern]):
            for entry in range(offsets[pattern], offsets[pattern + 1]):
                source = next_id[lengths[entry]]
                for _ in range(repeats[entry]):
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

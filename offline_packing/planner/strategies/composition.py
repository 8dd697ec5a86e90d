"""What the packs are made of, before anyone decides which sample goes where.

A *pattern* is a multiset of lengths that fills one pack; a *composition* says how many packs use
each pattern. Lengths are integers up to ``seq_length``, so a composition is found on the histogram
of lengths and its size hardly depends on the number of samples.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit


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

    def pattern_sums(self, values: np.ndarray) -> np.ndarray:
        """Sum of ``values`` (one per entry) over each pattern: (num_patterns,)."""
        if len(self.multiplicity) == 0:
            return np.zeros(0, values.dtype)
        return np.add.reduceat(values, self.offsets[:-1])

    def pattern_tokens(self) -> np.ndarray:
        """Tokens in one pack of each pattern: int64 (num_patterns,)."""
        return self.pattern_sums(self.lengths.astype(np.int64) * self.repeats)

    def used_counts(self, size: int) -> np.ndarray:
        """Histogram of the lengths that the packs use: int64 (size,)."""
        per_entry = self.repeats * np.repeat(self.multiplicity, np.diff(self.offsets))
        used = np.bincount(self.lengths, weights=per_entry, minlength=size)
        return used.astype(np.int64)


def empty_composition() -> Composition:
    """The composition of no packs."""
    return Composition(
        np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, np.int64)
    )


def join_compositions(parts: Sequence[Composition]) -> Composition:
    """One composition with the packs of all parts, in their order."""
    if not parts:
        return empty_composition()
    sizes = np.concatenate([np.diff(part.offsets) for part in parts])
    return Composition(
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.repeats for part in parts]),
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        np.concatenate([part.multiplicity for part in parts]),
    )


def select_patterns(composition: Composition, chosen: np.ndarray) -> Composition:
    """The patterns with these indices, in this order, with their multiplicity."""
    sizes = np.diff(composition.offsets)[chosen]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    starts = np.repeat(composition.offsets[:-1][chosen] - offsets[:-1], sizes)
    entries = starts + np.arange(offsets[-1])
    return Composition(
        composition.lengths[entries],
        composition.repeats[entries],
        offsets,
        composition.multiplicity[chosen],
    )


def fullest_first(composition: Composition) -> Composition:
    """The same packs, from the fullest pattern to the emptiest."""
    return select_patterns(composition, np.argsort(-composition.pattern_tokens(), kind="stable"))


@njit(cache=True)
def flatten_chains(nodes: np.ndarray, leaves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Walk node chains from leaf to root into flat entries.

    ``nodes`` int32 (num_nodes, 3) holds [parent or -1, length, repeat]; ``leaves`` int32
    (num_patterns,). Returns entries int32 (num_entries, 2) [length, repeat], offsets int64.
    """
    offsets = np.zeros(leaves.shape[0] + 1, np.int64)
    for pattern in range(leaves.shape[0]):
        depth = 0
        node = leaves[pattern]
        while node >= 0:
            depth += 1
            node = nodes[node, 0]
        offsets[pattern + 1] = offsets[pattern] + depth
    entries = np.empty((offsets[-1], 2), np.int32)
    for pattern in range(leaves.shape[0]):
        node = leaves[pattern]
        # Longest first: the chain runs from the last length placed to the first.
        for slot in range(offsets[pattern + 1] - 1, offsets[pattern] - 1, -1):
            entries[slot, 0] = nodes[node, 1]
            entries[slot, 1] = nodes[node, 2]
            node = nodes[node, 0]
    return entries, offsets

"""Lengths rounded up to a granule, and back: fewer different lengths for the linear program."""

import numpy as np
from numba import njit

from offline_packing.planner.strategies.composition import Composition
from offline_packing.planner.strategies.histogram import from_entries
from offline_packing.planner.strategies.kernels import with_pair


def coarsen(counts: np.ndarray, granule: int) -> np.ndarray:
    """Histogram in units of ``granule``: int64 (seq_length // granule + 1,).

    A length counts as its size rounded up, and at most a whole pack: what fits rounded fits.
    """
    capacity = (len(counts) - 1) // granule
    lengths = np.flatnonzero(counts)
    coarse = np.zeros(capacity + 1, np.int64)
    np.add.at(coarse, np.minimum(capacity, -(-lengths // granule)), counts[lengths])
    return coarse


@njit(cache=True)
def _refine(
    lengths: np.ndarray,
    repeats: np.ndarray,
    offsets: np.ndarray,
    multiplicity: np.ndarray,
    counts: np.ndarray,
    granule: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Entries [length, repeat] and patterns [end of entries, multiplicity] in true lengths."""
    top = (counts.shape[0] - 1) // granule
    counts = counts.copy()
    current = np.zeros(top + 1, np.int64)  # longest true length left in each rounded one
    for unit in range(top + 1):
        current[unit] = unit * granule if unit < top else counts.shape[0] - 1
    entries = np.empty((4096, 2), np.int32)
    patterns = np.empty((4096, 2), np.int64)
    num_entries = 0
    num_patterns = 0
    for pattern in range(multiplicity.shape[0]):
        left = multiplicity[pattern]
        while left > 0:
            packs = left
            for entry in range(offsets[pattern], offsets[pattern + 1]):
                unit = lengths[entry]
                while counts[current[unit]] == 0:
                    current[unit] -= 1
                packs = min(packs, counts[current[unit]] // repeats[entry])
            packs = max(packs, 1)  # 1: an entry takes the last of a length and some of the next
            for entry in range(offsets[pattern], offsets[pattern + 1]):
                unit = lengths[entry]
                wanted = repeats[entry]
                while wanted > 0:
                    while counts[current[unit]] == 0:
                        current[unit] -= 1
                    length = current[unit]
                    repeat = min(wanted, counts[length] // packs)
                    counts[length] -= packs * repeat
                    wanted -= repeat
                    entries = with_pair(entries, num_entries, length, repeat)
                    num_entries += 1
            left -= packs
            patterns = with_pair(patterns, num_patterns, num_entries, packs)
            num_patterns += 1
    return entries[:num_entries], patterns[:num_patterns]


def refine(coarse: Composition, counts: np.ndarray, granule: int) -> Composition:
    """The same packs in true lengths: each rounded length is given the true ones, longest first.

    ``coarse`` uses up ``coarsen(counts, granule)``. Its lower bound does not carry over.
    """
    entries, patterns = _refine(*coarse[:4], counts, granule)
    return from_entries(entries, patterns)

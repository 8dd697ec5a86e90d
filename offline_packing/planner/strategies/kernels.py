"""Small compiled helpers of the planner: a bit set with neighbours, growth, random numbers."""

from collections.abc import Sequence

import numpy as np
from numba import njit

_ONE = np.uint64(1)
_ALL = ~np.uint64(0)


@njit(cache=True)
def _highest_bit(word: np.uint64) -> int:
    """Index of the highest set bit of a non-zero word, by halving."""
    index = 0
    for shift in (32, 16, 8, 4, 2, 1):
        if word >> np.uint64(shift):
            index += shift
            word >>= np.uint64(shift)
    return index


@njit(cache=True)
def bitset_add(words: np.ndarray, value: int) -> None:
    """Put ``value`` into the set; ``words`` is uint64 (max_value // 64 + 1,)."""
    words[value >> 6] |= _ONE << np.uint64(value & 63)


@njit(cache=True)
def bitset_remove(words: np.ndarray, value: int) -> None:
    """Take ``value`` out of the set."""
    words[value >> 6] &= ~(_ONE << np.uint64(value & 63))


@njit(cache=True)
def bitset_at_least(words: np.ndarray, value: int) -> int:
    """Smallest member >= ``value``, or -1."""
    index = value >> 6
    if index >= words.shape[0]:
        return -1
    word = words[index] & (_ALL << np.uint64(value & 63))
    while word == 0:
        index += 1
        if index >= words.shape[0]:
            return -1
        word = words[index]
    return (index << 6) + _highest_bit(word & (~word + _ONE))


@njit(cache=True)
def bitset_at_most(words: np.ndarray, value: int) -> int:
    """Largest member <= ``value``, or -1."""
    if value < 0:
        return -1
    index = value >> 6
    word = words[index] & (_ALL >> np.uint64(63 - (value & 63)))
    while word == 0:
        index -= 1
        if index < 0:
            return -1
        word = words[index]
    return (index << 6) + _highest_bit(word)


@njit(cache=True)
def doubled(rows: np.ndarray) -> np.ndarray:
    """A copy of a 2-D array with room for twice as many rows."""
    larger = np.empty((rows.shape[0] * 2, rows.shape[1]), rows.dtype)
    larger[: rows.shape[0]] = rows
    return larger


@njit(cache=True)
def with_pair(rows: np.ndarray, place: int, first: int, second: int) -> np.ndarray:
    """``rows``, an array (n, 2), with [first, second] at a place up to n: grown where it is n."""
    if place == rows.shape[0]:
        rows = doubled(rows)
    rows[place, 0] = first
    rows[place, 1] = second
    return rows


@njit(cache=True)
def next_random(state: np.ndarray) -> np.uint64:
    """Next 64 random bits; ``state`` is uint64 (1,), advanced in place.

    SplitMix64 (Steele, Lea, Flood, 2014): the same numbers for a seed on every version of numpy
    and numba, at a few nanoseconds each.
    """
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@njit(cache=True)
def random_below(state: np.ndarray, bound: int) -> np.int64:
    """A random integer in [0, bound), for 1 <= bound < 2**31 (bias below 2**-32)."""
    return np.int64(((next_random(state) >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32))


@njit(cache=True)
def random_unit(state: np.ndarray) -> float:
    """A random float64 in [0, 1)."""
    return np.float64(next_random(state) >> np.uint64(11)) * (1.0 / (1 << 53))


def random_state(seed: int | Sequence[int]) -> np.ndarray:
    """Start state for :func:`next_random`: uint64 (1,), well mixed for neighbouring seeds."""
    return np.random.default_rng(seed).integers(0, 2**64, size=1, dtype=np.uint64)

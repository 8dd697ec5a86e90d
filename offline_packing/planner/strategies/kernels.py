"""How the planner's kernels run, and small ones: a bit set with neighbours, random numbers.

Compiling takes 5 to 20 s of CPU in a fresh environment; a thousand samples take a tenth of a second
in Python. So small plans run the functions as they are written, until compiling pays for the number
of samples that a process has planned. Both make the same packs if kernels follow three rules: only
random numbers wrap; sums of floats are loops, since NumPy adds in pairs; sorts are stable.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, update_wrapper
from pathlib import Path
from typing import Any, Final

import numpy as np
from numba import njit

logger = logging.getLogger(__name__)

#: samples of a plan in Python
MOST_INTERPRETED: Final = 3000
#: samples that a process plans in Python, in all its small plans
_MOST_IN_ALL: Final = 10 * MOST_INTERPRETED
#: `seq_length` up to which Python walks a histogram fast enough
_LONGEST_INTERPRETED: Final = 1 << 17
#: samples of the plan; outside of a plan, as in online packing, kernels run again and again
_samples = ContextVar("_samples", default=math.inf)
_planned = 0


@contextmanager
def kernels_for(num_samples: int, seq_length: int) -> Iterator[None]:
    """Choose how kernels run in a plan."""
    global _planned
    is_small = num_samples <= MOST_INTERPRETED and seq_length <= _LONGEST_INTERPRETED
    _planned += num_samples if is_small else 0
    is_small = is_small and _planned <= _MOST_IN_ALL
    if not is_small:
        _announce_compilation()
    token = _samples.set(num_samples if is_small else math.inf)
    try:
        with np.errstate(over="ignore"):
            yield
    finally:
        _samples.reset(token)


class Kernel:
    """A function that numba compiles, unless a plan is small: at most 1 / ``slowness`` of
    ``MOST_INTERPRETED``. It calls others by their names in its module: such objects in Python, and
    once compiled what they compile."""

    def __init__(self, function: Callable[..., Any], slowness: int = 1) -> None:
        self.most = MOST_INTERPRETED // slowness
        self.compiled = njit(cache=True, nogil=True)(function)
        self._numba_type_ = self.compiled._numba_type_  # kernels call it as they call `compiled`
        update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        run = self.compiled if _samples.get() > self.most else self.compiled.py_func
        return run(*args)


@cache
def _announce_compilation() -> None:
    """Log, once per process, that the kernels are not in numba's cache yet, and where it is. numba
    writes an index file per compiled function; one that is older than the source is stale."""
    folder = Path(counting_sort.compiled.stats.cache_path)
    compiled = [file.stat().st_mtime for file in folder.glob("kernels.counting_sort-*.nbi")]
    source = Path(__file__).stat().st_mtime
    if not compiled or max(compiled) < source:
        logger.info(
            "compiling the planner; this takes 10 to 30 seconds the first time, then it is read "
            "from %s",
            folder,
        )


_ONE = np.uint64(1)
_ALL = ~np.uint64(0)


@Kernel
def _highest_bit(word: np.uint64) -> int:
    """Find the index of the highest set bit of a non-zero word, by halving."""
    index = 0
    for shift in (32, 16, 8, 4, 2, 1):
        if word >> np.uint64(shift):
            index += shift
            word >>= np.uint64(shift)
    return index


@Kernel
def bitset_of(counts: np.ndarray) -> np.ndarray:
    """Return the set of the lengths >= 1 with samples: uint64 (len(counts) // 64 + 1,)."""
    words = np.zeros((counts.shape[0] >> 6) + 1, np.uint64)
    for length in range(1, counts.shape[0]):
        if counts[length] > 0:
            bitset_add(words, length)
    return words


@Kernel
def bitset_add(words: np.ndarray, value: int) -> None:
    """Put ``value`` into the set; ``words`` is uint64 (max_value // 64 + 1,)."""
    words[value >> 6] |= _ONE << np.uint64(value & 63)


@Kernel
def bitset_remove(words: np.ndarray, value: int) -> None:
    """Take ``value`` out of the set."""
    words[value >> 6] &= ~(_ONE << np.uint64(value & 63))


@Kernel
def bitset_at_least(words: np.ndarray, value: int) -> int:
    """Find the smallest member >= ``value``, or -1."""
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


@Kernel
def bitset_at_most(words: np.ndarray, value: int) -> int:
    """Find the largest member <= ``value``, or -1."""
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


@Kernel
def add_samples(counts: np.ndarray, present: np.ndarray, length: int, number: int) -> None:
    """Add samples (a negative number: take them) to ``counts``; ``present``: the set of lengths."""
    counts[length] += number
    if counts[length] > 0:
        bitset_add(present, length)
    else:
        bitset_remove(present, length)


@Kernel
def list_of(example: Any) -> list[Any]:
    """Return an empty list of such values: numba cannot infer the type of []."""
    return [example for _ in range(0)]


@Kernel
def next_random(state: np.ndarray) -> np.uint64:
    """Draw the next 64 random bits; ``state`` is uint64 (1,), advanced in place. SplitMix64
    (Steele, Lea, Flood, 2014): the same numbers for a seed on every version of numpy and numba, at
    a few nanoseconds each."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@Kernel
def random_below(state: np.ndarray, bound: int) -> np.int64:
    """Draw a random integer in [0, bound), for 1 <= bound < 2**31 (bias below 2**-32)."""
    return np.int64(((next_random(state) >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32))


def random_state(seed: int | Sequence[int]) -> np.ndarray:
    """Start state for :func:`next_random`: uint64 (1,), well mixed for neighbouring seeds."""
    return np.random.default_rng(seed).integers(0, 2**64, size=1, dtype=np.uint64)


@Kernel
def shuffle_between(ids: np.ndarray, offsets: np.ndarray, state: np.ndarray) -> None:
    """Shuffle each ``ids[offsets[i]:offsets[i + 1]]`` (Fisher-Yates): a part at a time is in
    cache."""
    for part in range(offsets.shape[0] - 1):
        start = offsets[part]
        for last in range(offsets[part + 1] - 1, start, -1):
            other = start + random_below(state, last - start + 1)
            ids[last], ids[other] = ids[other], ids[last]


@Kernel
def counting_sort(keys: np.ndarray, starts: np.ndarray, order: np.ndarray) -> None:
    """Fill ``order`` with the indices that sort ``keys``, integers from 0, ascending and stable.
    ``starts[k]``: where the indices of key k begin. At 10**6 ten times faster than np.argsort."""
    ends = starts.copy()
    for index in range(keys.shape[0]):
        order[ends[keys[index]]] = index
        ends[keys[index]] += 1

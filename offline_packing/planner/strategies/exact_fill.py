"""Exact fills first: the longest sample is completed to exactly ``seq_length`` where possible."""

import numpy as np
from numba import njit

from offline_packing.planner.strategies.composition import (
    Composition,
    add_runs,
    as_rows,
    from_entries,
    packs_within,
)
from offline_packing.planner.strategies.kernels import (
    add_samples,
    bitset_at_least,
    bitset_at_most,
    bitset_of,
    list_of,
)

_BRANCHES = 24  # lengths tried at each depth of the search
_MAX_STEPS = 4000  # search steps for one pattern
_MAX_STEPS_IN_ALL = 20_000_000  # about a second; later patterns take the first fill they find

# Columns of a search frame: what is left to fill, the length chosen last, the longest length still
# to try at this depth, and how many were tried (-1: just entered).
_SPACE, _LAST, _LIMIT, _TRIED = 0, 1, 2, 3


@njit(cache=True)
def _enter(frame: np.ndarray, counts: np.ndarray, shortest: int) -> bool:
    """First look at a depth: True if one more sample, or none, fills the space, which ends the
    search."""
    space = frame[_SPACE]
    last = frame[_LAST]
    if space == 0 or (space <= last and counts[space] > 0):
        return True
    frame[_TRIED] = 0
    if space < shortest:
        frame[_TRIED] = _BRANCHES
        return False
    # At least ceil(space / last) more samples are needed, and each takes at least the shortest.
    samples = (space + last - 1) // last
    limit = space - (samples - 1) * shortest
    frame[_LIMIT] = min(last, limit if limit >= shortest else space)
    return False


@njit(cache=True)
def _complete(
    counts: np.ndarray, present: np.ndarray, frames: np.ndarray, best: np.ndarray, branches: int
) -> tuple[int, bool, int]:
    """Depth-first search for lengths (not increasing) that fill a pack with the longest sample.
    Leaves ``counts`` and ``present`` as they were. Returns how many entries of ``best`` hold the
    fill with the least room left, whether it is exact, and the steps taken."""
    capacity = counts.shape[0] - 1
    shortest = bitset_at_least(present, 1)
    frames[0] = capacity
    frames[0, _TRIED] = branches - 1  # of the first sample only the longest
    depth = 0  # samples placed
    steps = -1  # without that of the first sample
    max_steps = _MAX_STEPS + capacity // shortest  # a pack of many short samples is one descent
    best_space = capacity
    best_size = 0
    while depth >= 0:
        frame = frames[depth]
        if frame[_TRIED] < 0:
            exact = _enter(frame, counts, shortest)
            if exact or frame[_SPACE] < best_space:
                best_space = frame[_SPACE]
                best[:depth] = frames[1 : depth + 1, _LAST]
                best[depth] = best_space
                best_size = depth + (1 if exact and best_space > 0 else 0)
                if exact:
                    best_space = 0
                    break
        length = -1
        if frame[_TRIED] < branches and steps < max_steps:
            length = bitset_at_most(present, frame[_LIMIT])
        if length <= 0:
            if depth > 0:
                add_samples(counts, present, frame[_LAST], 1)
            depth -= 1
            continue
        steps += 1
        frame[_TRIED] += 1
        frame[_LIMIT] = length - 1
        add_samples(counts, present, length, -1)
        depth += 1
        frames[depth, _SPACE] = frame[_SPACE] - length
        frames[depth, _LAST] = length
        frames[depth, _TRIED] = -1
    for placed in range(1, depth + 1):
        add_samples(counts, present, frames[placed, _LAST], 1)
    return best_size, best_space == 0, steps


@njit(cache=True)
def _exact_fill(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entries [length, repeat] and patterns [end of entries, multiplicity]."""
    counts = counts.copy()
    capacity = counts.shape[0] - 1
    present = bitset_of(counts)
    left = counts.sum()
    entries, patterns = list_of((0, 0)), list_of((0, 0))
    frames = np.empty((capacity + 2, 4), np.int32)
    best = np.empty(capacity + 2, np.int32)
    steps_left = _MAX_STEPS_IN_ALL
    while left > 0:
        branches = _BRANCHES if steps_left > 0 else 1
        size, exact, steps = _complete(counts, present, frames, best, branches)
        steps_left -= steps
        start = len(entries)
        add_runs(entries, best[:size])
        packs = packs_within(entries, start, counts)
        if not exact and left > 4 * size:
            # Use an imperfect pattern sparingly: other counts may allow a better one.
            packs = max(1, packs // 4)
        for length, repeat in entries[start:]:
            add_samples(counts, present, length, -packs * repeat)
        left -= packs * size
        patterns.append((len(entries), packs))
    return as_rows(entries), as_rows(patterns)


def exact_fill(counts: np.ndarray, *, seed: int = 0) -> Composition:
    """Longest first, each completed by a bounded search for lengths that fill the pack exactly. A
    pattern is used as often as the counts allow. Where the search (24 lengths at each depth,
    4,000 steps) finds no exact fill, the fullest one found is used. ``seed`` is unused."""
    return from_entries(*_exact_fill(counts))

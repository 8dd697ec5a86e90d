"""Longest first: three methods, all on the histogram of lengths, with multiplicity.

Best fit decreasing and the greedy knapsack are classics; exact fills complete the longest sample to
exactly ``seq_length`` where possible. The cost depends on the number of different lengths, not of
samples.
"""

from functools import partial

import numpy as np

from offline_packing.planner.strategies.composition import add_runs, as_rows, packs_within, unseeded
from offline_packing.planner.strategies.kernels import (
    Kernel,
    add_samples,
    bitset_add,
    bitset_at_least,
    bitset_at_most,
    bitset_of,
    bitset_remove,
    list_of,
)

_BRANCHES = 24  # lengths tried at each depth of the search
_MAX_STEPS = 4000  # search steps for one pattern
_MAX_STEPS_IN_ALL = 20_000_000  # about a second; later patterns take the first fill they find

# Columns of a search frame: the room left, the length chosen last, the longest length still to try
# at this depth, and how many were tried (-1: just entered).
_SPACE, _LAST, _LIMIT, _TRIED = 0, 1, 2, 3


@unseeded
@Kernel
def best_fit_decreasing(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put each sample, the longest first, into the fullest pack with room: the same packs as sample
    by sample. Equal lengths are placed in bulk into packs with equal room.

    Packs with equal content are one *group*; groups of equal residual form a linked list. A group
    is made by placing a length into the packs of another one, its parent, and ends as a pattern
    unless all of its packs became parts of further groups.
    """
    capacity = counts.shape[0] - 1
    placed = list_of((0, 0, 0))  # parent or -1, length, times of each group
    packs_of, next_group = list_of(0), list_of(0)  # the next one of equal residual, or -1
    first_group = np.full(capacity + 1, -1, np.int64)
    residuals = np.zeros((capacity >> 6) + 1, np.uint64)
    for length in range(capacity, 0, -1):
        left = counts[length]
        while left > 0:
            residual = bitset_at_least(residuals, length)
            group = first_group[residual] if residual >= 0 else -1
            space = residual if residual >= 0 else capacity
            times = space // length
            packs = left // times
            if group >= 0:
                packs = min(packs, packs_of[group])
            if packs == 0:  # too few left to fill one pack's space
                packs = 1
                times = left
            if group >= 0:
                packs_of[group] -= packs
                if packs_of[group] == 0:
                    first_group[residual] = next_group[group]
                    if first_group[residual] < 0:
                        bitset_remove(residuals, residual)
            rest = space - times * length
            next_group.append(first_group[rest])
            if rest > 0:
                bitset_add(residuals, rest)
                first_group[rest] = len(placed)
            placed.append((group, length, times))
            packs_of.append(packs)
            left -= packs * times
    # From the last group to the first, each from its last length to its first, and all reversed.
    entries, patterns = list_of((0, 0)), list_of((0, 0))
    for group in range(len(placed) - 1, -1, -1):
        if packs_of[group] > 0:
            patterns.append((len(entries), packs_of[group]))
            node = np.int64(group)
            while node >= 0:
                entries.append(placed[node][1:])
                node = placed[node][0]
    rows = as_rows(patterns)[::-1]
    rows[:, 0] = len(entries) - rows[:, 0]
    return as_rows(entries)[::-1], rows


@unseeded
@Kernel
def greedy_knapsack(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fill one pack after the other, each time with the longest sample that still fits. The greedy
    knapsack of LLaMA-Factory's and nanoVLM's loaders, without their quadratic search."""
    counts = counts.copy()
    capacity = counts.shape[0] - 1
    present = bitset_of(counts)
    entries, patterns = list_of((0, 0)), list_of((0, 0))
    while bitset_at_most(present, capacity) > 0:
        start = len(entries)
        space = capacity
        length = bitset_at_most(present, space)
        while length > 0:
            entries.append((length, min(space // length, counts[length])))
            space -= length * entries[-1][1]
            length = bitset_at_most(present, min(space, length - 1))
        packs = packs_within(entries, start, counts)
        for length, times in entries[start:]:
            add_samples(counts, present, length, -packs * times)
        patterns.append((len(entries), packs))
    return as_rows(entries), as_rows(patterns)


@Kernel
def _enter(frame: np.ndarray, counts: np.ndarray, shortest: int) -> bool:
    """Look at a depth for the first time: return True if one more sample, or none, fills the space,
    which ends the search."""
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


@Kernel
def _complete(
    counts: np.ndarray, present: np.ndarray, frames: np.ndarray, best: np.ndarray, branches: int
) -> tuple[int, bool, int]:
    """Search depth first for lengths (not increasing) that fill a pack with the longest sample.
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


@unseeded
@partial(Kernel, slowness=3)
def exact_fill(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Complete the longest sample by a bounded search for lengths that fill the pack exactly, again
    and again. A pattern is used as often as the counts allow. Where the search (24 lengths at each
    depth, 4,000 steps) finds no exact fill, the fullest one found is used."""
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
        for length, times in entries[start:]:
            add_samples(counts, present, length, -packs * times)
        left -= packs * size
        patterns.append((len(entries), packs))
    return as_rows(entries), as_rows(patterns)

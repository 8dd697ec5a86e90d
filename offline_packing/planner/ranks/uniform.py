"""Packs of one kind whose numbers divide among the ranks, so that every step can be of one kind."""

from collections import deque
from itertools import cycle, islice

import numpy as np

from offline_packing.planner.ranks.layout import RankLayout
from offline_packing.planner.strategies.strategy import Packs, join_packs, reorder_packs


def kinds_of(has: np.ndarray, packs: Packs) -> np.ndarray:
    """Return the kind of each pack, int64 (num_packs,), as ``has`` (num_samples,) names those of
    samples: 1 for images, 2 for videos, and 3 for both."""
    return np.asarray(np.bitwise_or.reduceat(has[packs.sample_ids], packs.pack_offsets[:-1]))


def make_uniform(
    packs: Packs, has: np.ndarray, lengths: np.ndarray, layout: RankLayout
) -> tuple[Packs, int, int]:
    """Halve or repeat packs until their number is a multiple of the layout's round, and that of
    each kind a multiple of its ranks. Returns the packs, and how many were halved and are repeated.
    ``lengths`` (num_samples,); see `kinds_of` for ``has``."""
    kinds, sizes = kinds_of(has, packs), np.diff(packs.pack_offsets)
    counts = np.bincount(kinds, minlength=4)
    steps = -(-counts // layout.num_ranks)
    steps[counts.argmax()] += -steps.sum() % max(1, layout.num_workers)
    missing = steps * layout.num_ranks - counts
    num_halved, num_repeated = 0, 0
    made, replaced = list[np.ndarray](), list[np.ndarray]()
    for kind in np.flatnonzero(missing):
        own = np.flatnonzero(kinds == kind)
        own = own[np.argsort(-sizes[own], kind="stable")][: missing[kind]]
        parts = deque(packs.sample_ids[slice(*packs.pack_offsets[i : i + 2])] for i in own)
        left, whole = int(missing[kind]), list[np.ndarray]()
        while parts:
            part = parts.popleft()
            # Alternately, so that both halves have media and about the same tokens.
            dealt = part[np.lexsort((-lengths[part], -has[part]))]
            halves = dealt[::2], dealt[1::2]
            if left and all(
                len(half) and np.bitwise_or.reduce(has[half]) == kind for half in halves
            ):
                parts.extend(halves)
                left -= 1
            else:
                whole.append(part)
        made += [*whole, *islice(cycle(whole), left)]
        replaced.append(own)
        num_halved, num_repeated = num_halved + int(missing[kind]) - left, num_repeated + left
    if not made:
        return packs, 0, 0
    kept = np.setdiff1d(np.arange(packs.num_packs), np.concatenate(replaced))
    new = Packs(np.concatenate(made), np.cumsum([0, *map(len, made)]))
    return join_packs([reorder_packs(packs, kept), new]), num_halved, num_repeated

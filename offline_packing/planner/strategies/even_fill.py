"""Packs of a given number with even fill, for lengths of moderate spread.

Multiway number partitioning: deal the samples longest first to the packs with the fewest tokens
(Graham, 1969), then exchange samples between packs above seq_length and packs with room until none
is above. Other methods fill packs exactly and leave what does not fit; here all packs share the
room that there is, so the number of packs that the bound allows is often met, in milliseconds.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from offline_packing.planner.strategies.composition import Composition, from_packs
from offline_packing.planner.strategies.histogram import fold
from offline_packing.planner.strategies.kernels import random_below, random_state

_SORTED_ROUNDS = 16
#: pairs of samples looked at in all attempts: 5 s at most, usually a hundredth of it
WORK = 500_000_000
#: tries for each pack in which the tokens above seq_length must fall by a tenth
_PATIENCE = 10


@dataclass
class Budget:
    """Pairs of samples that attempts may still look at, all together."""

    left: int = WORK


def even_fill(
    counts: np.ndarray, num_packs: int, *, seed: int = 0, budget: Budget | None = None
) -> Composition | None:
    """Pack all samples into ``num_packs`` packs; None if that is not found, or they are too many
    for what is left of the budget, from which the attempt is taken.

    ``counts`` int64 (seq_length + 1,). Each pack is a pattern of its own.
    """
    budget = budget or Budget()
    # Lengths 0 stand for places without a sample, so that a sample can also move alone.
    places = -(-int(counts.sum()) // num_packs) + 1
    if _SORTED_ROUNDS * num_packs // 2 * places**2 > budget.left:
        return None
    lengths = np.repeat(np.arange(len(counts)), counts)[::-1]
    packs = fold(lengths, num_packs, places).astype(np.int32)  # half the memory, a fifth faster
    tokens = packs.sum(axis=1)
    for _ in range(_SORTED_ROUNDS):
        order = np.argsort(tokens, kind="stable")
        budget.left -= places**2 * _exchange_sorted(packs, tokens, len(counts) - 1, order)
    most = budget.left // places**2
    tries, is_found = _exchange_random(packs, tokens, len(counts) - 1, random_state(seed), most)
    budget.left -= places**2 * tries
    return from_packs(packs, 1) if is_found else None


@njit(cache=True)
def _exchange_sorted(
    packs: np.ndarray, tokens: np.ndarray, capacity: int, order: np.ndarray
) -> int:
    """One exchange of each pack above the capacity, the fullest with the emptiest, and so on; how
    many there were. ``order``: packs by ascending tokens."""
    for pair in range(order.shape[0] // 2):
        if tokens[order[-1 - pair]] <= capacity:
            return pair
        _exchange(packs, tokens, capacity, order[-1 - pair], order[pair])
    return order.shape[0] // 2


@njit(cache=True)
def _exchange_random(
    packs: np.ndarray, tokens: np.ndarray, capacity: int, state: np.ndarray, most: int
) -> tuple[int, bool]:
    """Exchange samples until no pack is above the capacity, or ``most`` were tried; tries, and
    whether that succeeded. ``packs`` int32 (num_packs, places) and ``tokens`` int64 (num_packs,)
    are changed in place."""
    num_packs = packs.shape[0]
    # Those that no longer are above or below the capacity go when they are drawn.
    above = [pack for pack in range(num_packs) if tokens[pack] > capacity]
    below = [pack for pack in range(num_packs) if tokens[pack] < capacity]
    is_listed = tokens < capacity
    excess = np.maximum(tokens - capacity, 0).sum()
    tries = 0
    while len(above) > 0 and tries < most:
        tries += 1
        if tries % (_PATIENCE * num_packs) == 0:
            now = np.maximum(tokens - capacity, 0).sum()
            if now > 0.9 * excess:
                return tries, False
            excess = now
        place = random_below(state, len(above))
        pack = above[place]
        if tokens[pack] <= capacity:
            above[place] = above[-1]
            above.pop()
            continue
        # To hand the excess on to a full pack also helps: others fit that one.
        other = -1 if tries % 4 == 0 else _draw_below(tokens, capacity, below, is_listed, state)
        if other < 0:
            other = random_below(state, num_packs)
        _exchange(packs, tokens, capacity, pack, other)
        if tokens[other] > capacity:
            above.append(other)
        if tokens[pack] < capacity and not is_listed[pack]:
            is_listed[pack] = True
            below.append(pack)
    return tries, len(above) == 0


@njit(cache=True)
def _draw_below(
    tokens: np.ndarray, capacity: int, below: list[int], is_listed: np.ndarray, state: np.ndarray
) -> int:
    """A random pack below the capacity, or -1. Takes those that no longer are out of the list."""
    while len(below) > 0:
        place = random_below(state, len(below))
        pack = below[place]
        if tokens[pack] < capacity:
            return pack
        is_listed[pack] = False
        below[place] = below[-1]
        below.pop()
    return -1


@njit(cache=True)
def _exchange(packs: np.ndarray, tokens: np.ndarray, capacity: int, pack: int, other: int) -> None:
    """Exchange the two samples that leave the least squared excess, a longer one of ``pack`` for a
    shorter one of ``other``, unless that makes it worse."""
    excess, others = tokens[pack] - capacity, tokens[other] - capacity
    least = max(excess, 0) ** 2 + max(others, 0) ** 2
    first = second = -1
    for place in range(packs.shape[1]):
        for against in range(packs.shape[1]):
            difference = packs[pack, place] - packs[other, against]
            if difference > 0:
                left = max(excess - difference, 0) ** 2 + max(others + difference, 0) ** 2
                if left <= least:
                    least, first, second = left, place, against
    if first >= 0:
        difference = packs[pack, first] - packs[other, second]
        packs[pack, first] -= difference
        packs[other, second] += difference
        tokens[pack] -= difference
        tokens[other] += difference

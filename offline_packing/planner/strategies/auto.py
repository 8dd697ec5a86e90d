"""The default strategy: as much effort as the distance from the bound calls for."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from offline_packing.planner.strategies.composition import Composer, Composition, join_compositions
from offline_packing.planner.strategies.exact_fill import exact_fill
from offline_packing.planner.strategies.histogram import best_fit_decreasing, lower_bound
from offline_packing.planner.strategies.narrow_fill import fills_by_fitness, narrow_fill
from offline_packing.planner.strategies.pattern_lp import MAX_SIZES, pattern_lp
from offline_packing.planner.strategies.tilted_sampling import tilted_fills

#: packs above the bound that are not worth a further method: at most 2, or this share
TOLERANCE = 3e-5


def tilted_sampling(counts: np.ndarray, *, seed: int = 0) -> Composition:
    """Random exact fills of narrow laws, what is left by exact fills longest first."""
    drawn, left = tilted_fills(counts, seed=seed)
    return join_compositions([drawn, exact_fill(left)])


def auto(counts: np.ndarray, *, seed: int = 0) -> Composition:
    """Best-fit-decreasing; exact fills unless at the bound; further methods only if far from it.

    Broad laws end after the first or second method, in milliseconds, and so do narrow ones, such as
    captions behind a fixed number of vision tokens, in a tenth of a second. What is left are laws
    with few exact fills: they take the linear program, after random exact fills where there are
    very many different lengths. The best plan is returned, with the best proved lower bound.
    """
    bound = lower_bound(counts)
    best: Composition | None = None
    for method, goal in _methods(counts, bound):
        if best is not None and best.num_packs <= goal:
            continue
        composition = method(counts, seed=seed)
        bound = max(bound, composition.lower_bound)
        if best is None or composition.num_packs < best.num_packs:
            best = composition
    assert best is not None
    return best._replace(lower_bound=bound)


def mixed(counts: np.ndarray, *, seed: int = 0) -> Composition:
    """As many packs as ``auto``, but of randomly mixed lengths where that is possible. Longest
    first puts alike samples together; a random mix leaves far more freedom to even out another
    quantity by exchanging samples of equal length. Takes up to some seconds."""
    plain = auto(counts, seed=seed)
    for method in (
        partial(_drawn_then_auto, rest=30),
        partial(_drawn_then_auto, rest=4),
        narrow_fill,
    ):
        composition = method(counts, seed=seed)
        if composition.num_packs <= plain.num_packs:
            return composition._replace(lower_bound=plain.lower_bound)
    return plain


def _drawn_then_auto(counts: np.ndarray, *, seed: int, rest: int) -> Composition:
    """Random exact fills of all but one ``rest``-th of the tokens, which are left to ``auto``."""
    stop_packs = max(30, lower_bound(counts) // rest)
    drawn, left = tilted_fills(counts, seed=seed, stop_packs=stop_packs)
    return join_compositions([drawn, auto(left, seed=seed)])


def _methods(counts: np.ndarray, bound: int) -> Iterator[tuple[Composer, int]]:
    """Methods in order of cost, each with the number of packs that makes it unnecessary."""
    tolerated = bound + max(2, int(TOLERANCE * bound))
    first, second = fills_by_fitness(counts)  # where exact fills do worse, they also search long
    yield best_fit_decreasing, bound
    yield first, bound
    yield second, tolerated
    if np.count_nonzero(counts) > MAX_SIZES:  # where the linear program is not exact
        yield tilted_sampling, tolerated
    yield pattern_lp, tolerated

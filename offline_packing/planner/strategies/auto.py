"""The default strategy: tries further methods only while the packs are far from the bound."""

from functools import partial
from operator import attrgetter

import numpy as np

from offline_packing.planner.strategies.composition import (
    Composition,
    dual_feasible_bound,
    join_compositions,
    lower_bound,
    select_patterns,
)
from offline_packing.planner.strategies.kernels import MOST_INTERPRETED
from offline_packing.planner.strategies.longest_first import (
    best_fit_decreasing,
)
from offline_packing.planner.strategies.narrow_fill import (
    WORK,
    even_fill,
    fills_by_fitness,
    is_narrow,
    narrow_fill,
)
from offline_packing.planner.strategies.pattern_lp import (
    MAX_POINTS,
    pattern_lp,
    prove_bound,
    tilted_fills,
)

#: packs above the bound that are not worth a further method: at most 2, or this share; 0 or 1 in
#: plans of fewer packs than `_SMALL`, where methods take little time
TOLERANCE = 3e-5
_SMALL = 2000
#: the same for the linear program, whose rounding leaves more packs the more lengths there are: at
#: most this share, or one per this number of lengths
PROGRAM_TOLERANCE = 2e-4
_LENGTHS_PER_PACK = 100
_START_PATTERNS = 2000  # of a plan, for its proof
_fewest = partial(min, key=attrgetter("num_packs"))


def auto(counts: np.ndarray, *, seed: int = 0) -> Composition:
    """Best-fit-decreasing; exact fills unless at the bound; further methods only if far from it,
    or if the packs are few.

    Broad distributions end after the first or second method, in milliseconds. Where exact fills
    are few, prices prove a bound. Narrow distributions, such as captions after a fixed number of
    vision tokens, are then filled evenly, often into as few packs as the bound. Otherwise the
    linear program follows. It is not run for a few packs above a proved bound: its rounding leaves
    the same number.

    What a method may do is counted in steps, never timed: the packs are the same on any machine.
    """
    bound = lower_bound(counts)
    best = longest_first = best_fit_decreasing(counts)
    first, second = fills_by_fitness(counts)  # where exact fills do worse, they also search long
    if best.num_packs > bound:
        best = _fewest(best, first(counts, seed=seed))
    if best.num_packs > bound:
        bound = max(bound, dual_feasible_bound(counts)[0])
    if best.num_packs > _tolerated(bound):
        best = _fewest(best, second(counts, seed=seed))
    num_lengths = int(np.count_nonzero(counts))
    # Pricing and random fills are always compiled: for longer than so few samples are worth.
    is_quick = num_lengths <= MAX_POINTS or counts.sum() > MOST_INTERPRETED
    if best.num_packs > _tolerated(bound, is_quick=is_quick):
        step = 1 + len(best.multiplicity) // _START_PATTERNS
        some = select_patterns(best, np.arange(0, len(best.multiplicity), step))
        proof = prove_bound(counts, join_compositions([longest_first, some]))
        bound = max(bound, proof[0])
    if best.num_packs > bound and (bound < _SMALL or is_narrow(counts)):
        best = _evenly(counts, bound, best, seed)
    tolerated = _tolerated(bound, num_lengths, is_quick=is_quick)
    if best.num_packs > tolerated:
        best = _fewest(best, pattern_lp(counts, seed=seed, proof=proof))
    return best._replace(lower_bound=bound)


def _evenly(counts: np.ndarray, bound: int, best: Composition, seed: int) -> Composition:
    """Even packs, if fewer than the best are found: the bound's number, or a few more if the best
    is far from it; all attempts share a budget."""
    tolerated = _tolerated(bound, int(np.count_nonzero(counts)))
    above, work = 0, WORK
    while bound + above < best.num_packs and (above == 0 or best.num_packs > tolerated):
        found, work = even_fill(counts, bound + above, seed=seed, work=work)
        if found:
            return found
        above = max(1, 2 * above)
    return best


def _tolerated(bound: int, num_lengths: int = 0, *, is_quick: bool = True) -> int:
    """Packs from which a further method is not worth its time."""
    if bound < _SMALL:
        return bound if is_quick else bound + 1
    rounded = min(PROGRAM_TOLERANCE * bound, num_lengths / _LENGTHS_PER_PACK)
    return bound + max(2, int(TOLERANCE * bound), int(rounded))


def mixed(counts: np.ndarray, *, seed: int = 0) -> Composition:
    """Compose no more packs than ``auto`` does, of random lengths if possible: under another seed
    hardly two samples of a pack share one again, where longest first puts the same lengths together
    each time. Takes up to some seconds."""
    plain = auto(counts, seed=seed)
    for rest in (30, 4, None):
        if rest is None:
            composition = narrow_fill(counts, seed=seed)
        else:  # random exact fills of all but one rest-th of the tokens
            stop_packs = max(30, lower_bound(counts) // rest)
            drawn, left = tilted_fills(counts, seed=seed, stop_packs=stop_packs)
            composition = join_compositions([drawn, auto(left, seed=seed)])
        if composition.num_packs <= plain.num_packs:
            return composition._replace(lower_bound=plain.lower_bound)
    return plain

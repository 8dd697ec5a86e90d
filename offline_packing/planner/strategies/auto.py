"""The default strategy: tries further methods only while the packs are far from the bound."""

from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from offline_packing.planner.strategies.composition import (
    Composer,
    Composition,
    dual_feasible_bound,
    join_compositions,
    lower_bound,
    select_patterns,
)
from offline_packing.planner.strategies.kernels import MOST_INTERPRETED
from offline_packing.planner.strategies.longest_first import best_fit_decreasing
from offline_packing.planner.strategies.narrow_fill import fills_by_fitness, is_narrow, narrow_fill
from offline_packing.planner.strategies.pricing import MAX_POINTS, prove_bound
from offline_packing.planner.strategies.redivision import (
    WORK,
    even_fill,
    fullest_packs,
    packs_by_mix,
)

#: packs above the bound that are not worth a further method: at most 2, or this share; 0 or 1 in
#: plans of fewer packs than `_SMALL`, where methods take little time
TOLERANCE = 3e-5
_SMALL = 2000
#: the same where lengths are many: at most this share, or one per this number of lengths
RARE_TOLERANCE = 2e-4
_LENGTHS_PER_PACK = 100
_START_PATTERNS = 2000  # of a plan, for its proof
#: packs and samples that are re-divided; of larger plans a part is composed, and repeated
_MOST_PACKS, _MOST_SAMPLES = 60_000, 1_000_000
_SPARE_WORK = WORK // 20  # for packs that are not worth a method
_fewest = partial(min, key=attrgetter("num_packs"))


def auto(counts: np.ndarray, *, seed: int = 0) -> Composition:
    """Pack longest first, with exact fills unless that meets the bound, and re-divide the packs if
    they are far from the bound, or few.

    Broad distributions end after the first or second method, in milliseconds. Where exact fills
    are few, prices prove a bound, and their linear program finds a mix of patterns. Packs are then
    re-divided, often into as few as the bound.

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
    # Pricing is always compiled: for longer than so few samples are worth.
    is_quick = bool(np.count_nonzero(counts) <= MAX_POINTS or counts.sum() > MOST_INTERPRETED)
    mix: Any = None
    if best.num_packs > _tolerated(bound, is_quick=is_quick):
        step = 1 + len(best.multiplicity) // _START_PATTERNS
        some = select_patterns(best, np.arange(0, len(best.multiplicity), step))
        proved, *mix = prove_bound(counts, join_compositions([longest_first, some]))
        bound = max(bound, proved)
    tolerated = _tolerated(bound, int(np.count_nonzero(counts)), is_quick=is_quick)
    if best.num_packs <= bound or not (
        bound < _SMALL or is_narrow(counts) or best.num_packs > tolerated
    ):
        return best._replace(lower_bound=bound)
    if (copies := _copies(counts, bound)) > 1:
        best = _fewest(best, _in_parts(auto, counts, copies, seed))
    else:
        best = _redivided(counts, bound, best, tolerated, mix, seed)
    return best._replace(lower_bound=bound)


def _copies(counts: np.ndarray, num_packs: int) -> int:
    """Return into how many equal parts a plan is divided before its packs are re-divided."""
    return max(-(-num_packs // _MOST_PACKS), -(-int(counts.sum()) // _MOST_SAMPLES))


def _in_parts(compose: Composer, counts: np.ndarray, copies: int, seed: int) -> Composition:
    """Compose a part of the samples, repeat it, and compose the samples that are left."""
    part, rest = (compose(some, seed=seed) for some in (counts // copies, counts % copies))
    return join_compositions([part._replace(multiplicity=part.multiplicity * copies), rest])


def _redivided(
    counts: np.ndarray, bound: int, best: Composition, tolerated: int, mix: Any, seed: int
) -> Composition:
    """Return fewer packs than the best if they are found: the bound's number, or a few more if the
    best is above what is tolerated; all attempts share a budget. ``mix``: patterns and their shares
    as `prove_bound` found them, or None."""
    failed, above = -1, 0
    work = WORK if best.num_packs > tolerated else _SPARE_WORK
    while failed < above and (above == 0 or best.num_packs > tolerated):
        num_packs, found = bound + above, None
        for kept in _beginnings(counts, num_packs, best, mix, seed):
            found, work = even_fill(counts, num_packs, kept, seed=seed, work=work)
            if found is not None:
                break
        if found is None:
            failed = above
        else:
            best = found
        above = min(max(1, 2 * failed), (failed + best.num_packs - bound) // 2)
    return best


def _beginnings(
    counts: np.ndarray, num_packs: int, best: Composition, mix: Any, seed: int
) -> Iterator[np.ndarray | None]:
    """Yield the packs that `even_fill` may begin with."""
    if mix is not None:
        yield packs_by_mix(counts, num_packs, *mix, seed=seed)
    yield fullest_packs(best, num_packs)
    yield None


def _tolerated(bound: int, num_lengths: int = 0, *, is_quick: bool = True) -> int:
    """Return the number of packs from which a further method is not worth its time."""
    if bound < _SMALL:
        return bound if is_quick else bound + 1
    rare = min(RARE_TOLERANCE * bound, num_lengths / _LENGTHS_PER_PACK)
    return bound + max(2, int(TOLERANCE * bound), int(rare))


def mixed(counts: np.ndarray, *, seed: int = 0) -> Composition:
    """Compose no more packs than ``auto`` does, of random lengths if possible: under another seed
    hardly two samples of a pack share one again, where longest first puts the same lengths together
    each time. Takes up to some seconds."""
    plain = auto(counts, seed=seed)
    found: Composition | None
    if (copies := _copies(counts, plain.num_packs)) > 1:
        found = _in_parts(mixed, counts, copies, seed)
    else:
        found, _ = even_fill(counts, plain.num_packs, seed=seed, is_random=True)
    if found is None:
        found = narrow_fill(counts, seed=seed)
    if found.num_packs > plain.num_packs:
        return plain
    return found._replace(lower_bound=plain.lower_bound)

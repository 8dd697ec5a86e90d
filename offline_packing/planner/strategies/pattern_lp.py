"""A linear program over patterns, where longest-first methods stay above the bound.

Minimise the number of packs x_j >= 0 over patterns j such that every length is covered: the
cutting-stock program of Gilmore and Gomory (1961). Patterns come from random exact fills (see
``tilted_sampling``) and from the plans at hand; *pricing* finds further ones, and proves a lower
bound that also holds where the sum of tokens says little. Fractions are rounded down and the
samples that are left over are packed again.
"""

import math

import numpy as np
from numba import njit

from offline_packing.planner.strategies.composition import (
    EMPTY,
    Composition,
    as_rows,
    from_entries,
    join_compositions,
    select_patterns,
)
from offline_packing.planner.strategies.exact_fill import exact_fill
from offline_packing.planner.strategies.histogram import best_fit_decreasing, lower_bound
from offline_packing.planner.strategies.kernels import list_of
from offline_packing.planner.strategies.tilted_sampling import tilted_fills

_SEED_SAMPLES = 60_000  # the histogram is scaled down to about so many samples to draw patterns
MAX_SIZES = 1500  # different lengths up to which the program is exact
_COARSE_SIZES = 1000  # different lengths after rounding up where there are more
_PRICING_WORK = 20_000  # rounds of pricing times different lengths: bounds the time to seconds
_MAX_PRICED = 400  # patterns added in one round


def pattern_lp(counts: np.ndarray, *, seed: int = 0) -> Composition:
    """Pack by a linear program over patterns; for narrow laws of lengths.

    ``counts`` int64 (seq_length + 1,). The time depends on the number of different lengths, about
    a second for a thousand, not on the number of samples. Above ``MAX_SIZES`` different lengths
    they are rounded up to a common multiple first, which costs a little of the fill.
    """
    sizes = np.flatnonzero(counts)
    if len(sizes) == 0:
        return EMPTY
    if len(sizes) > MAX_SIZES:
        granule = 2
        while len(np.unique(-(-sizes // granule))) > _COARSE_SIZES:
            granule *= 2
        coarse = coarsen(counts, granule)
        return refine(pattern_lp(coarse, seed=seed), counts, granule)
    patterns = _seed_patterns(counts, sizes, seed)
    bound = lower_bound(counts)
    history: list[float] = []
    max_rounds = min(20, _PRICING_WORK // len(sizes))
    while True:
        fractions, prices, objective = _solve(patterns, sizes, counts)
        history.append(objective)
        if math.ceil(objective - 1e-6) <= bound:
            break
        found, best_value = _price(prices, sizes, len(counts) - 1)
        # Farley (1990): scaled by the most valuable pattern, the prices are a dual solution.
        bound = max(bound, math.ceil(objective / max(1.0, best_value) - 1e-6))
        stalled = len(history) > 5 and history[-6] - history[-1] < 1e-5 * history[-1]
        if found.num_packs == 0 or stalled or len(history) >= max_rounds:
            break
        patterns = join_compositions([patterns, found])
    return _rounded(patterns, fractions, counts, seed)._replace(lower_bound=bound)


def _seed_patterns(counts: np.ndarray, sizes: np.ndarray, seed: int) -> Composition:
    """Start patterns; those of best-fit-decreasing make sure that every length is covered."""
    scale = max(1, int(counts.sum()) // _SEED_SAMPLES)
    sample = np.zeros_like(counts)
    sample[sizes] = np.maximum(1, counts[sizes] // scale)
    drawn, left = tilted_fills(sample, seed=seed)
    return join_compositions(
        [drawn, best_fit_decreasing(left), best_fit_decreasing(counts), exact_fill(counts)]
    )


def _solve(
    patterns: Composition, sizes: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """The linear program: minimise packs, cover every length. Returns fractional packs of each
    pattern, float64 (num_patterns,), what one sample of a size is worth in packs, float64
    (num_sizes,) >= 0, and the packs in all."""
    from scipy.optimize import linprog
    from scipy.sparse import csc_matrix

    rows = np.searchsorted(sizes, patterns.lengths)
    matrix = csc_matrix(
        (-patterns.repeats.astype(np.float64), rows, patterns.offsets),
        shape=(len(sizes), len(patterns.multiplicity)),
    )
    result = linprog(np.ones(matrix.shape[1]), A_ub=matrix, b_ub=-counts[sizes].astype(np.float64))
    assert result.status == 0, f"the start patterns cover every length: {result.message}"
    return result.x, np.maximum(0.0, -result.ineqlin.marginals), float(result.fun)


@njit(cache=True)
def _best_values(prices: np.ndarray, sizes: np.ndarray, capacity: int) -> tuple:
    """Unbounded knapsack: best value within each capacity, and the size index used there or -1."""
    value = np.zeros(capacity + 1)
    choice = np.full(capacity + 1, -1, np.int32)
    for space in range(1, capacity + 1):
        best = value[space - 1]
        pick = -1
        for i in range(sizes.shape[0]):
            if sizes[i] > space:
                break
            candidate = value[space - sizes[i]] + prices[i]
            if candidate > best + 1e-12:
                best = candidate
                pick = i
        value[space] = best
        choice[space] = pick
    return value, choice


def _price(prices: np.ndarray, sizes: np.ndarray, capacity: int) -> tuple[Composition, float]:
    """Patterns worth more than one pack, the best for each first length, and the best value."""
    value, choice = _best_values(prices, sizes, capacity)
    with_size = prices + value[capacity - sizes]
    order = np.argsort(-with_size, kind="stable")[:_MAX_PRICED]
    order = order[with_size[order] > 1.0 + 1e-7]
    rows = sorted({_trace(first, choice, sizes, capacity) for first in order.tolist()})
    entries = np.array([entry for row in rows for entry in row], np.int64).reshape(-1, 2)
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    patterns = np.stack([ends, np.ones_like(ends)], axis=1)
    return from_entries(entries, patterns), float(value[capacity])


def _trace(
    first: int, choice: np.ndarray, sizes: np.ndarray, capacity: int
) -> tuple[tuple[int, int], ...]:
    """The pattern behind a knapsack value, as (length, repeat) with lengths descending."""
    chosen = [int(sizes[first])]
    space = capacity - chosen[0]
    while space > 0:
        if choice[space] < 0:
            space -= 1  # the value here is that of one token less
            continue
        chosen.append(int(sizes[choice[space]]))
        space -= chosen[-1]
    lengths, repeats = np.unique(chosen, return_counts=True)
    return tuple(zip(lengths[::-1].tolist(), repeats[::-1].tolist(), strict=True))


@njit(cache=True)
def _take_patterns(patterns: Composition, wanted: np.ndarray, counts: np.ndarray) -> None:
    """Lower ``wanted`` packs of each pattern to what ``counts`` has, and take it from there."""
    for pattern in range(wanted.shape[0]):
        entries = slice(patterns.offsets[pattern], patterns.offsets[pattern + 1])
        lengths, repeats = patterns.lengths[entries], patterns.repeats[entries]
        wanted[pattern] = min(wanted[pattern], (counts[lengths] // repeats).min())
        counts[lengths] -= wanted[pattern] * repeats


def _rounded(
    patterns: Composition, fractions: np.ndarray, counts: np.ndarray, seed: int
) -> Composition:
    """Whole packs of the solution, and the rest packed by whichever method needs fewest packs."""
    packs = np.floor(fractions + 1e-9).astype(np.int64)
    left = counts.copy()
    _take_patterns(patterns, packs, left)
    whole = select_patterns(patterns._replace(multiplicity=packs), np.flatnonzero(packs))
    drawn, rest = tilted_fills(left, seed=seed + 1)
    candidates = [
        best_fit_decreasing(left),
        exact_fill(left),
        join_compositions([drawn, best_fit_decreasing(rest)]),
        join_compositions([drawn, exact_fill(rest)]),
    ]
    residue = min(candidates, key=lambda candidate: candidate.num_packs)
    return join_compositions([whole, residue])


def coarsen(counts: np.ndarray, granule: int) -> np.ndarray:
    """Histogram in units of ``granule``: int64 (seq_length // granule + 1,). A length counts as its
    size rounded up, and at most a whole pack: what fits rounded fits."""
    capacity = (len(counts) - 1) // granule
    lengths = np.flatnonzero(counts)
    coarse = np.zeros(capacity + 1, np.int64)
    np.add.at(coarse, np.minimum(capacity, -(-lengths // granule)), counts[lengths])
    return coarse


@njit(cache=True)
def _refine(coarse: Composition, counts: np.ndarray, granule: int) -> tuple[np.ndarray, np.ndarray]:
    """Entries [length, repeat] and patterns [end of entries, multiplicity] in true lengths."""
    top = (counts.shape[0] - 1) // granule
    counts = counts.copy()
    current = np.arange(top + 1) * granule  # longest true length left in each rounded one
    current[top] = counts.shape[0] - 1
    entries, patterns = list_of((0, 0)), list_of((0, 0))
    for pattern in range(coarse.multiplicity.shape[0]):
        rounded = range(coarse.offsets[pattern], coarse.offsets[pattern + 1])
        left = coarse.multiplicity[pattern]
        while left > 0:
            packs = left
            for entry in rounded:
                unit = coarse.lengths[entry]
                while counts[current[unit]] == 0:
                    current[unit] -= 1
                packs = min(packs, counts[current[unit]] // coarse.repeats[entry])
            packs = max(packs, 1)  # 1: an entry takes the last of a length and some of the next
            for entry in rounded:
                unit = coarse.lengths[entry]
                wanted = np.int64(coarse.repeats[entry])
                while wanted > 0:
                    while counts[current[unit]] == 0:
                        current[unit] -= 1
                    length = current[unit]
                    repeat = min(wanted, counts[length] // packs)
                    counts[length] -= packs * repeat
                    wanted -= repeat
                    entries.append((length, repeat))
            left -= packs
            patterns.append((len(entries), packs))
    return as_rows(entries), as_rows(patterns)


def refine(coarse: Composition, counts: np.ndarray, granule: int) -> Composition:
    """The same packs in true lengths: each rounded length is given the true ones, longest first.
    ``coarse`` uses up ``coarsen(counts, granule)``. Its lower bound does not carry over."""
    return from_entries(*_refine(coarse, counts, granule))

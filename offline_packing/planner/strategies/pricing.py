"""Prices of lengths: a proof that no packing has fewer packs, and a mix of patterns near it.

A linear program minimises the number of packs x_j >= 0 over patterns j such that every length is
covered: the cutting-stock program of Gilmore and Gomory (1961). Patterns come from the plans at
hand; *pricing* finds further ones.

The dual proves a lower bound: give every length a price >= 0, and divide by the price of the
dearest pattern. No packing has fewer packs than all samples are then worth, however the prices were
found (Farley, 1990). The dearest pattern comes from a knapsack over all lengths in integers, so
that rounding cannot spoil the proof.
"""

from typing import Any

import numpy as np
from numba import njit

from offline_packing.planner.strategies.composition import (
    Composition,
    dual_feasible_bound,
    from_entries,
    join_compositions,
    select_patterns,
)

UNIT = 1 << 32  # price of a whole pack; prices are integers
_MAX_PRICED = 400  # patterns found in one round
_MAX_ROUNDS = 40
_LEAST_SHARE = 1e-9  # packs of a pattern
MAX_POINTS = 100  # lengths with a price of their own, the others' are interpolated
_MAX_CELLS = 30_000_000  # capacity times different lengths in a knapsack, about 0.1 s


def prove_bound(counts: np.ndarray, patterns: Composition) -> tuple[int, Composition, np.ndarray]:
    """Prove a lower bound of the number of packs. Returns it, patterns, and the packs of each in
    the linear program, float64 (num_patterns,).

    ``counts`` int64 (seq_length + 1,); ``patterns`` contain every length; patterns of a good plan
    save rounds. Prices are piecewise linear in the length, plus a multiple of those of
    `dual_feasible_bound`, so that the program has few rows; this costs about 1e-5 of the bound.
    Lengths are rounded down if a knapsack over all would take long, since every packing still fits
    then; no patterns are returned in this case.
    """
    from scipy.sparse import csr_array, hstack, vstack

    granule = 1
    while len(counts) // granule * np.count_nonzero(_in_granules(counts, granule)) > _MAX_CELLS:
        granule *= 2
    counts = _in_granules(counts, granule)
    sizes = np.flatnonzero(counts)
    if len(sizes) == 0:
        return 0, patterns, np.ones(len(patterns.multiplicity))
    feasible = csr_array(dual_feasible_bound(counts)[1][np.newaxis])
    interpolation = vstack([_interpolation(sizes, counts), feasible], format="csr")
    start = patterns._replace(lengths=patterns.lengths // granule)
    demand = interpolation @ counts
    found: list[Composition] = []
    bound = 0
    columns = interpolation @ pattern_matrix(start, len(counts))
    for _ in range(_MAX_ROUNDS):
        shares, point_prices, objective = solve(columns, demand)
        prices = as_integers(interpolation.T @ point_prices)
        dearest, priced = price_patterns(prices[sizes], sizes, len(counts) - 1)
        bound = max(bound, bound_of(prices, counts, dearest))
        if bound >= objective or priced.num_packs == 0:
            break
        found.append(priced)
        own = interpolation @ pattern_matrix(priced, len(counts))
        columns = hstack([columns, own], format="csc")
    used = np.flatnonzero(shares > _LEAST_SHARE)
    mix = select_patterns(join_compositions([start, *found]), used)
    return bound, mix._replace(lengths=mix.lengths * granule), shares[used]


def _in_granules(counts: np.ndarray, granule: int) -> np.ndarray:
    """Count lengths in whole granules: int64 (seq_length // granule + 1,)."""
    whole = np.add.reduceat(counts, np.arange(0, len(counts), granule))
    whole[0] = 0  # fits anywhere
    return whole


def _interpolation(sizes: np.ndarray, counts: np.ndarray) -> Any:
    """Weigh the points for each length: sparse float64 (num_points, seq_length + 1). Half of the
    points are spread evenly over the samples, half over the different lengths."""
    from scipy.sparse import csr_array

    last = len(sizes) - 1
    shares = np.linspace(0, 1, MAX_POINTS // 2)
    samples = np.cumsum(counts[sizes])
    by_sample = np.searchsorted(samples, shares * samples[-1]).clip(0, last)
    chosen = np.append(by_sample, (shares * last).astype(np.int64))
    points = sizes[np.unique(chosen if last >= MAX_POINTS else np.arange(last + 1))]
    right = np.searchsorted(points, sizes)  # points[right - 1] < size <= points[right]
    left = np.maximum(right - 1, 0)
    share = (points[right] - sizes) / np.maximum(1, points[right] - points[left])
    rows, weights = np.append(left, right), np.append(share, 1 - share)
    return csr_array((weights, (rows, np.append(sizes, sizes))), shape=(len(points), len(counts)))


def pattern_matrix(patterns: Composition, num_lengths: int) -> Any:
    """Return the samples of each length in each pattern: sparse float64 (num_lengths,
    num_patterns)."""
    from scipy.sparse import csc_array

    times = patterns.times.astype(np.float64)
    shape = (num_lengths, len(patterns.multiplicity))
    return csc_array((times, patterns.lengths, patterns.offsets), shape=shape)


def solve(columns: Any, demand: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Minimise packs such that every row's demand is covered. ``columns`` sparse (rows, patterns),
    ``demand`` (rows,). Returns fractional packs of each pattern, prices of the rows, >= 0, and the
    packs in all. HiGHS' simplex has one thread, so that the result is the same every time."""
    from scipy.optimize import linprog

    result = linprog(np.ones(columns.shape[1]), A_ub=-columns, b_ub=-demand, method="highs-ds")
    assert result.status == 0, f"the start patterns cover every length: {result.message}"
    return result.x, np.maximum(0.0, -result.ineqlin.marginals), float(result.fun)


def as_integers(prices: np.ndarray) -> np.ndarray:
    """Return prices in packs, float64, as int64 in ``UNIT``, each at most a pack."""
    return (np.clip(prices, 0.0, 1.0) * UNIT).astype(np.int64)


def bound_of(prices: np.ndarray, counts: np.ndarray, dearest: int) -> int:
    """Return the packs that all samples are worth, rounded up; ``dearest`` is the dearest pattern's
    price. In Python's integers: 10^9 samples at these prices exceed 64 bits."""
    worth = sum(price * n for price, n in zip(prices.tolist(), counts.tolist(), strict=True))
    return -(-worth // dearest) if dearest else 0


@njit(cache=True)  # costly for few samples, too
def _best_values(prices: np.ndarray, sizes: np.ndarray, capacity: int) -> tuple:
    """Solve the unbounded knapsack: return the best value within each capacity, and the size index
    used there or -1."""
    value = np.zeros(capacity + 1, np.int64)
    choice = np.full(capacity + 1, -1, np.int32)
    for space in range(1, capacity + 1):
        best = value[space - 1]
        pick = -1
        for i in range(sizes.shape[0]):
            if sizes[i] > space:
                break
            candidate = value[space - sizes[i]] + prices[i]
            if candidate > best:
                best = candidate
                pick = i
        value[space] = best
        choice[space] = pick
    return value, choice


def price_patterns(prices: np.ndarray, sizes: np.ndarray, capacity: int) -> tuple[int, Composition]:
    """Find the price of the dearest pattern, and patterns that cost more than a pack, the dearest
    for each of their lengths. ``prices`` int64 (num_sizes,) in ``UNIT``."""
    value, choice = _best_values(prices, sizes, capacity)
    with_size = prices + value[capacity - sizes]
    order = np.argsort(-with_size, kind="stable")[:_MAX_PRICED]
    order = order[with_size[order] > UNIT + UNIT // 10**7]
    rows = sorted({_trace(first, choice, sizes, capacity) for first in order.tolist()})
    entries = np.array([entry for row in rows for entry in row], np.int64).reshape(-1, 2)
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    patterns = np.stack([ends, np.ones_like(ends)], axis=1)
    return int(value[capacity]), from_entries(entries, patterns)


def _trace(
    first: int, choice: np.ndarray, sizes: np.ndarray, capacity: int
) -> tuple[tuple[int, int], ...]:
    """Follow a knapsack value back to its pattern, as (length, times) with lengths descending."""
    chosen = [int(sizes[first])]
    space = capacity - chosen[0]
    while space > 0:
        if choice[space] < 0:
            space -= 1  # the value here is that of one token less
            continue
        chosen.append(int(sizes[choice[space]]))
        space -= chosen[-1]
    lengths, times = np.unique(chosen, return_counts=True)
    return tuple(zip(lengths[::-1].tolist(), times[::-1].tolist(), strict=True))

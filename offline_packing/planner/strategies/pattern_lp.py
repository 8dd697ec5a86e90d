"""Random exact fills, and a linear program over patterns, where longest first wastes room.

*Random fills*, for narrow distributions: where all samples have similar lengths (a fixed number of
vision tokens plus a short text), longest first wastes the same few per cent in every pack. Here a
pack of k samples is drawn as a *bridge*: at every step the distribution is tilted, P(l) ~ counts[l]
* exp(theta * l), so that its mean is the length that the pack still needs per sample, and the last
two lengths are chosen to end exactly on ``seq_length``. Long and short samples are thereby used up
at the rate at which they occur.

*The program* minimises the number of packs x_j >= 0 over patterns j such that every length is
covered: the cutting-stock program of Gilmore and Gomory (1961). Patterns come from random fills and
from the plans at hand; *pricing* finds further ones. Fractions are rounded down and the samples
that are left over are packed again.

The dual proves a lower bound: give every length a price >= 0, and divide by the price of the
dearest pattern. No packing has fewer packs than all samples are then worth, however the prices were
found (Farley, 1990). The dearest pattern comes from a knapsack over all lengths in integers, so
that rounding cannot spoil the proof.
"""

import math
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from offline_packing.planner.strategies.composition import (
    EMPTY,
    Composition,
    add_runs,
    as_rows,
    dual_feasible_bound,
    from_entries,
    join_compositions,
    lower_bound,
    packs_within,
    select_patterns,
)
from offline_packing.planner.strategies.kernels import Kernel, list_of, random_state, random_unit
from offline_packing.planner.strategies.longest_first import (
    best_fit_decreasing,
    exact_fill,
    greedy_knapsack,
)

_GRID = 65  # target means for which a tilted distribution is kept
_MAX_PATTERNS = 20_000  # about so many patterns use up everything
_REFRESH = 200  # patterns drawn before the tilted distributions are computed again, at least
_MAX_TILTED = 30_000_000  # entries of tilted distributions in all: bounds the time to a second
_TRIES = 12  # draws of one pattern
_MAX_FAILURES = 400  # consecutive draws without a pattern before giving up


class _Tilted(NamedTuple):
    """The histogram tilted to a grid of means from ``low`` to ``high``."""

    #: int64 (num_sizes,): the lengths that have samples
    sizes: np.ndarray
    #: float64 (grid, num_sizes): cumulative shares of the sizes at each mean; (0, 0) where no
    #: mean can be reached
    cdf: np.ndarray
    low: float
    high: float


@njit(cache=True)  # costly for few samples, too; and NumPy rounds exp in its own way
def _tilt(sizes: np.ndarray, counts: np.ndarray, theta: np.ndarray) -> _Tilted:
    """Newton's method for the tilt of each target mean. ``counts`` (num_sizes,) of the ``sizes``;
    ``theta`` float64 (grid,) holds start values and receives the tilts."""
    # target means worth a distribution: three standard deviations around the mean
    lengths = sizes.astype(np.float64)
    mean = (counts * lengths).sum() / counts.sum()
    squares = (counts * lengths * lengths).sum() / counts.sum()
    deviation = np.sqrt(max(0.0, squares - mean * mean)) + 1.0
    low = max(lengths[0] + 1.0, mean - 3 * deviation)
    high = min(lengths[-1] - 1.0, mean + 3 * deviation)
    if high <= low + 1:
        return _Tilted(sizes, np.zeros((0, 0)), low, high)
    grid = theta.shape[0]
    cdf = np.empty((grid, sizes.shape[0]))
    precision = max(0.3, 0.1 * (high - low) / (grid - 1))
    for row in range(grid):
        target = low + (high - low) * row / (grid - 1)
        for _ in range(30):
            weight = 0.0
            first = 0.0
            second = 0.0
            for i in range(sizes.shape[0]):
                distance = sizes[i] - target
                share = counts[i] * np.exp(theta[row] * distance)
                weight += share
                first += share * distance
                second += share * distance * distance
            mean = first / weight
            variance = second / weight - mean * mean
            if variance <= 1e-9:
                break
            theta[row] -= min(0.02, max(-0.02, mean / variance))
            if abs(mean) < precision:
                break
        total = 0.0
        for i in range(sizes.shape[0]):
            total += counts[i] * np.exp(theta[row] * (sizes[i] - target))
            cdf[row, i] = total
        cdf[row] /= total
    return _Tilted(sizes, cdf, low, high)


@Kernel
def _draw(distributions: _Tilted, target: float, state: np.ndarray) -> int:
    """A size drawn from the distribution whose mean is nearest to ``target``."""
    last = distributions.cdf.shape[0] - 1
    row = int((target - distributions.low) / (distributions.high - distributions.low) * last + 0.5)
    cdf = distributions.cdf[min(last, max(0, row)), :-1]
    return distributions.sizes[np.searchsorted(cdf, random_unit(state))]


@Kernel
def _draw_bridge(
    distributions: _Tilted, counts: np.ndarray, packs: int, drawn: np.ndarray, state: np.ndarray
) -> bool:
    """Fill ``drawn`` with lengths that sum to the capacity exactly, if a try succeeds. ``packs``:
    how many packs shall use the pattern; lengths with fewer samples are avoided."""
    samples = drawn.shape[0]
    for _ in range(_TRIES):
        space = counts.shape[0] - 1
        for place in range(samples - 2):
            target = space / (samples - place)
            length = _draw(distributions, target, state)
            for _ in range(6):
                if counts[length] >= packs:
                    break
                length = _draw(distributions, target, state)
            drawn[place] = length
            space -= length
        for _ in range(24):
            length = _draw(distributions, space / 2, state)
            last = space - length
            if 1 <= last < counts.shape[0] and min(counts[length], counts[last]) >= packs:
                drawn[samples - 2 :] = length, last
                return True
    return False


@Kernel
def _tilted_fills(
    counts: np.ndarray, stop_packs: int, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Entries [length, times] and patterns [end, multiplicity]; takes them from ``counts``."""
    capacity = counts.shape[0] - 1
    num_sizes = int(np.count_nonzero(counts))
    max_refreshes = max(20, _MAX_TILTED // (_GRID * max(1, num_sizes)))
    refresh = max(_REFRESH, 2 * _MAX_PATTERNS // max_refreshes)
    entries, patterns = list_of((0, 0)), list_of((0, 0))
    theta = np.zeros(_GRID)
    samples_left = counts.sum()
    tokens_left = (counts * np.arange(capacity + 1)).sum()
    packs_wanted = max(1, int(tokens_left / capacity / _MAX_PATTERNS))
    carried = 0.0  # fractional samples per pack, carried so that the mean is met
    failures = 0
    refreshes = 0
    age = refresh
    while tokens_left > capacity * stop_packs and failures < _MAX_FAILURES:
        if age >= refresh:
            refreshes += 1
            sizes = np.flatnonzero(counts)
            distributions = _tilt(sizes, counts[sizes], theta)
            if refreshes > max_refreshes or distributions.cdf.size == 0:
                break
            age = 0
        per_pack = samples_left * capacity / tokens_left + carried
        samples = int(per_pack)
        if samples < 2:
            break
        carried = per_pack - samples
        drawn = np.empty(samples, np.int64)
        runs = list_of((0, 0))
        packs = 0
        if _draw_bridge(distributions, counts, packs_wanted, drawn, state):
            drawn.sort()
            add_runs(runs, drawn)
            packs = min(packs_wanted, packs_within(runs, 0, counts))
        if packs == 0:
            failures += 1
            age += refresh // 10
            continue
        failures = 0
        age += 1
        for length, times in runs:
            counts[length] -= packs * times
        samples_left -= packs * samples
        tokens_left -= packs * capacity
        entries.extend(runs)
        patterns.append((len(entries), packs))
    return as_rows(entries), as_rows(patterns)


def tilted_fills(
    counts: np.ndarray, *, seed: int = 0, stop_packs: int = 30
) -> tuple[Composition, np.ndarray]:
    """Draw exact fills until about ``stop_packs`` packs' worth of tokens or no fill is left. Each
    pattern serves enough packs that about 20,000 patterns use up everything. Returns the fills and
    the counts that are left, int64 (seq_length + 1,)."""
    left = counts.copy()
    fills = from_entries(*_tilted_fills(left, stop_packs, random_state(seed)))
    return fills, left


UNIT = 1 << 32  # price of a whole pack; prices are integers
_MAX_PRICED = 400  # patterns found in one round
_MAX_ROUNDS = 40
MAX_POINTS = 100  # lengths with a price of their own, the others' are interpolated
_MAX_CELLS = 30_000_000  # capacity times different lengths in a knapsack, about 0.1 s


def prove_bound(counts: np.ndarray, patterns: Composition) -> tuple[int, Composition]:
    """A lower bound of the number of packs, and patterns found on the way.

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
        return 0, patterns
    feasible = csr_array(dual_feasible_bound(counts)[1][np.newaxis])
    interpolation = vstack([_interpolation(sizes, counts), feasible], format="csr")
    start = patterns._replace(lengths=patterns.lengths // granule)
    demand = interpolation @ counts
    found: list[Composition] = []
    bound = 0
    columns = interpolation @ pattern_matrix(start, len(counts))
    for _ in range(_MAX_ROUNDS):
        _, point_prices, objective = solve(columns, demand)
        prices = as_integers(interpolation.T @ point_prices)
        dearest, priced = price_patterns(prices[sizes], sizes, len(counts) - 1)
        bound = max(bound, bound_of(prices, counts, dearest))
        if bound >= objective or priced.num_packs == 0:
            break
        found.append(priced)
        own = interpolation @ pattern_matrix(priced, len(counts))
        columns = hstack([columns, own], format="csc")
    return bound, join_compositions(found if granule == 1 else [])


def _in_granules(counts: np.ndarray, granule: int) -> np.ndarray:
    """Histogram of the lengths in whole granules: int64 (seq_length // granule + 1,)."""
    whole = np.add.reduceat(counts, np.arange(0, len(counts), granule))
    whole[0] = 0  # fits anywhere
    return whole


def _interpolation(sizes: np.ndarray, counts: np.ndarray) -> Any:
    """Weights of the points for each length: sparse float64 (num_points, seq_length + 1). Half of
    the points are spread evenly over the samples, half over the different lengths."""
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
    """Samples of each length in each pattern: sparse float64 (num_lengths, num_patterns)."""
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
    """Prices in packs, float64, as int64 in ``UNIT``, each at most a pack."""
    return (np.clip(prices, 0.0, 1.0) * UNIT).astype(np.int64)


def bound_of(prices: np.ndarray, counts: np.ndarray, dearest: int) -> int:
    """The packs that all samples are worth, rounded up; ``dearest`` is the dearest pattern's price.
    In Python's integers: 10^9 samples at these prices exceed 64 bits."""
    worth = sum(price * n for price, n in zip(prices.tolist(), counts.tolist(), strict=True))
    return -(-worth // dearest) if dearest else 0


@njit(cache=True)  # costly for few samples, too
def _best_values(prices: np.ndarray, sizes: np.ndarray, capacity: int) -> tuple:
    """Unbounded knapsack: best value within each capacity, and the size index used there or -1."""
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
    """The price of the dearest pattern, and patterns that cost more than a pack, the dearest for
    each of their lengths. ``prices`` int64 (num_sizes,) in ``UNIT``."""
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
    """The pattern of a knapsack value, as (length, times) with lengths descending."""
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


_SEED_SAMPLES = 60_000  # the histogram is scaled down to about so many samples to draw patterns
MAX_SIZES = 1500  # different lengths up to which the program is exact
_COARSE_SIZES = 1000  # different lengths after rounding up where there are more
_PRICING_WORK = 4_000  # rounds of pricing times different lengths: bounds the time to seconds
_DRAWS = 8  # random fills tried for what rounding leaves


def pattern_lp(
    counts: np.ndarray, *, seed: int = 0, proof: tuple[int, Composition] | None = None
) -> Composition:
    """Pack by a linear program over patterns; for narrow distributions of lengths.

    ``counts`` int64 (seq_length + 1,). The time depends on the number of different lengths, about
    a second for a thousand, not on the number of samples. Above ``MAX_SIZES`` different lengths
    they are rounded up to a common multiple first, which costs a little of the fill, and nothing is
    proved. ``proof`` is what ``prove_bound`` returned for these counts, if it was asked before.
    """
    sizes = np.flatnonzero(counts)
    if len(sizes) == 0:
        return EMPTY
    if len(sizes) > MAX_SIZES:
        granule = 2
        while len(np.unique(-(-sizes // granule))) > _COARSE_SIZES:
            granule *= 2
        coarse = coarsen(counts, granule)
        proof = lower_bound(coarse), EMPTY
        # the lower bound does not carry over
        return from_entries(*_refine(pattern_lp(coarse, seed=seed, proof=proof), counts, granule))
    patterns = _seed_patterns(counts, sizes, seed)
    bound, found = proof or prove_bound(counts, patterns)
    for _ in range(max(1, min(40, _PRICING_WORK // len(sizes)))):
        patterns = join_compositions([patterns, found])
        columns = pattern_matrix(patterns, len(counts))[sizes]
        fractions, prices, objective = solve(columns, counts[sizes])
        if math.ceil(objective - 1e-6) <= bound:
            break
        _, found = price_patterns(as_integers(prices), sizes, len(counts) - 1)
        if found.num_packs == 0:
            break
    return _rounded(patterns, fractions, counts, seed, bound)._replace(lower_bound=bound)


def _seed_patterns(counts: np.ndarray, sizes: np.ndarray, seed: int) -> Composition:
    """Start patterns; patterns of best-fit-decreasing make sure that every length is covered. Where
    every length has a price of its own, pricing soon finds the others."""
    if len(sizes) <= MAX_POINTS:
        return join_compositions([best_fit_decreasing(counts), exact_fill(counts)])
    scale = max(1, int(counts.sum()) // _SEED_SAMPLES)
    sample = np.zeros_like(counts)
    sample[sizes] = np.maximum(1, counts[sizes] // scale)
    drawn, left = tilted_fills(sample, seed=seed)
    return join_compositions(
        [drawn, best_fit_decreasing(left), best_fit_decreasing(counts), exact_fill(counts)]
    )


@Kernel
def _take_patterns(patterns: Composition, wanted: np.ndarray, counts: np.ndarray) -> None:
    """Lower ``wanted`` packs of each pattern to what ``counts`` has, and take it from there."""
    for pattern in range(wanted.shape[0]):
        entries = slice(patterns.offsets[pattern], patterns.offsets[pattern + 1])
        lengths, times = patterns.lengths[entries], patterns.times[entries]
        wanted[pattern] = min(wanted[pattern], (counts[lengths] // times).min())
        counts[lengths] -= wanted[pattern] * times


def _rounded(
    patterns: Composition, fractions: np.ndarray, counts: np.ndarray, seed: int, bound: int
) -> Composition:
    """Whole packs of the solution, and the rest packed by whichever method needs fewest packs."""
    packs = np.floor(fractions + 1e-9).astype(np.int64)
    left = counts.copy()
    _take_patterns(patterns, packs, left)
    whole = select_patterns(patterns._replace(multiplicity=packs), np.flatnonzero(packs))
    methods = (best_fit_decreasing, exact_fill, greedy_knapsack)
    residue = min((method(left) for method in methods), key=attrgetter("num_packs"))
    for draw in range(1, _DRAWS + 1 if np.count_nonzero(counts) > MAX_POINTS else 1):
        if whole.num_packs + residue.num_packs <= bound:
            break
        drawn, rest = tilted_fills(left, seed=seed + draw)
        ends = (join_compositions([drawn, end(rest)]) for end in (best_fit_decreasing, exact_fill))
        residue = min(residue, *ends, key=attrgetter("num_packs"))
    return join_compositions([whole, residue])


def coarsen(counts: np.ndarray, granule: int) -> np.ndarray:
    """Histogram in units of ``granule``: int64 (seq_length // granule + 1,). A length counts as its
    size rounded up, and at most a whole pack: a fit of rounded sizes is a fit."""
    capacity = (len(counts) - 1) // granule
    lengths = np.flatnonzero(counts)
    coarse = np.zeros(capacity + 1, np.int64)
    np.add.at(coarse, np.minimum(capacity, -(-lengths // granule)), counts[lengths])
    return coarse


@Kernel
def _refine(coarse: Composition, counts: np.ndarray, granule: int) -> tuple[np.ndarray, np.ndarray]:
    """The same packs in true lengths, as entries [length, times] and patterns [end of entries,
    multiplicity]: each rounded length is given the true ones, longest first. ``coarse`` uses up
    ``coarsen(counts, granule)``."""
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
                packs = min(packs, counts[current[unit]] // coarse.times[entry])
            packs = max(packs, 1)  # 1: an entry takes the last of a length and some of the next
            for entry in rounded:
                unit = coarse.lengths[entry]
                wanted = np.int64(coarse.times[entry])
                while wanted > 0:
                    while counts[current[unit]] == 0:
                        current[unit] -= 1
                    length = current[unit]
                    times = min(wanted, counts[length] // packs)
                    counts[length] -= packs * times
                    wanted -= times
                    entries.append((length, times))
            left -= packs
            patterns.append((len(entries), packs))
    return as_rows(entries), as_rows(patterns)

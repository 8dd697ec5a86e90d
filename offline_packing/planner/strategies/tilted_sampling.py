"""Exact fills drawn at random from an exponentially tilted histogram, for narrow distributions.

Where all samples have similar lengths (a fixed number of vision tokens plus a short text), longest
first wastes the same few per cent in every pack. Here a pack of k samples is drawn as a *bridge*:
at every step the distribution is tilted, P(l) ~ counts[l] * exp(theta * l), so that its mean is
what the pack still needs per sample, and the last two lengths are chosen to end exactly on
``seq_length``. Long and short samples are thereby used up at the rate at which they occur.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from offline_packing.planner.strategies.composition import (
    Composition,
    add_runs,
    as_rows,
    from_entries,
    packs_within,
)
from offline_packing.planner.strategies.kernels import list_of, random_state, random_unit

_GRID = 65  # target means for which a tilted distribution is kept
_MAX_PATTERNS = 20_000  # about so many patterns use up everything
_REFRESH = 200  # patterns drawn before the tilted distributions are computed again, at least
_MAX_CELLS = 30_000_000  # entries of tilted distributions in all: bounds the time to a second
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


@njit(cache=True)
def _mean_range(sizes: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Target means worth a tilted distribution: three standard deviations around the mean."""
    lengths = sizes.astype(np.float64)
    mean = (counts * lengths).sum() / counts.sum()
    squares = (counts * lengths * lengths).sum() / counts.sum()
    deviation = np.sqrt(max(0.0, squares - mean * mean)) + 1.0
    return max(lengths[0] + 1.0, mean - 3 * deviation), min(lengths[-1] - 1.0, mean + 3 * deviation)


@njit(cache=True)
def _tilt(sizes: np.ndarray, counts: np.ndarray, theta: np.ndarray) -> _Tilted:
    """Newton's method for the tilt of each target mean. ``counts`` (num_sizes,) of the ``sizes``;
    ``theta`` float64 (grid,) holds start values and receives the tilts."""
    low, high = _mean_range(sizes, counts)
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


@njit(cache=True)
def _draw(distributions: _Tilted, target: float, state: np.ndarray) -> int:
    """A size drawn from the distribution whose mean is nearest to ``target``."""
    last = distributions.cdf.shape[0] - 1
    row = int((target - distributions.low) / (distributions.high - distributions.low) * last + 0.5)
    cdf = distributions.cdf[min(last, max(0, row)), :-1]
    return distributions.sizes[np.searchsorted(cdf, random_unit(state))]


@njit(cache=True)
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


@njit(cache=True)
def _tilted_fills(
    counts: np.ndarray, stop_packs: int, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Entries [length, repeat] and patterns [end, multiplicity]; takes them from ``counts``."""
    capacity = counts.shape[0] - 1
    num_sizes = int(np.count_nonzero(counts))
    max_refreshes = max(20, _MAX_CELLS // (_GRID * max(1, num_sizes)))
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
        for length, repeat in runs:
            counts[length] -= packs * repeat
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

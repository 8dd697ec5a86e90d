"""Exact fills drawn at random from an exponentially tilted histogram, for narrow laws of lengths.

Where all samples have similar lengths (a fixed number of vision tokens plus a short text), longest
first wastes the same few per cent in every pack. Here a pack of k samples is drawn as a *bridge*:
at every step the law of lengths is tilted, P(l) ~ counts[l] * exp(theta * l), so that its mean is
what the pack still needs per sample, and the last two lengths are chosen to end exactly on
``seq_length``. Long and short samples are thereby used up at the rate at which they occur.
"""

import numpy as np
from numba import njit

from offline_packing.planner.strategies.composition import (
    Composition,
    add_runs,
    as_rows,
    from_entries,
    packs_within,
    pair_list,
    take_packs,
)
from offline_packing.planner.strategies.kernels import random_state, random_unit

_GRID = 65  # target means for which a tilted law is kept
_REFRESH = 200  # patterns drawn before the tilted laws are computed again, at least
_MAX_CELLS = 100_000_000  # entries of tilted laws computed in all: bounds the time to seconds
_TRIES = 12  # draws of one pattern
_MAX_FAILURES = 400  # draws in a row without a pattern before giving up


@njit(cache=True)
def _tilted_laws(
    sizes: np.ndarray,
    counts: np.ndarray,
    low: float,
    high: float,
    theta: np.ndarray,
    cdf: np.ndarray,
) -> None:
    """Newton's method for the tilt of each target mean in low..high; fills ``cdf`` row by row.

    ``theta`` float64 (grid,) holds start values and receives the tilts; ``cdf`` is (grid, sizes).
    """
    grid = theta.shape[0]
    precision = max(0.3, 0.1 * (high - low) / (grid - 1))
    for row in range(grid):
        target = low + (high - low) * row / (grid - 1)
        for _ in range(30):
            weight = 0.0
            first = 0.0
            second = 0.0
            for i in range(sizes.shape[0]):
                if counts[i] > 0:
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
            if counts[i] > 0:
                total += counts[i] * np.exp(theta[row] * (sizes[i] - target))
            cdf[row, i] = total
        for i in range(sizes.shape[0]):
            cdf[row, i] /= total


@njit(cache=True)
def _mean_range(sizes: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Target means worth a tilted law: three standard deviations around the mean."""
    used = np.flatnonzero(counts)
    samples, lengths = counts[used], sizes[used].astype(np.float64)
    mean = (samples * lengths).sum() / samples.sum()
    squares = (samples * lengths * lengths).sum() / samples.sum()
    deviation = np.sqrt(max(0.0, squares - mean * mean)) + 1.0
    return max(lengths[0] + 1.0, mean - 3 * deviation), min(lengths[-1] - 1.0, mean + 3 * deviation)


@njit(cache=True)
def _draw(cdf: np.ndarray, low: float, high: float, target: float, state: np.ndarray) -> int:
    """Index of a size drawn from the law whose mean is nearest to ``target``."""
    row = int((target - low) / (high - low) * (cdf.shape[0] - 1) + 0.5)
    row = min(cdf.shape[0] - 1, max(0, row))
    return np.searchsorted(cdf[row, :-1], random_unit(state))


@njit(cache=True)
def _draw_bridge(
    sizes: np.ndarray,
    counts: np.ndarray,
    index_of: np.ndarray,
    cdf: np.ndarray,
    low: float,
    high: float,
    packs: int,
    drawn: np.ndarray,
    state: np.ndarray,
) -> bool:
    """Fill ``drawn`` with size indices that sum to the capacity exactly, if a try succeeds.

    ``packs``: how many packs shall use the pattern; sizes with fewer samples are avoided.
    """
    capacity = index_of.shape[0] - 1
    samples = drawn.shape[0]
    for _ in range(_TRIES):
        space = capacity
        for place in range(samples - 2):
            target = space / (samples - place)
            choice = _draw(cdf, low, high, target, state)
            for _ in range(6):
                if counts[choice] >= packs:
                    break
                choice = _draw(cdf, low, high, target, state)
            drawn[place] = choice
            space -= sizes[choice]
        for _ in range(24):
            choice = _draw(cdf, low, high, space / 2, state)
            last = space - sizes[choice]
            if 1 <= last <= capacity and counts[choice] >= packs:
                partner = index_of[last]
                if partner >= 0 and counts[partner] >= packs:
                    drawn[samples - 2] = choice
                    drawn[samples - 1] = partner
                    return True
    return False


@njit(cache=True)
def _tilted_fills(
    sizes: np.ndarray,
    counts: np.ndarray,
    index_of: np.ndarray,
    max_patterns: int,
    stop_packs: int,
    refresh: int,
    max_refreshes: int,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Entries [index of size, repeat] and patterns [end, multiplicity]; taken from ``counts``."""
    capacity = index_of.shape[0] - 1
    entries, patterns = pair_list(), pair_list()
    theta = np.zeros(_GRID)
    cdf = np.zeros((_GRID, sizes.shape[0]))
    buffer = np.empty(capacity, np.int64)
    samples_left = counts.sum()
    tokens_left = (counts * sizes).sum()
    packs_wanted = max(1, int(tokens_left / capacity / max_patterns))
    carried = 0.0  # fractional samples per pack, carried so that the mean is met
    failures = 0
    refreshes = 0
    age = refresh
    low = 0.0
    high = 0.0
    while tokens_left > capacity * stop_packs and failures < _MAX_FAILURES:
        if age >= refresh:
            refreshes += 1
            if refreshes > max_refreshes:
                break
            low, high = _mean_range(sizes, counts)
            if high <= low + 1:
                break
            _tilted_laws(sizes, counts, low, high, theta, cdf)
            age = 0
        per_pack = samples_left * capacity / tokens_left + carried
        samples = int(per_pack)
        if samples < 2:
            break
        carried = per_pack - samples
        drawn = buffer[:samples]
        runs = pair_list()
        packs = np.int64(0)
        if _draw_bridge(sizes, counts, index_of, cdf, low, high, packs_wanted, drawn, state):
            drawn.sort()
            add_runs(runs, drawn)
            packs = min(packs_wanted, packs_within(runs, 0, counts))
        if packs == 0:
            failures += 1
            age += refresh // 10
            continue
        failures = 0
        age += 1
        take_packs(runs, 0, counts, packs)
        samples_left -= packs * samples
        tokens_left -= packs * capacity
        entries.extend(runs)
        patterns.append((len(entries), packs))
    return as_rows(entries), as_rows(patterns)


def tilted_fills(
    counts: np.ndarray, *, seed: int = 0, max_patterns: int = 20_000, stop_packs: int = 30
) -> tuple[Composition, np.ndarray]:
    """Draw exact fills until about ``stop_packs`` packs' worth of tokens or no fill is left.

    Each pattern serves enough packs that about ``max_patterns`` patterns use up everything.
    Returns the fills and the counts that are left, int64 (seq_length + 1,).
    """
    sizes = np.flatnonzero(counts)
    index_of = np.full(len(counts), -1, np.int64)
    index_of[sizes] = np.arange(len(sizes))
    left = counts[sizes]
    max_refreshes = max(20, _MAX_CELLS // (_GRID * max(1, len(sizes))))
    refresh = max(_REFRESH, 2 * max_patterns // max_refreshes)
    entries, patterns = _tilted_fills(
        sizes,
        left,
        index_of,
        max_patterns,
        stop_packs,
        refresh,
        max_refreshes,
        random_state(seed),
    )
    entries[:, 0] = sizes[entries[:, 0]]
    remaining = np.zeros_like(counts)
    remaining[sizes] = left
    return from_entries(entries, patterns), remaining

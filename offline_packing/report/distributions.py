"""Arrays of any size as a few figures."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

#: Bins of a logarithmic histogram per doubling.
_BINS_PER_DOUBLING: Final = 4
_MAX_BINS: Final = 40
_QUANTILES: Final = {"min": 0, "p5": 5, "p50": 50, "p95": 95, "max": 100}


def spread(values: npt.NDArray[Any]) -> dict[str, float | int]:
    """mean, min, p5, p50, p95 and max; quantiles are values that occur. Not for empty arrays."""
    points = np.percentile(values, list(_QUANTILES.values()), method="inverted_cdf")
    quantiles = {name: p.item() for name, p in zip(_QUANTILES, points, strict=True)}
    return {"mean": float(values.mean(dtype=np.float64)), **quantiles}


def linear_histogram(values: npt.NDArray[np.integer]) -> dict[str, list[int]]:
    """edges (n + 1) and counts (n) of at most 40 bins of equal width, from the smallest value on;
    bin i holds edges[i] <= value < edges[i + 1]. Not for empty arrays."""
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // _MAX_BINS)
    counts = np.bincount((values - low) // width)
    return {"edges": (low + width * np.arange(len(counts) + 1)).tolist(), "counts": counts.tolist()}


def log_histogram(values: npt.NDArray[np.integer], limit: int) -> dict[str, list[int]]:
    """edges (n + 1) and counts (n) of positive integers, from the first bin that holds anything to
    the last, in bins that do not depend on the data: edges 0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14,
    16, 20, ..., and `limit`; bin i holds edges[i] < value <= edges[i + 1]. Not for empty arrays."""
    steps = 2.0 ** (np.arange(32 * _BINS_PER_DOUBLING) / _BINS_PER_DOUBLING)
    edges = np.union1d(np.ceil(steps).astype(np.int64), [0, limit])
    counts = np.histogram(values, edges + 1)[0]
    used = np.flatnonzero(counts)
    bins = slice(used[0], used[-1] + 1)
    return {"edges": edges[bins.start : bins.stop + 1].tolist(), "counts": counts[bins].tolist()}

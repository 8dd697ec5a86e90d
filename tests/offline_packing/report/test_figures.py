"""Histograms and spreads, against slow counts."""

import numpy as np
import pytest

from offline_packing.report.figures import linear_histogram, log_histogram, spread


def test_bins_end_at_powers_of_two_and_at_the_limit() -> None:
    values = np.array([1, 2, 2, 3, 1024, 1025, 2999, 3000, 3001, 70_000])
    document = log_histogram(values, 3000)
    edges, counts = document["edges"], document["counts"]
    assert {1, 2, 1024, 2048, 3000, 65_536} <= set(edges)
    assert edges[0] == 0
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        assert count == sum(low < value <= high for value in values)
    assert sum(counts) == 10
    assert counts[-1] == 1


@pytest.mark.parametrize("high", [7, 40, 41, 1000])
def test_bins_of_equal_width(high: int) -> None:
    values = np.random.default_rng(0).integers(3, high, 500)
    document = linear_histogram(values)
    edges, counts = document["edges"], document["counts"]
    assert len(counts) <= 40
    assert len(set(np.diff(edges))) == 1
    for low, end, count in zip(edges[:-1], edges[1:], counts, strict=True):
        assert count == ((values >= low) & (values < end)).sum()
    assert sum(counts) == 500


def test_quantiles_are_values_that_occur() -> None:
    figures = spread(np.array([10, 1, 2, 4]))
    assert figures == {"mean": 4.25, "min": 1, "p5": 1, "p50": 2, "p95": 10, "max": 10}
    assert all(isinstance(figures[name], int) for name in ("min", "p50", "max"))

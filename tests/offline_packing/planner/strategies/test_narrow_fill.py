"""Narrow fill: packs full or even, nothing lost, the bound reached on narrow distributions."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.planner.strategies.histogram import even_packs
from offline_packing.planner.strategies.narrow_fill import narrow_fills


@st.composite
def any_counts(draw: st.DrawFn) -> np.ndarray:
    capacity = draw(st.integers(1, 300))
    largest = draw(st.integers(1, capacity))
    smallest = draw(st.integers(1, largest))
    lengths = draw(st.lists(st.integers(smallest, largest), max_size=200))
    return np.bincount(np.array(lengths, np.int64), minlength=capacity + 1)


@given(
    counts=any_counts(),
    seed=st.integers(0, 3),
    max_patterns=st.integers(1, 20),
    max_spread=st.sampled_from([1, 10, 1000]),
)
@settings(max_examples=200, deadline=None)
def test_no_pack_is_too_full_and_no_sample_is_lost(counts, seed, max_patterns, max_spread):
    with pytest.MonkeyPatch.context() as patch:
        module = sys.modules["offline_packing.planner.strategies.narrow_fill"]
        patch.setattr(module, "_MAX_SPREAD", max_spread)
        packs, left = narrow_fills(counts, seed=seed, max_patterns=max_patterns)
    assert (packs.pattern_tokens() < len(counts)).all()
    np.testing.assert_array_equal(packs.used_counts(len(counts)) + left, counts)
    assert (left >= 0).all()


def test_very_long_samples_stand_beside_the_shortest():
    """4,000 + 1,500 + 1,390 + 1,390 does not fit."""
    counts = np.zeros(8193, np.int64)
    counts[[1390, 1500, 4000]] = 3, 4, 1
    packs = even_packs(counts, 4)
    assert sorted(np.sort(packs).tolist()) == [[1390, 1390, 1390, 4000], [1500] * 4]

"""Narrow fill: packs full or even, nothing lost, the bound reached on narrow distributions."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.planner.strategies.histogram import even_packs, lower_bound
from offline_packing.planner.strategies.narrow_fill import is_narrow, narrow_fill, narrow_fills


def narrow_counts(number: int, capacity: int) -> np.ndarray:
    """Fixed image tokens and a short caption: 600 to 2,096 tokens, mean 668."""
    text = np.exp(np.log(60) + 0.6 * np.random.default_rng(1234).standard_normal(number))
    lengths = 596 + text.clip(4, 1500).astype(np.int64)
    return np.bincount(lengths, minlength=capacity + 1)


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


@given(counts=any_counts(), seed=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_all_samples_are_packed_within_capacity_same_seed_same_packs(counts, seed):
    packs = narrow_fill(counts, seed=seed)
    assert (packs.pattern_tokens() <= len(counts) - 1).all()
    np.testing.assert_array_equal(packs.used_counts(len(counts)), counts)
    again = narrow_fill(counts, seed=seed)
    np.testing.assert_array_equal(packs.lengths, again.lengths)
    np.testing.assert_array_equal(packs.multiplicity, again.multiplicity)


def test_every_pack_is_exactly_full_where_this_is_possible():
    packs, left = narrow_fills(narrow_counts(100_000, 8192))
    assert (packs.pattern_tokens() == 8192).all()
    assert left.sum() < 1000


@pytest.mark.parametrize(
    ("number", "capacity"), [(10_000, 8192), (100_000, 8192), (1_000_000, 8192), (100_000, 32768)]
)
def test_a_narrow_distribution_reaches_the_bound(number, capacity):
    """Best-fit-decreasing needs 3.5% more packs here."""
    counts = narrow_counts(number, capacity)
    assert narrow_fill(counts).num_packs <= lower_bound(counts) + 2


def test_a_few_thousand_patterns_serve_a_million_samples():
    packs, _ = narrow_fills(narrow_counts(1_000_000, 8192), max_patterns=3000)
    assert len(packs.multiplicity) < 6000


def test_very_long_samples_stand_beside_the_shortest():
    """4,000 + 1,500 + 1,390 + 1,390 does not fit."""
    counts = np.zeros(8193, np.int64)
    counts[[1390, 1500, 4000]] = 3, 4, 1
    packs = even_packs(counts, 4)
    assert sorted(np.sort(packs).tolist()) == [[1390, 1390, 1390, 4000], [1500] * 4]


def test_a_distribution_without_exact_fills_ends():
    """At 4,096 seven samples of 600 or more do not fit, and most choices of six leave a gap."""
    counts = narrow_counts(20_000, 4096)
    counts[:600] = 0
    packs = narrow_fill(counts)
    np.testing.assert_array_equal(packs.used_counts(len(counts)), counts)


def test_narrow_means_a_deviation_below_half_of_the_mean():
    assert is_narrow(narrow_counts(1000, 8192))
    assert is_narrow(np.bincount([60, 140]))
    assert not is_narrow(np.bincount([40, 160]))
    assert not is_narrow(np.zeros(100, np.int64))

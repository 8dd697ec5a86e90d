"""Composers: every length once within capacity, exact against slow oracles, near the bounds."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.planner.strategies.auto import auto, mixed, tilted_sampling
from offline_packing.planner.strategies.composition import (
    count_lengths,
    lower_bound,
)
from offline_packing.planner.strategies.longest_first import (
    best_fit_decreasing,
    exact_fill,
    greedy_knapsack,
)
from offline_packing.planner.strategies.narrow_fill import (
    even_fill,
    even_packs,
    narrow_fill,
)
from offline_packing.planner.strategies.pattern_lp import pattern_lp
from tests.helpers.pack_lists import contents
from tests.helpers.sizes import length_counts


def best_fit_decreasing_oracle(lengths: list[int], capacity: int) -> list[list[int]]:
    packs: list[list[int]] = []
    for length in lengths:
        room = [capacity - sum(pack) for pack in packs]
        fitting = [space for space in room if space >= length]
        if fitting:
            packs[room.index(min(fitting))].append(length)
        else:
            packs.append([length])
    return packs


def greedy_knapsack_oracle(lengths: list[int], capacity: int) -> list[list[int]]:
    left, packs = list(lengths), []
    while left:
        pack: list[int] = []
        for length in list(left):
            if sum(pack) + length <= capacity:
                pack.append(length)
                left.remove(length)
        packs.append(pack)
    return packs


@pytest.mark.parametrize(
    ("compose", "oracle"),
    [
        (best_fit_decreasing, best_fit_decreasing_oracle),
        (greedy_knapsack, greedy_knapsack_oracle),
    ],
)
@settings(max_examples=100, deadline=None)
@given(counts=length_counts())
def test_equals_the_oracle(compose, oracle, counts) -> None:
    descending = np.repeat(np.arange(len(counts)), counts)[::-1].tolist()
    expected = oracle(descending, len(counts) - 1)
    packs = contents(compose(counts))
    assert sorted(map(sorted, packs)) == sorted(map(sorted, expected))


@pytest.mark.parametrize(
    "compose",
    [
        auto,
        best_fit_decreasing,
        exact_fill,
        narrow_fill,
        tilted_sampling,
        pattern_lp,
        mixed,
        greedy_knapsack,
    ],
)
@settings(max_examples=100, deadline=None)
@given(counts=length_counts())
def test_composers_use_every_length_once_within_capacity(compose, counts) -> None:
    composition, again = compose(counts, seed=3), compose(counts.copy(), seed=3)
    for one, other in zip(composition[:4], again[:4], strict=True):
        assert np.array_equal(one, other)
    assert composition.used_counts(len(counts)).tolist() == counts.tolist()
    assert composition.pattern_tokens().max(initial=0) < len(counts)
    assert composition.num_packs >= lower_bound(counts)
    assert (composition.multiplicity >= 1).all()


def test_lower_bound_counts_samples_that_cannot_share() -> None:
    # Three samples of 6 in packs of 10: 18 tokens would fit two packs, but no two fit together.
    assert lower_bound(count_lengths(np.array([6, 6, 6], np.int32), 10)) == 3


def test_many_samples_of_one_length_stay_one_pattern() -> None:
    counts = np.zeros(8193, np.int64)
    counts[1000] = 80_000_000_001
    composition = best_fit_decreasing(counts)
    assert composition.num_packs == 10_000_000_001
    assert len(composition.multiplicity) == 2


@given(
    counts=length_counts(),
    seed=st.integers(0, 3),
    max_patterns=st.integers(1, 20),
    max_spread=st.sampled_from([1, 10, 1000]),
)
@settings(max_examples=200, deadline=None)
def test_narrow_packs_are_not_too_full_and_lose_nothing(counts, seed, max_patterns, max_spread):
    with pytest.MonkeyPatch.context() as patch:
        module = sys.modules["offline_packing.planner.strategies.narrow_fill"]
        patch.setattr(module, "_MAX_SPREAD", max_spread)
        packs = narrow_fill(counts, seed=seed, max_patterns=max_patterns)
    assert (packs.pattern_tokens() < len(counts)).all()
    np.testing.assert_array_equal(packs.used_counts(len(counts)), counts)


def test_very_long_samples_stand_beside_the_shortest():
    """4,000 + 1,500 + 1,390 + 1,390 does not fit."""
    counts = np.zeros(8193, np.int64)
    counts[[1390, 1500, 4000]] = 3, 4, 1
    packs = even_packs(counts, 4)
    assert sorted(np.sort(packs).tolist()) == [[1390, 1390, 1390, 4000], [1500] * 4]


@settings(max_examples=100, deadline=None)
@given(counts=length_counts(), num_packs=st.integers(1, 200), seed=st.integers(0, 3))
def test_even_packs_are_as_many_as_were_asked_for(
    counts: np.ndarray, num_packs: int, seed: int
) -> None:
    packs, _ = even_fill(counts, num_packs, seed=seed)
    if num_packs < lower_bound(counts):
        assert packs is None
    if packs and counts.any():
        assert packs.num_packs <= num_packs  # without the empty ones, if there are fewer samples
        assert packs.used_counts(len(counts)).tolist() == counts.tolist()
        assert packs.pattern_tokens().max() < len(counts)


@pytest.mark.parametrize(("low", "high"), [(700, 1400), (1400, 3400)])
def test_as_few_packs_as_the_bound(low: int, high: int) -> None:
    lengths = np.random.default_rng(0).integers(low, high, 20_000, np.int32)
    counts = count_lengths(lengths, 8192)
    assert auto(counts).num_packs == lower_bound(counts)


def test_more_work_than_allowed_is_refused_at_once() -> None:
    counts = np.zeros(8193, np.int64)
    counts[8] = 10**9
    assert even_fill(counts, 10**6)[0] is None

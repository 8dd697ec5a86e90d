"""Histogram strategies: exact against slow oracles that place sample by sample."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.planner.strategies import STRATEGIES
from offline_packing.planner.strategies.auto import auto, mixed, tilted_sampling
from offline_packing.planner.strategies.exact_fill import exact_fill
from offline_packing.planner.strategies.histogram import (
    best_fit_decreasing,
    count_lengths,
    greedy_knapsack,
    lower_bound,
)
from offline_packing.planner.strategies.narrow_fill import narrow_fill
from offline_packing.planner.strategies.pattern_lp import pattern_lp


@st.composite
def lengths_and_capacity(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    capacity = draw(st.integers(1, 300))
    largest = draw(st.integers(1, capacity))
    lengths = draw(st.lists(st.integers(1, largest), max_size=120))
    return np.array(lengths, np.int32), capacity


def best_fit_decreasing_oracle(lengths: list[int], capacity: int) -> list[list[int]]:
    packs: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        room = [capacity - sum(pack) for pack in packs]
        fitting = [space for space in room if space >= length]
        if fitting:
            packs[room.index(min(fitting))].append(length)
        else:
            packs.append([length])
    return packs


def greedy_knapsack_oracle(lengths: list[int], capacity: int) -> list[list[int]]:
    left = sorted(lengths, reverse=True)
    packs = []
    while left:
        pack: list[int] = []
        for length in list(left):
            if sum(pack) + length <= capacity:
                pack.append(length)
                left.remove(length)
        packs.append(pack)
    return packs


def multisets(composition) -> list[tuple[int, ...]]:
    packs = []
    for j, count in enumerate(composition.multiplicity):
        entries = slice(composition.offsets[j], composition.offsets[j + 1])
        content = np.repeat(composition.lengths[entries], composition.repeats[entries])
        packs += [tuple(sorted(content.tolist()))] * int(count)
    return sorted(packs)


ORACLES = {
    best_fit_decreasing: best_fit_decreasing_oracle,
    greedy_knapsack: greedy_knapsack_oracle,
}


@pytest.mark.parametrize("composer", ORACLES)
@settings(max_examples=150, deadline=None)
@given(case=lengths_and_capacity())
def test_histogram_result_equals_the_slow_oracle(composer, case) -> None:
    lengths, capacity = case
    composition = composer(count_lengths(lengths, capacity))
    oracle = ORACLES[composer](lengths.tolist(), capacity)
    loads = sorted(sum(pack) for pack in oracle)
    assert sorted(np.repeat(composition.pattern_tokens(), composition.multiplicity)) == loads
    if composer is greedy_knapsack:  # best fit may choose between packs of equal room
        assert multisets(composition) == sorted(tuple(sorted(pack)) for pack in oracle)


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
@given(case=lengths_and_capacity())
def test_composers_use_every_length_once_within_capacity(compose, case) -> None:
    lengths, capacity = case
    counts = count_lengths(lengths, capacity)
    composition, again = compose(counts, seed=3), compose(counts.copy(), seed=3)
    for one, other in zip(composition[:4], again[:4], strict=True):
        assert np.array_equal(one, other)
    assert composition.used_counts(capacity + 1).tolist() == counts.tolist()
    assert composition.pattern_tokens().max(initial=0) <= capacity
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


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_takes_what_can_be_packed(name) -> None:
    """Nothing at all, and lengths of which two overflow 16 bits; others are refused by name."""
    strategy = STRATEGIES[name]
    assert strategy(np.zeros(0, np.int32), 64).num_packs == 0
    lengths = np.array([200_000, 62_144, 70_000])
    packs = strategy(lengths, 262_144)
    assert packs.num_packs == 2
    assert packs.sums(lengths).max() <= 262_144
    for wrong, message in (
        (np.array([5, 65, 7]), "sample 1 has 65 tokens, not in 1..64"),
        (np.array([0, 1]), "sample 0 has 0 tokens"),
        (np.array([1.0, 2.0]), "got float64"),
    ):
        with pytest.raises(ValueError, match=message):
            strategy(wrong, 64)

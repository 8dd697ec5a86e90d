"""Histogram strategies: exact against slow oracles that place sample by sample."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.planner.strategies import STRATEGIES
from offline_packing.planner.strategies.auto import auto, mixed, tilted_sampling
from offline_packing.planner.strategies.composition import (
    join_compositions,
    select_patterns,
)
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
    composition = compose(counts, seed=3)
    assert composition.used_counts(capacity + 1).tolist() == counts.tolist()
    assert composition.pattern_tokens().max(initial=0) <= capacity
    assert composition.num_packs >= lower_bound(counts)
    assert (composition.multiplicity >= 1).all()


@settings(max_examples=60, deadline=None)
@given(case=lengths_and_capacity())
def test_lower_bound_holds_for_exhaustive_best_packing(case) -> None:
    lengths, capacity = case
    counts = count_lengths(lengths, capacity)
    tokens_bound = -(-int(lengths.sum()) // capacity)
    packs = best_fit_decreasing(counts).num_packs
    assert tokens_bound <= lower_bound(counts) <= packs


def test_lower_bound_counts_samples_that_cannot_share() -> None:
    # Three samples of 6 in packs of 10: 18 tokens would fit two packs, but no two fit together.
    assert lower_bound(count_lengths(np.array([6, 6, 6], np.int32), 10)) == 3


def test_greedy_knapsack_on_the_small_example() -> None:
    # The integers 1..24 in packs of 100: 24 + 23 + 22 + 21 + 10 comes first.
    composition = greedy_knapsack(count_lengths(np.arange(1, 25, dtype=np.int32), 100))
    packs = [
        composition.lengths[composition.offsets[j] : composition.offsets[j + 1]].tolist()
        for j in range(len(composition.multiplicity))
    ]
    assert packs[0] == [24, 23, 22, 21, 10]
    assert sum(map(sum, packs)) == 300
    assert len(packs) == 3


def test_join_and_select_keep_patterns_whole() -> None:
    first = best_fit_decreasing(count_lengths(np.array([5, 4, 3, 3], np.int32), 8))
    second = best_fit_decreasing(count_lengths(np.array([2, 2, 2], np.int32), 8))
    joined = join_compositions([first, second])
    assert multisets(joined) == sorted(multisets(first) + multisets(second))
    short = np.flatnonzero(joined.pattern_tokens() == 6)
    assert multisets(select_patterns(joined, short)) == [(2, 2, 2)]
    fullest_first = select_patterns(joined, np.argsort(-joined.pattern_tokens()))
    assert multisets(fullest_first) == multisets(joined)
    assert (np.diff(fullest_first.pattern_tokens()) <= 0).all()
    assert join_compositions([]).num_packs == 0


def test_many_samples_of_one_length_stay_one_pattern() -> None:
    counts = np.zeros(8193, np.int64)
    counts[1000] = 80_000_000_001
    composition = best_fit_decreasing(counts)
    assert composition.num_packs == 10_000_000_001
    assert len(composition.multiplicity) == 2


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_packs_each_sample_once(name) -> None:
    lengths = np.random.default_rng(5).integers(1, 65, 400)
    packs = STRATEGIES[name](lengths, 64, seed=1)
    loads = np.add.reduceat(lengths[packs.sample_ids], packs.pack_offsets[:-1])
    assert sorted(packs.sample_ids.tolist()) == list(range(400))
    assert loads.max() <= 64
    again = STRATEGIES[name](lengths, 64, seed=1)
    assert np.array_equal(again.sample_ids, packs.sample_ids)

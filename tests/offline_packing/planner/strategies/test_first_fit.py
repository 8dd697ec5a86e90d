"""First fit: the packs of NeMo's quadratic loops, literally; next fit: the order is kept."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.planner.strategies.peers.placing import (
    first_fit_decreasing,
    first_fit_shuffle,
    sequential,
    shuffle_and_pack,
)
from offline_packing.planner.strategies.strategy import Packs

ALL = [first_fit_decreasing, first_fit_shuffle, shuffle_and_pack]


@st.composite
def lengths_and_capacity(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    capacity = draw(st.integers(1, 200))
    lengths = draw(st.lists(st.integers(1, capacity), max_size=100))
    return np.array(lengths, np.int64), capacity


def as_lists(packs: Packs) -> list[list[int]]:
    return [
        ids.tolist() for ids in np.split(packs.sample_ids, packs.pack_offsets[1:-1]) if len(ids)
    ]


def first_fit_oracle(ids: list[int], lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Scan all packs for every sample; packs without room for the shortest are completed."""
    shortest = min(lengths[ids], default=0)
    active: list[list[int]] = []
    completed: list[list[int]] = []
    for sample in ids:
        completed += [pack for pack in active if lengths[pack].sum() + shortest > capacity]
        active = [pack for pack in active if lengths[pack].sum() + shortest <= capacity]
        for pack in active:
            if lengths[pack].sum() + lengths[sample] <= capacity:
                pack.append(sample)
                break
        else:
            active.append([sample])
    return completed + active


@pytest.mark.parametrize("strategy", ALL)
@given(case=lengths_and_capacity(), seed=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_every_sample_once_and_no_pack_over_capacity(strategy, case, seed):
    lengths, capacity = case
    packs = strategy(lengths, capacity, seed=seed)
    assert sorted(packs.sample_ids.tolist()) == list(range(len(lengths)))
    for ids in as_lists(packs):
        assert lengths[ids].sum() <= capacity
    again = strategy(lengths, capacity, seed=seed)
    np.testing.assert_array_equal(packs.sample_ids, again.sample_ids)
    np.testing.assert_array_equal(packs.pack_offsets, again.pack_offsets)


@given(case=lengths_and_capacity())
@settings(max_examples=100, deadline=None)
def test_first_fit_decreasing_equals_the_scan_sample_by_sample(case):
    lengths, capacity = case
    order = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
    expected = first_fit_oracle(order, lengths, capacity)
    assert sorted(as_lists(first_fit_decreasing(lengths, capacity))) == sorted(expected)


@given(case=lengths_and_capacity(), seed=st.integers(0, 5), chunk_size=st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_first_fit_shuffle_equals_the_scan_of_each_chunk(case, seed, chunk_size):
    lengths, capacity = case
    order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    expected = []
    for start in range(0, len(order), chunk_size):
        expected += first_fit_oracle(order[start : start + chunk_size], lengths, capacity)
    packs = first_fit_shuffle(lengths, capacity, seed=seed, chunk_size=chunk_size)
    assert sorted(as_lists(packs)) == sorted(expected)


@given(case=lengths_and_capacity(), seed=st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_shuffle_and_pack_closes_a_pack_when_the_next_sample_does_not_fit(case, seed):
    lengths, capacity = case
    expected: list[list[int]] = []
    for sample in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        if not expected or lengths[expected[-1]].sum() + lengths[sample] > capacity:
            expected.append([])
        expected[-1].append(sample)
    assert as_lists(shuffle_and_pack(lengths, capacity, seed=seed)) == expected


def test_the_number_of_threads_does_not_change_the_plan():
    lengths = np.random.default_rng(0).integers(1, 4000, 50_000)
    one = first_fit_shuffle(lengths, 8192, seed=3, chunk_size=7000)
    four = first_fit_shuffle(lengths, 8192, seed=3, chunk_size=7000, num_threads=4)
    np.testing.assert_array_equal(one.sample_ids, four.sample_ids)
    np.testing.assert_array_equal(one.pack_offsets, four.pack_offsets)


def test_first_fit_decreasing_packs_the_toy_dataset_of_the_knapsack_post():
    """Lengths 1 to 24 at capacity 100: the three packs printed there."""
    lengths = np.arange(1, 25)
    packs = [lengths[ids].tolist() for ids in as_lists(first_fit_decreasing(lengths, 100))]
    assert packs == [
        [24, 23, 22, 21, 10],
        [20, 19, 18, 17, 16, 9, 1],
        [15, 14, 13, 12, 11, 8, 7, 6, 5, 4, 3, 2],
    ]


def test_another_seed_gives_another_shuffle():
    lengths = np.random.default_rng(0).integers(1, 500, 200)
    for strategy in (first_fit_shuffle, shuffle_and_pack):
        assert as_lists(strategy(lengths, 1000, seed=1)) != as_lists(
            strategy(lengths, 1000, seed=2)
        )


@pytest.mark.parametrize("strategy", ALL)
def test_unusable_lengths_are_refused_by_name(strategy):
    with pytest.raises(ValueError, match=r"sample 1 has 101 tokens.*seq_length 100"):
        strategy(np.array([5, 101, 7]), 100)
    with pytest.raises(ValueError, match="sample 0 has 0 tokens"):
        strategy(np.array([0, 1]), 100)
    with pytest.raises(ValueError, match="float64"):
        strategy(np.array([1.0, 2.0]), 100)


def test_chunks_of_nothing_are_refused():
    with pytest.raises(ValueError, match=r"chunk_size\n.*greater than or equal to 1"):
        first_fit_shuffle(np.array([1]), 100, chunk_size=0)


@pytest.mark.parametrize("strategy", ALL)
def test_no_samples_make_no_packs_and_long_sequences_are_not_truncated(strategy):
    assert strategy(np.zeros(0, np.int32), 8192).num_packs == 0
    lengths = np.array([200_000, 62_144, 70_000])
    packs = as_lists(strategy(lengths, 262_144))
    assert all(lengths[ids].sum() <= 262_144 for ids in packs)
    assert len(packs) == 2


@given(
    lengths=st.lists(st.integers(1, 50), max_size=80),
    max_samples=st.one_of(st.none(), st.integers(1, 6)),
)
@settings(max_examples=200, deadline=None)
def test_sequential_ends_a_pack_exactly_where_the_next_sample_does_not_fit(lengths, max_samples):
    expected: list[list[int]] = []
    for sample, length in enumerate(lengths):
        tokens = sum(lengths[other] for other in expected[-1]) if expected else 0
        full = expected and max_samples is not None and len(expected[-1]) == max_samples
        if not expected or full or tokens + length > 50:
            expected.append([])
        expected[-1].append(sample)
    packs = sequential(np.array(lengths, np.int64), 50, max_samples=max_samples)
    assert as_lists(packs) == expected


def test_sequential_on_the_toy_dataset_of_the_knapsack_post():
    """Lengths 1 to 24 at capacity 100: the four packs printed there, each sparser than the last."""
    lengths = np.arange(1, 25)
    packs = [lengths[ids].tolist() for ids in as_lists(sequential(lengths, 100))]
    assert packs == [list(range(1, 14)), list(range(14, 20)), list(range(20, 24)), [24]]


def test_the_dynamic_batch_of_veomni():
    """S1..S4 of 4, 2, 3, 1 tokens: a budget of 10 takes all, dyn_bsz off takes two and two."""
    lengths = np.array([4, 2, 3, 1])
    assert as_lists(sequential(lengths, 10)) == [[0, 1, 2, 3]]
    fixed = sequential(lengths, 10, max_samples=2)
    assert as_lists(fixed) == [[0, 1], [2, 3]]
    # position_ids [0 1 2 3 0 1] and [0 1 2 0]: sub-sample boundaries within each batch
    assert [np.cumsum(lengths[ids]).tolist() for ids in as_lists(fixed)] == [[4, 6], [3, 4]]


def test_sequential_refuses_bad_input_by_name():
    with pytest.raises(ValueError, match=r"sample 1 has 11 tokens.*seq_length 10"):
        sequential(np.array([4, 11]), 10)
    with pytest.raises(ValueError, match=r"max_samples\n.*greater than or equal to 1"):
        sequential(np.array([4]), 10, max_samples=0)


def test_sequential_makes_no_packs_of_no_samples():
    assert sequential(np.zeros(0, np.int32), 10).num_packs == 0

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
from tests.helpers.pack_lists import as_lists


@st.composite
def lengths_and_capacity(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    capacity = draw(st.integers(1, 200))
    lengths = draw(st.lists(st.integers(1, capacity), max_size=100))
    return np.array(lengths, np.int64), capacity


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


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"chunk_size\n.*greater than or equal to 1"):
        first_fit_shuffle(np.array([1]), 100, chunk_size=0)
    with pytest.raises(ValueError, match=r"max_samples\n.*greater than or equal to 1"):
        sequential(np.array([4]), 10, max_samples=0)


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

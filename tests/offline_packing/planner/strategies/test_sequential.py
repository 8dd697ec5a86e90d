"""Sequential greedy: the order of the samples is kept."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.planner.strategies.packs import Packs
from offline_packing.planner.strategies.peers.sequential import sequential


def as_lists(packs: Packs) -> list[list[int]]:
    return [
        ids.tolist() for ids in np.split(packs.sample_ids, packs.pack_offsets[1:-1]) if len(ids)
    ]


@given(
    lengths=st.lists(st.integers(1, 50), max_size=80),
    max_samples=st.one_of(st.none(), st.integers(1, 6)),
)
@settings(max_examples=200, deadline=None)
def test_a_pack_ends_exactly_where_the_next_sample_does_not_fit(lengths, max_samples):
    expected: list[list[int]] = []
    for sample, length in enumerate(lengths):
        tokens = sum(lengths[other] for other in expected[-1]) if expected else 0
        full = expected and max_samples is not None and len(expected[-1]) == max_samples
        if not expected or full or tokens + length > 50:
            expected.append([])
        expected[-1].append(sample)
    packs = sequential(np.array(lengths, np.int64), 50, max_samples=max_samples)
    assert as_lists(packs) == expected


def test_the_toy_dataset_of_the_knapsack_post():
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


def test_bad_input_is_refused_by_name():
    with pytest.raises(ValueError, match=r"sample 1 has 11 tokens.*seq_length 10"):
        sequential(np.array([4, 11]), 10)
    with pytest.raises(ValueError, match=r"max_samples\n.*greater than or equal to 1"):
        sequential(np.array([4]), 10, max_samples=0)


def test_no_samples_make_no_packs():
    assert sequential(np.zeros(0, np.int32), 10).num_packs == 0

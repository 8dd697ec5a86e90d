"""to_constant_volume: pack for pack what binpacking 1.5 returns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.planner.strategies.packs import Packs
from offline_packing.planner.strategies.peers.volume import to_constant_volume


def as_lists(packs: Packs) -> list[list[int]]:
    return [
        ids.tolist() for ids in np.split(packs.sample_ids, packs.pack_offsets[1:-1]) if len(ids)
    ]


def fullest_fit_oracle(lengths: list[int], capacity: int) -> list[list[int]]:
    """The package's loop: all packs are candidates, the first of the fullest is taken."""
    packs: list[list[int]] = []
    for sample in sorted(range(len(lengths)), key=lambda sample: -lengths[sample]):
        loads = [sum(lengths[other] for other in pack) for pack in packs]
        candidates = [i for i, load in enumerate(loads) if load + lengths[sample] <= capacity]
        if candidates:
            packs[max(candidates, key=loads.__getitem__)].append(sample)
        else:
            packs.append([sample])
    return packs


@st.composite
def lengths_and_capacity(draw: st.DrawFn) -> tuple[list[int], int]:
    capacity = draw(st.integers(1, 120))
    largest = draw(st.integers(1, capacity))
    return draw(st.lists(st.integers(1, largest), max_size=150)), capacity


@given(case=lengths_and_capacity())
@settings(max_examples=200, deadline=None)
def test_equals_the_scan_of_all_packs(case):
    lengths, capacity = case
    packs = to_constant_volume(np.array(lengths, np.int32), capacity)
    assert as_lists(packs) == fullest_fit_oracle(lengths, capacity)


EXAMPLE = [10, 10, 11, 1, 2, 7]  # the weights in the package's README, for volume 11


@pytest.mark.parametrize(
    ("low", "high", "number"), [(1, 8193, 1500), (600, 700, 1500), (1, 40, 900)]
)
def test_equals_the_package(low, high, number):
    binpacking = pytest.importorskip("binpacking")
    if not binpacking.__version__.startswith("1.5"):
        pytest.skip(f"binpacking {binpacking.__version__} packs differently from 1.5")
    lengths = np.random.default_rng(number + low).integers(low, high, number)
    for case, capacity in ((lengths, 8192), (np.array(EXAMPLE), 11)):
        rows = list(enumerate(case.tolist()))
        expected = binpacking.to_constant_volume(rows, capacity, weight_pos=1)
        packs = to_constant_volume(case, capacity)
        assert as_lists(packs) == [[sample for sample, _ in pack] for pack in expected]


def test_the_example_of_the_package():
    assert as_lists(to_constant_volume(np.array(EXAMPLE), 11)) == [[2], [0, 3], [1], [5, 4]]


def test_the_fill_is_that_of_best_fit_decreasing_at_scale():
    lengths = np.random.default_rng(1).integers(1, 2000, 100_000)
    packs = to_constant_volume(lengths, 8192)
    loads = np.add.reduceat(lengths[packs.sample_ids], packs.pack_offsets[:-1])
    assert sorted(packs.sample_ids.tolist()) == list(range(len(lengths)))
    assert loads.max() == 8192
    assert packs.num_packs == -(-lengths.sum() // 8192)


def test_unusable_lengths_are_refused_by_name():
    with pytest.raises(ValueError, match=r"sample 2 has 9000 tokens.*8192"):
        to_constant_volume(np.array([5, 6, 9000]), 8192)


def test_no_samples_make_no_packs():
    assert to_constant_volume(np.zeros(0, np.int32), 8192).num_packs == 0

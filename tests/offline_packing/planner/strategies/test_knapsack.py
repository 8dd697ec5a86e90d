"""nanoVLM's packs, literally, within both budgets; to_constant_volume as of binpacking 1.5."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.planner.strategies.peers.placing import knapsack, to_constant_volume
from tests.helpers.pack_lists import as_lists


def knapsack_oracle(lengths, images, capacity, max_images, num_packs) -> list[list[int]]:
    """Sort all packs by load for every sample, take the first with room for both."""
    loads = [0] * num_packs
    used = [0] * num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    for sample in sorted(range(len(lengths)), key=lambda sample: -lengths[sample]):
        for pack in sorted(range(len(packs)), key=loads.__getitem__):
            fits = loads[pack] + lengths[sample] <= capacity
            if fits and used[pack] + images[sample] <= max_images:
                break
        else:
            pack = len(packs)
            packs.append([])
            loads.append(0)
            used.append(0)
        packs[pack].append(sample)
        loads[pack] += lengths[sample]
        used[pack] += images[sample]
    return [pack for pack in packs if pack]


@st.composite
def samples(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    capacity = draw(st.integers(1, 120))
    max_images = draw(st.integers(1, 7))
    lengths = draw(st.lists(st.integers(1, capacity), max_size=60))
    images = [draw(st.integers(0, max_images)) for _ in lengths]
    return lengths, images, capacity, max_images


@given(case=samples(), extra=st.integers(0, 5), seed=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_equals_the_scan_of_all_packs_within_both_budgets(case, extra, seed):
    lengths, images, capacity, max_images = case
    packs = as_lists(
        knapsack(
            np.array([lengths, images], np.int64).T,
            np.array([capacity, max_images]),
            seed=seed,
            extra_packs=extra,
        )
    )
    for ids in packs:
        assert sum(lengths[sample] for sample in ids) <= capacity
        assert sum(images[sample] for sample in ids) <= max_images
    number = -(-sum(lengths) // capacity) + extra
    expected = knapsack_oracle(lengths, images, capacity, max_images, number)
    assert sorted(packs) == sorted(expected)


@given(case=samples(), number=st.integers(0, 9))
@settings(max_examples=80, deadline=None)
def test_tokens_alone_over_a_given_number_of_packs(case, number):
    lengths, _, capacity, _ = case
    packs = as_lists(knapsack(np.array(lengths, np.int32), capacity, num_packs=number))
    expected = knapsack_oracle(lengths, [0] * len(lengths), capacity, 0, number)
    assert sorted(packs) == sorted(expected)


def test_the_seed_orders_the_packs_and_nothing_else():
    lengths = np.random.default_rng(2).integers(1, 300, 500)
    first = as_lists(knapsack(lengths, 1000, seed=0))
    assert first == as_lists(knapsack(lengths, 1000, seed=0))
    other = as_lists(knapsack(lengths, 1000, seed=1))
    assert first != other
    assert sorted(first) == sorted(other)


def test_bad_input_is_refused_by_name():
    lengths, limits = np.array([4, 5]), np.array([10, 8])
    with pytest.raises(ValueError, match=r"sample 1 has 9 of limit 1, not in 0\.\.8.*set such"):
        knapsack(np.array([[4, 1], [5, 9]]), limits)
    with pytest.raises(ValueError, match=r"shape \(num_samples, 2\), got int64 of shape \(2, 1\)"):
        knapsack(lengths, limits)
    with pytest.raises(ValueError, match=r"num_packs\n.*greater than or equal to 0"):
        knapsack(lengths, 10, num_packs=-1)


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

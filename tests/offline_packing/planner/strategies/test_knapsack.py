"""Balanced greedy knapsack: nanoVLM's packs, literally, within both budgets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.planner.strategies.packs import Packs
from offline_packing.planner.strategies.peers.knapsack import knapsack


def as_lists(packs: Packs) -> list[list[int]]:
    return [
        ids.tolist() for ids in np.split(packs.sample_ids, packs.pack_offsets[1:-1]) if len(ids)
    ]


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
    max_images = draw(st.integers(0, 7))
    lengths = draw(st.lists(st.integers(1, capacity), max_size=60))
    images = [draw(st.integers(0, max_images)) for _ in lengths]
    return lengths, images, capacity, max_images


@given(case=samples(), extra=st.integers(0, 5), seed=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_equals_the_scan_of_all_packs_within_both_budgets(case, extra, seed):
    lengths, images, capacity, max_images = case
    packs = as_lists(
        knapsack(
            np.array(lengths, np.int32),
            capacity,
            seed=seed,
            num_images=np.array(images, np.int64),
            max_images=max_images,
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


def test_images_and_tokens_come_out_even():
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 900, 4000)
    images = rng.integers(0, 5, 4000)
    packs = knapsack(lengths, 8192, num_images=images, max_images=64, num_packs=260, extra_packs=5)
    assert packs.num_packs == 265
    tokens = np.add.reduceat(lengths[packs.sample_ids], packs.pack_offsets[:-1])
    pictures = np.add.reduceat(images[packs.sample_ids], packs.pack_offsets[:-1])
    assert pictures.max() <= 64
    assert tokens.std() / tokens.mean() < 0.01


def test_the_toy_dataset_of_the_knapsack_post_makes_three_even_packs():
    """Lengths 1 to 24, 300 tokens, at capacity 100."""
    lengths = np.arange(1, 25)
    packs = as_lists(knapsack(lengths, 100))
    assert sorted(lengths[ids].sum() for ids in packs) == [100, 100, 100]


def test_the_seed_orders_the_packs_and_nothing_else():
    lengths = np.random.default_rng(2).integers(1, 300, 500)
    first = as_lists(knapsack(lengths, 1000, seed=0))
    assert first == as_lists(knapsack(lengths, 1000, seed=0))
    other = as_lists(knapsack(lengths, 1000, seed=1))
    assert first != other
    assert sorted(first) == sorted(other)


def test_bad_input_is_refused_by_name():
    lengths = np.array([4, 5])
    with pytest.raises(ValueError, match=r"sample 1 has 9 images.*max_images 8"):
        knapsack(lengths, 10, num_images=np.array([1, 9]), max_images=8)
    with pytest.raises(ValueError, match="both or neither"):
        knapsack(lengths, 10, max_images=8)
    with pytest.raises(ValueError, match=r"num_images has shape \(3,\)"):
        knapsack(lengths, 10, num_images=np.array([1, 1, 1]), max_images=8)
    with pytest.raises(ValueError, match=r"num_packs\n.*greater than or equal to 0"):
        knapsack(lengths, 10, num_packs=-1)
    with pytest.raises(ValueError, match="sample 0 has 11 tokens"):
        knapsack(np.array([11]), 10)


def test_no_samples_make_no_packs():
    assert knapsack(np.zeros(0, np.int32), 10, extra_packs=3).num_packs == 0

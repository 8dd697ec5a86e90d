"""nanoVLM's packs, literally, within both budgets; to_constant_volume as of binpacking 1.5."""

import json
import os
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.planner.strategies.peers.placing import knapsack, to_constant_volume
from offline_packing.planner.strategies.strategy import Packs


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
            np.array(lengths, np.int32),
            capacity,
            seed=seed,
            budgets={"images": (np.array(images, np.int64), max_images)},
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


GOLDEN = json.loads((Path(__file__).parent / "nanovlm_knapsack.json").read_text())


def packs_of(buffer: dict[str, Any]) -> list[list[int]]:
    """Our packs of a buffer, by sample number, in no particular order."""
    images, limit = np.array(buffer["images"]), buffer["max_images"]
    packs = knapsack(
        np.array(buffer["lengths"]),
        buffer["seq_length"],
        budgets={"images": (images, limit)} if limit else None,
        extra_packs=buffer["delta"],
    )
    return sorted(sorted(pack) for pack in as_lists(packs))


def test_packs_are_those_that_nanovlm_makes_of_200_random_buffers():
    """The file was written by nanoVLM's own code at the commit that it names."""
    assert len(GOLDEN["buffers"]) == 200
    assert sum(buffer["max_images"] is not None for buffer in GOLDEN["buffers"]) > 100
    for buffer in GOLDEN["buffers"]:
        assert packs_of(buffer) == sorted(sorted(pack) for pack in buffer["packs"])


@pytest.mark.skipif("NANOVLM" not in os.environ, reason="NANOVLM=DIR names no checkout of nanoVLM")
def test_packs_are_those_of_a_checkout_of_nanovlm():
    module = runpy.run_path(f"{os.environ['NANOVLM']}/data/advanced_datasets.py")
    theirs = module["ConstantLengthDataset"]._balanced_greedy_knapsack
    for buffer in GOLDEN["buffers"]:
        samples = [
            {"input_ids": range(length), "images": range(images)}
            for length, images in zip(buffer["lengths"], buffer["images"], strict=True)
        ]
        limit = {"delta": buffer["delta"], "max_images_per_knapsack": buffer["max_images"]}
        packs = theirs(None, samples, buffer["seq_length"], **limit)
        assert packs_of(buffer) == sorted(sorted(pack) for pack in packs)


def test_images_and_tokens_come_out_even():
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 900, 4000)
    images = rng.integers(0, 5, 4000)
    packs = knapsack(lengths, 8192, budgets={"images": (images, 64)}, num_packs=260, extra_packs=5)
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
    with pytest.raises(ValueError, match=r"sample 1 has 9 images, not in 0\.\.8.*set such"):
        knapsack(lengths, 10, budgets={"images": (np.array([1, 9]), 8)})
    with pytest.raises(ValueError, match=r"images has shape \(3,\)"):
        knapsack(lengths, 10, budgets={"images": (np.array([1, 1, 1]), 8)})
    with pytest.raises(ValueError, match=r"num_packs\n.*greater than or equal to 0"):
        knapsack(lengths, 10, num_packs=-1)
    with pytest.raises(ValueError, match="sample 0 has 11 tokens"):
        knapsack(np.array([11]), 10)


def test_no_samples_make_no_packs():
    assert knapsack(np.zeros(0, np.int32), 10, extra_packs=3).num_packs == 0


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
def test_constant_volume_equals_the_scan_of_all_packs(case):
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


def test_constant_volume_makes_no_packs_of_no_samples():
    assert to_constant_volume(np.zeros(0, np.int32), 8192).num_packs == 0

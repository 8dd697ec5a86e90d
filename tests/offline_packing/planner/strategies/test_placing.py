"""Packers that place sample by sample: the packs of a scan of all packs, within every limit."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.planner.strategies.peers.placing import (
    FIRST,
    FULLEST,
    LIGHTEST,
    first_fit_decreasing,
    first_fit_shuffle,
    knapsack,
    place_samples,
    sequential,
    shuffle_and_pack,
    to_constant_volume,
)
from tests.helpers.sizes import as_lists, limited_sizes

Score = Callable[[int, int], int]
SCORES: dict[int, Score] = {
    FIRST: lambda load, pack: pack,
    LIGHTEST: lambda load, pack: load,
    FULLEST: lambda load, pack: -load,
}


def scan(sizes: np.ndarray, limits: np.ndarray, choice: int, num_open: int = 0) -> list[int]:
    """Pack of each sample: among all packs with room the one of lowest score(load, pack)."""
    used = [np.zeros(len(limits), int) for _ in range(num_open)]
    pack_of = []
    for size in sizes:
        fitting = [pack for pack in range(len(used)) if (used[pack] + size <= limits).all()]
        if not fitting:
            used.append(np.zeros(len(limits), int))
            fitting = [len(used) - 1]
        pack_of.append(
            min(fitting, key=lambda pack: (SCORES[choice](int(used[pack][0]), pack), pack))
        )
        used[pack_of[-1]] += size
    return pack_of


def scanned_packs(
    order: np.ndarray, sizes: np.ndarray, limits: np.ndarray, choice: int, num_open: int = 0
) -> list[list[int]]:
    """Packs of the samples in this order, without those that stay empty."""
    packs: dict[int, list[int]] = {}
    for sample, pack in zip(order, scan(sizes[order], limits, choice, num_open), strict=True):
        packs.setdefault(pack, []).append(int(sample))
    return sorted(packs.values())


def next_fit(order: np.ndarray, sizes: np.ndarray, limits: np.ndarray) -> list[list[int]]:
    """Packs that end where the next sample does not fit."""
    packs: list[list[int]] = []
    for sample in order.tolist():
        if not packs or (sizes[packs[-1]].sum(axis=0) + sizes[sample] > limits).any():
            packs.append([])
        packs[-1].append(sample)
    return packs


@pytest.mark.parametrize("choice", SCORES)
@given(case=limited_sizes(), num_open=st.integers(0, 6))
@settings(max_examples=150, deadline=None)
def test_the_tree_finds_the_pack_that_a_scan_finds(choice, case, num_open):
    sizes, limits = case
    expected = scan(sizes, limits, choice, num_open)
    assert place_samples(sizes, limits, choice, num_open).tolist() == expected


@given(case=limited_sizes(), extra=st.integers(0, 5), number=st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_longest_first_equals_the_scan(case, extra, number):
    sizes, limits = case
    order = np.argsort(-sizes[:, 0], kind="stable")
    for strategy, choice in ((first_fit_decreasing, FIRST), (to_constant_volume, FULLEST)):
        expected = scanned_packs(order, sizes, limits, choice)
        assert sorted(as_lists(strategy(sizes, limits))) == expected
    for given_number, options in (
        (-(-int(sizes[:, 0].sum()) // int(limits[0])) + extra, {"extra_packs": extra}),
        (number, {"num_packs": number}),
    ):
        expected = scanned_packs(order, sizes, limits, LIGHTEST, given_number)
        assert sorted(as_lists(knapsack(sizes, limits, **options))) == expected


@given(case=limited_sizes(), seed=st.integers(0, 5), chunk_size=st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_first_fit_shuffle_equals_the_scan_of_each_chunk(case, seed, chunk_size):
    sizes, limits = case
    order = np.random.default_rng(seed).permutation(len(sizes))
    expected = []
    for start in range(0, len(order), chunk_size):
        expected += scanned_packs(order[start : start + chunk_size], sizes, limits, FIRST)
    packs = first_fit_shuffle(sizes, limits, seed=seed, chunk_size=chunk_size)
    assert sorted(as_lists(packs)) == sorted(expected)


@given(
    case=limited_sizes(),
    seed=st.integers(0, 5),
    max_samples=st.one_of(st.none(), st.integers(1, 6)),
)
@settings(max_examples=200, deadline=None)
def test_a_pack_ends_where_the_next_sample_does_not_fit(case, seed, max_samples):
    sizes, limits = case
    order = np.random.default_rng(seed).permutation(len(sizes))
    packs = shuffle_and_pack(sizes, limits, seed=seed)
    assert as_lists(packs) == next_fit(order, sizes, limits)
    packs = sequential(sizes, limits, max_samples=max_samples)
    counted = np.column_stack([sizes, np.ones(len(sizes), int)])
    most = np.append(limits, max_samples or len(sizes))
    assert as_lists(packs) == next_fit(np.arange(len(sizes)), counted, most)


def test_the_number_of_threads_does_not_change_the_plan():
    lengths = np.random.default_rng(0).integers(1, 4000, 50_000)
    one = first_fit_shuffle(lengths, 8192, seed=3, chunk_size=7000)
    four = first_fit_shuffle(lengths, 8192, seed=3, chunk_size=7000, num_threads=4)
    np.testing.assert_array_equal(one.sample_ids, four.sample_ids)
    np.testing.assert_array_equal(one.pack_offsets, four.pack_offsets)


def test_the_seed_of_knapsack_orders_the_packs_and_nothing_else():
    lengths = np.random.default_rng(2).integers(1, 300, 500)
    first, again, other = (as_lists(knapsack(lengths, 1000, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert sorted(first) == sorted(other)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (first_fit_shuffle, {"chunk_size": 0}),
        (sequential, {"max_samples": 0}),
        (knapsack, {"num_packs": -1}),
    ],
)
def test_options_out_of_range_are_refused(strategy, options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"{name}\n.*greater than or equal to"):
        strategy(np.array([4]), 10, **options)


EXAMPLE = [10, 10, 11, 1, 2, 7]  # the weights in the package's README, for volume 11


@pytest.mark.parametrize(
    ("low", "high", "number"), [(1, 8193, 1500), (600, 700, 1500), (1, 40, 900)]
)
def test_equals_binpacking(low, high, number):
    binpacking = pytest.importorskip("binpacking")
    if not binpacking.__version__.startswith("1.5"):
        pytest.skip(f"binpacking {binpacking.__version__} packs differently from 1.5")
    lengths = np.random.default_rng(number + low).integers(low, high, number)
    for case, capacity in ((lengths, 8192), (np.array(EXAMPLE), 11)):
        rows = list(enumerate(case.tolist()))
        expected = binpacking.to_constant_volume(rows, capacity, weight_pos=1)
        packs = to_constant_volume(case, capacity)
        assert as_lists(packs) == [[sample for sample, _ in pack] for pack in expected]

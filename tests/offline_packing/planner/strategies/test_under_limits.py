"""Strategies under further limits: no pack over any, the packs of a scan of all packs, and a line
for those that cannot."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing import plan_packs
from offline_packing.planner.strategies import STRATEGIES
from offline_packing.planner.strategies.peers.placing import (
    FIRST,
    FULLEST,
    LIGHTEST,
    place_samples,
)

ABLE = [name for name, strategy in STRATEGIES.items() if not strategy.lengths_only]
PEERS = [name for name in ABLE if name != "auto"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Sizes (n, 1 to 3 limits), and the limits."""
    limits = np.array(draw(st.lists(st.integers(1, 60), min_size=1, max_size=3)))
    row = st.tuples(*(st.integers(0, limit) for limit in limits))
    sizes = np.array(draw(st.lists(row, max_size=60)), np.int64).reshape(-1, len(limits))
    sizes[:, 0] = np.maximum(sizes[:, 0], 1)
    return sizes, limits


def scan(sizes: np.ndarray, limits: np.ndarray, score: Callable[[int, int], int], num_open: int):
    """Pack of each sample: among all packs with room the one of lowest score(load, pack)."""
    used = [np.zeros(len(limits), int) for _ in range(num_open)]
    pack_of = []
    for size in sizes:
        fitting = [pack for pack in range(len(used)) if (used[pack] + size <= limits).all()]
        if not fitting:
            used.append(np.zeros(len(limits), int))
            fitting = [len(used) - 1]
        pack_of.append(min(fitting, key=lambda pack: (score(int(used[pack][0]), pack), pack)))
        used[pack_of[-1]] += size
    return pack_of


@pytest.mark.parametrize(
    ("choice", "score"),
    [
        (FIRST, lambda load, pack: pack),
        (LIGHTEST, lambda load, pack: load),
        (FULLEST, lambda load, pack: -load),
    ],
)
@given(case=cases(), num_open=st.integers(0, 6))
@settings(max_examples=150, deadline=None)
def test_the_tree_finds_the_pack_that_a_scan_finds(choice, score, case, num_open):
    sizes, limits = case
    expected = scan(sizes, limits, score, num_open)
    assert place_samples(sizes, limits, choice, num_open).tolist() == expected


@pytest.mark.parametrize("name", ABLE)
@given(case=cases(), seed=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_every_sample_once_and_no_pack_over_any_limit(name, case, seed):
    sizes, limits = case
    packs = STRATEGIES[name](sizes, limits, seed=seed)
    assert sorted(packs.sample_ids.tolist()) == list(range(len(sizes)))
    assert (np.diff(packs.pack_offsets) > 0).all()
    if len(sizes):
        assert (packs.sums(sizes) <= limits).all()


@pytest.mark.parametrize("name", PEERS)
def test_a_budget_that_never_binds_changes_no_pack(name):
    rng = np.random.default_rng(4)
    lengths, images = rng.integers(1, 900, 3000), rng.integers(0, 4, 3000)
    plain = STRATEGIES[name](lengths, 4096, seed=1)
    sizes = np.stack([lengths, images], axis=1)
    wide = STRATEGIES[name](sizes, np.array([4096, 100_000]), seed=1)
    np.testing.assert_array_equal(plain.sample_ids, wide.sample_ids)
    np.testing.assert_array_equal(plain.pack_offsets, wide.pack_offsets)


def test_those_that_decide_on_lengths_alone_say_so():
    assert set(STRATEGIES) - set(ABLE) == {"best_fit_decreasing", "hash_bucket"}
    lengths, images = np.array([3, 4]), np.array([1, 1])
    for name in set(STRATEGIES) - set(ABLE):
        with pytest.raises(
            ValueError, match=rf"'{name}' cannot keep a limit of images: .* of auto, "
        ):
            plan_packs(lengths, 10, strategy=name, budgets={"images": (images, 2)})

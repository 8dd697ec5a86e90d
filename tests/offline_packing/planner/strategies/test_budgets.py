"""Several limits at once: nothing over any, near the linear bound where it can be reached."""

import numpy as np
import pytest

from offline_packing.planner.strategies.budgets import (
    make_pool,
    pack_budgets,
    size_lower_bound,
    take_out,
)


def sft_sizes(num_samples: int) -> np.ndarray:
    """Tokens and vision patches (num_samples, 2): text, single images, conversations."""
    rng = np.random.default_rng(1234)
    kind = rng.random(num_samples)
    text = np.clip(np.exp(rng.normal(5.2, 0.9, num_samples)), 8, 4096)
    image = rng.integers(256, 1501, num_samples)
    several = rng.integers(1000, 8193, num_samples)
    tokens = np.where(kind < 0.3, text, np.where(kind < 0.7, image, several)).astype(np.int64)
    share = np.where(kind < 0.3, 0, rng.uniform(0.4, 0.85, num_samples))
    return np.stack([tokens, np.minimum(14_000, (tokens * share).astype(np.int64) * 4)], axis=1)


def test_tokens_and_patches_near_the_bound() -> None:
    sizes = sft_sizes(20_000)
    limits = np.array([8192, 22_000])
    packs = pack_budgets(sizes, limits, seed=1)
    assert sorted(packs.sample_ids.tolist()) == list(range(20_000))
    loads = np.add.reduceat(sizes[packs.sample_ids], packs.pack_offsets[:-1], axis=0)
    assert (loads <= limits).all()
    bound = max(size_lower_bound(sizes[:, i], int(limits[i])) for i in range(2))
    assert packs.num_packs <= 1.003 * bound


@pytest.mark.parametrize("number", [10, 31, 2000])
@pytest.mark.parametrize("most", [2, 3, 4, 8])
def test_packs_are_filled_where_tokens_are_not_scarce(number, most) -> None:
    sizes = np.stack([np.random.default_rng(0).integers(50, 150, number), np.ones(number, int)], 1)
    packs = pack_budgets(sizes, np.array([8192, most]), seed=0)
    assert packs.num_packs == -(-number // most)


@pytest.mark.parametrize("num_limits", [1, 2, 4])
def test_any_number_of_limits(num_limits) -> None:
    sizes = np.random.default_rng(3).integers(0, 40, (500, num_limits))
    limits = np.full(num_limits, 100)
    packs = pack_budgets(sizes, limits)
    loads = np.add.reduceat(sizes[packs.sample_ids], packs.pack_offsets[:-1], axis=0)
    assert (loads <= limits).all()
    assert sorted(packs.sample_ids.tolist()) == list(range(500))


@pytest.mark.parametrize(("sizes", "limit", "bound"), [([], 5, 0), ([0, 0], 5, 1), ([3, 3], 5, 2)])
def test_size_lower_bound(sizes, limit, bound) -> None:
    assert size_lower_bound(np.array(sizes, np.int64), limit) == bound
    assert size_lower_bound(np.array([2**25, 2**25]), 2**26) == 1


def test_pool_removal_keeps_both_lists() -> None:
    sizes = np.random.default_rng(0).random((50, 2))
    pool = make_pool(sizes)
    gone = {3, 17, 49, 0}
    for sample in gone:
        take_out(pool, sample)
    left = set(range(50)) - gone
    assert set(pool.alive[: pool.num_alive[0]]) == left
    in_cells = [
        pool.members[pool.cell_start[c] : pool.cell_start[c] + pool.cell_size[c]]
        for c in range(len(pool.cell_size))
    ]
    assert sorted(np.concatenate(in_cells).tolist()) == sorted(left)
    assert (pool.place[[3, 4]] < pool.num_alive[0]).tolist() == [False, True]

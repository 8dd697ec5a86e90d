"""Several limits at once: nothing over any, near the linear bound where it can be reached."""

import numpy as np
import pytest

from offline_packing.planner.strategies.budgets import (
    pack_budgets,
    size_lower_bound,
)
from tools.benchmarks.length_distributions import draw_sft


def test_tokens_and_patches_near_the_bound() -> None:
    sizes = np.stack(draw_sft(20_000), axis=1).astype(np.int64)
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


@pytest.mark.parametrize(("sizes", "limit", "bound"), [([], 5, 0), ([0, 0], 5, 1), ([3, 3], 5, 2)])
def test_size_lower_bound(sizes, limit, bound) -> None:
    assert size_lower_bound(np.array(sizes, np.int64), limit) == bound
    assert size_lower_bound(np.array([2**25, 2**25]), 2**26) == 1

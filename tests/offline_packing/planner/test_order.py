"""The order of packs: permutations, Energon's split, idle time of ranks."""

import numpy as np
import pytest

from offline_packing import plan_packs
from offline_packing.planner.ranks.deal import cost_grouped_order
from offline_packing.planner.ranks.layout import RankLayout


@pytest.mark.parametrize("layout", [RankLayout(1), RankLayout(8, 2), RankLayout(3, 0)])
@pytest.mark.parametrize("num_packs", [0, 1, 7, 48, 1003])
def test_cost_order_is_a_seeded_permutation(layout, num_packs) -> None:
    cost = np.random.default_rng(1).random(num_packs)
    order = cost_grouped_order(cost, layout, seed=5)
    assert sorted(order.tolist()) == list(range(num_packs))
    assert np.array_equal(order, cost_grouped_order(cost, layout, seed=5))


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(8, 2), (3, 5), (1, 1), (2, 4)])
def test_steps_follow_energons_own_split(num_ranks, num_workers) -> None:
    energon = pytest.importorskip("megatron.energon")
    from megatron.energon.flavors.webdataset.sharder import Sharder

    num_packs = 1009
    step = RankLayout(num_ranks, num_workers).steps(num_packs)
    for rank in range(num_ranks):
        config = energon.WorkerConfig(rank=rank, world_size=num_ranks, num_workers=num_workers)
        bounds = Sharder.split_samples_to_workers(0, num_packs, config)
        for worker in range(num_workers):
            mine = step[bounds[worker] : bounds[worker + 1]]
            assert mine.tolist() == [worker + i * num_workers for i in range(len(mine))]


@pytest.mark.parametrize("arguments", [{"num_ranks": 0}, {"num_ranks": 2, "num_workers": -1}])
def test_impossible_layout(arguments) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        RankLayout(**arguments)


def test_samples_inside_packs() -> None:
    """In random order, and as another packer put them."""
    lengths = np.random.default_rng(0).integers(10, 900, 2000)
    plan, again = plan_packs(lengths, 1000), plan_packs(lengths, 1000)
    assert np.array_equal(plan.sample_ids, again.sample_ids)
    assert np.mean([lengths[pack].argmax() > 0 for pack in plan]) > 0.3
    for strategy in ("first_fit_decreasing", "to_constant_volume"):
        longest_first = plan_packs(lengths, 1000, strategy=strategy)
        assert all((np.diff(lengths[pack]) <= 0).all() for pack in longest_first)

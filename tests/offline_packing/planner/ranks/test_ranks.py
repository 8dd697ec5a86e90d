"""Deal of packs to steps: alike in both phases, spread over steps, in the loader's order; and packs
whose numbers divide, for steps of one kind."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing import plan_packs
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.planner.ranks.deal import (
    BLOCK,
    MAX_LOSS,
    PackCosts,
    deal_steps,
    similar_steps,
    spread_steps,
)
from offline_packing.planner.ranks.layout import RankLayout, idle_shares, phase_times
from offline_packing.planner.ranks.uniform import kinds_of
from offline_packing.planner.strategies.strategy import Packs


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


def drawn(count: int, seed: int, texts: float) -> tuple[np.ndarray, np.ndarray]:
    """Cost and tower cost; a share of the packs has no pictures."""
    rng = np.random.default_rng(seed)
    tower = rng.lognormal(0, 1, count) * (rng.random(count) >= texts)
    return tower + rng.lognormal(1, 0.5, count), tower


@pytest.mark.parametrize("seed", range(10))
def test_near_the_best_of_all_deals(seed: int) -> None:
    """All pairings of eight packs, tried one by one."""
    cost, tower = drawn(8, seed, 0.3)

    def pairings(left: list[int]) -> list[list[list[int]]]:
        if not left:
            return [[]]
        first, *others = left
        return [
            [[first, other], *rest]
            for other in others
            for rest in pairings([one for one in others if one != other])
        ]

    every = np.array(pairings(list(range(8))))
    assert len(every) == 105
    times = [phase_times(cost[steps], tower[steps]).sum() for steps in every]
    allowed = idle_shares(*(x[np.argsort(cost).reshape(-1, 2)] for x in (cost, tower)))[0] + 0.01
    fair = [idle_shares(cost[steps], tower[steps])[0] <= allowed for steps in every]
    steps = similar_steps(cost, tower, 2)
    found = phase_times(cost[steps], tower[steps]).sum()
    assert found <= 1.05 * np.array(times)[fair].min()


@given(
    st.integers(0, 99), st.integers(1, 9), st.integers(1, 40), st.sampled_from([0.0, 0.5, 0.9, 1.0])
)
@settings(max_examples=60, deadline=None)
def test_never_worse_than_sorted(seed: int, num_ranks: int, steps: int, texts: float) -> None:
    """And the sum's idle share is never a point worse."""
    cost, tower = drawn(steps * num_ranks, seed, texts)
    table = similar_steps(cost, tower, num_ranks)
    assert np.array_equal(np.sort(table.ravel()), np.arange(len(cost)))
    by_sum = np.argsort(cost).reshape(-1, num_ranks)
    (one, two), (best_one, sorted_two) = (
        idle_shares(cost[some], tower[some]) for some in (table, by_sum)
    )
    assert two <= sorted_two + 1e-9
    assert one <= best_one + 0.01 + 1e-9


def packs(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cost, tower cost and share of texts: 2% of the packs are texts, which cost least; others have
    a few of them."""
    rng = np.random.default_rng(7)
    texts = np.where(rng.random(count) < 0.02, 1.0, rng.beta(0.3, 6, count))
    tower = np.maximum(0, rng.normal(0.22, 0.05, count)) * (1 - texts)
    return tower + rng.normal(0.78, 0.02, count) - 0.04 * texts, tower, texts


def spread_of(table: np.ndarray, values: np.ndarray) -> float:
    """Standard deviation of the sums over optimizer steps, over that of packs at random."""
    num_ranks = table.shape[1]
    whole = table[: len(table) // BLOCK * BLOCK]
    block = BLOCK * num_ranks
    sums = values[whole].reshape(-1, block).sum(axis=1)
    at_random = values.std() * np.sqrt(block * (1 - block / len(values)))
    return float(sums.std() / at_random)


@pytest.mark.parametrize(("num_ranks", "count"), [(8, 4000), (32, 20_000), (128, 60_032)])
def test_packs_of_their_own_kind_are_spread(num_ranks: int, count: int) -> None:
    cost, tower, texts = packs(count)
    features = np.stack([texts, np.ones(count)], axis=1)
    rng = np.random.default_rng(1)
    table = deal_steps(PackCosts.of(cost, tower, None, features), num_ranks, rng)
    assert np.array_equal(np.sort(table, axis=None), np.arange(count))
    before = similar_steps(cost, tower, num_ranks)
    assert texts[before].sum(axis=1).max() > 0.9 * num_ranks
    assert spread_of(table, texts) < 1.1
    one, two = idle_shares(cost[table], tower[table])
    assert one < idle_shares(np.sort(cost).reshape(-1, num_ranks), np.zeros(before.shape))[0] + 0.01
    assert two < idle_shares(cost[before], tower[before])[1] + 0.005


def test_they_stay_together_where_the_sum_would_wait_too_long() -> None:
    """Texts that cost half as much as all others."""
    cost, tower, texts = packs(4000)
    cost = np.where(texts == 1, 0.4 * cost, cost)
    table = spread_steps(PackCosts.of(cost, tower, None, texts[:, None]), 32, texts[:, None])
    by_sum = np.sort(cost).reshape(-1, 32)
    limit = idle_shares(by_sum, np.zeros(by_sum.shape))[0] + MAX_LOSS
    assert idle_shares(cost[table], tower[table])[0] <= limit
    assert np.array_equal(np.sort(table, axis=None), np.arange(4000))


def kinds_in(plan: PackPlan, media: np.ndarray) -> np.ndarray:
    return kinds_of(media, Packs(plan.sample_ids, plan.pack_offsets))


@given(
    samples=st.lists(st.tuples(st.integers(1, 100), st.integers(0, 3)), min_size=1, max_size=80),
    num_ranks=st.integers(1, 6),
    num_workers=st.integers(0, 3),
    copies=st.booleans(),
    max_samples=st.sampled_from([None, 3]),
    homogeneous=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_every_step_is_of_one_kind(
    samples: list[tuple[int, int]],
    num_ranks: int,
    num_workers: int,
    copies: bool,
    max_samples: int | None,
    homogeneous: bool,
) -> None:
    """Steps are of one kind with any number of workers and every divisor of the ranks. Each sample
    is there, and twice only in repeated packs, which are counted."""
    lengths, media = (np.array(column) for column in zip(*samples, strict=True))
    layout = RankLayout(num_ranks, num_workers, uniform=True)
    options: dict[str, Any] = {"copy_of": np.arange(len(lengths)) // 2} if copies else {}
    if homogeneous:
        options["groups"] = media
    options |= {"max_samples": max_samples, "homogeneous": homogeneous}
    costs = {"cost": lengths**2.0, "tower_cost": lengths * (media > 0), "media": media}
    plan = plan_packs(lengths, 100, order=layout, features=[lengths // 2], **costs, **options)
    kinds = kinds_in(plan, media)
    assert plan.num_packs % (num_ranks * max(1, num_workers)) == 0
    for ranks in range(1, num_ranks + 1):
        if num_ranks % ranks == 0:
            assert RankLayout(ranks, num_workers).mixed_steps(kinds) == 0
            assert RankLayout(ranks, 1).mixed_steps(kinds) == 0
    times = np.bincount(plan.sample_ids, minlength=len(lengths))
    assert times.min() >= 1
    assert times.sum() - len(lengths) == plan.info.num_copies
    done = plan.info.settings["uniform"]
    assert (plan.info.num_copies > 0) == (done["repeated"] > 0)
    packs = [sorted(pack.tolist()) for pack in plan]
    assert all(lengths[pack].sum() <= 100 for pack in packs)
    assert max_samples is None or max(map(len, packs)) <= max_samples
    assert not copies or all(len({i // 2 for i in pack}) == len(pack) for pack in packs)
    assert not homogeneous or all(len(set(media[pack].tolist())) == 1 for pack in packs)
    repeated = len(packs) - len({tuple(pack) for pack in packs})
    assert repeated == done["repeated"]
    by_cost = RankLayout(num_ranks, num_workers)
    fewest = plan_packs(lengths, 100, order=by_cost, cost=costs["cost"], **options)
    assert np.array_equal(np.sort(fewest.sample_ids), np.arange(len(lengths)))
    assert plan.num_packs == fewest.num_packs + done["halved"] + done["repeated"]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("num_ranks", [8, 32])
def test_little_room_is_lost(share: float, num_ranks: int) -> None:
    """No pack is repeated, and fewer are added than it takes to read all in whole rounds."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(100, 3000, 12_000)
    media = (rng.random(12_000) < share).astype(np.int64)
    tower = media * lengths * 10.0
    layout, cost = RankLayout(num_ranks, 2, uniform=True), tower + lengths**2
    plan = plan_packs(lengths, 8192, order=layout, cost=cost, tower_cost=tower, media=media)
    assert layout.mixed_steps(kinds_in(plan, media)) == 0
    assert plan.info.settings["uniform"]["repeated"] == plan.info.num_copies == 0
    fewest = plan_packs(lengths, 8192).num_packs
    assert plan.num_packs - fewest < 2 * layout.round
    by_cost = RankLayout(num_ranks, 2)
    mixed = plan_packs(lengths, 8192, order=by_cost, cost=cost, tower_cost=tower)
    assert by_cost.mixed_steps(kinds_in(mixed, media)) > 0

    def idle(of: PackPlan) -> tuple[float, float]:
        costs = [np.add.reduceat(c[of.sample_ids], of.pack_offsets[:-1]) for c in (cost, tower)]
        return layout.idle_shares(*costs)

    assert idle(plan)[1] <= idle(mixed)[1] + 0.01


@pytest.mark.parametrize(
    ("kinds", "ranks", "workers", "repeated"), [([7, 3], 4, 1, 2), ([8, 16], 4, 2, 0)]
)
def test_samples_as_long_as_a_pack_are_repeated(
    kinds: list[int], ranks: int, workers: int, repeated: int
) -> None:
    """None can be halved; and what divides already stays as it is."""
    media = np.repeat([1, 0], kinds)
    lengths, order = np.full(len(media), 100), RankLayout(ranks, workers, uniform=True)
    plan = plan_packs(lengths, 100, order=order, media=media)
    assert plan.info.settings["uniform"] == {"halved": 0, "repeated": repeated}
    assert plan.info.num_copies == repeated
    assert RankLayout(ranks).mixed_steps(kinds_in(plan, media)) == 0

"""Packs whose numbers divide, for steps of one kind."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing import plan_packs
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.planner.ranks.layout import RankLayout
from offline_packing.planner.ranks.uniform import kinds_of
from offline_packing.planner.strategies.strategy import Packs


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
@settings(max_examples=150, deadline=None)
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
    options = {"copy_of": np.arange(len(lengths)) // 2} if copies else {}
    if homogeneous:
        options["groups"] = media
    plan = plan_packs(
        lengths,
        100,
        order=layout,
        cost=lengths**2.0,
        tower_cost=lengths * (media > 0),
        media=media,
        features=[lengths // 2],
        max_samples=max_samples,
        homogeneous=homogeneous,
        **options,
    )
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
    in_order = RankLayout(num_ranks, num_workers)
    fewest = plan_packs(
        lengths, 100, order=in_order, max_samples=max_samples, homogeneous=homogeneous, **options
    )
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
    ("kinds", "ranks", "workers", "repeated"),
    [([7, 3], 4, 1, 2), ([8, 16], 4, 2, 0)],
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

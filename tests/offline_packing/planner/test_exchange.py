"""Exchange of samples between packs: no two copies in a pack, at the same fill."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing import plan_packs
from offline_packing.planner.strategies import STRATEGIES

SEQ_LENGTH = 1024


def used(uses: np.ndarray) -> np.ndarray:
    """Numbers of the samples, in rounds: [0 1 2, 0 2] for uses [2, 1, 2]."""
    return np.concatenate([np.flatnonzero(uses > i) for i in range(uses.max())])


def draw(num_samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and origins of samples that are used 2.5 times on average."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(4.2, 1.0, num_samples), 4, SEQ_LENGTH).astype(np.int64)
    copy_of = used(rng.integers(2, 4, num_samples))
    return lengths[copy_of], copy_of


def doubled(plan, copy_of: np.ndarray) -> int:
    """Packs that hold a sample twice."""
    return sum(len(np.unique(copy_of[pack])) < len(pack) for pack in plan)


def assert_sound(plan, lengths: np.ndarray, copy_of: np.ndarray) -> None:
    assert sorted(plan.sample_ids.tolist()) == list(range(len(lengths)))
    loads = np.add.reduceat(lengths[plan.sample_ids], plan.pack_offsets[:-1])
    assert loads.max() <= plan.info.seq_length
    assert doubled(plan, copy_of) == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_keeps_copies_apart(strategy: str) -> None:
    lengths, copy_of = draw(150, seed=1)
    plan = plan_packs(lengths, SEQ_LENGTH, strategy=strategy, seed=1, copy_of=copy_of)
    assert_sound(plan, lengths, copy_of)
    free = plan_packs(lengths, SEQ_LENGTH, strategy=strategy, seed=1)
    assert doubled(free, copy_of) > 0 or strategy in ("sequential", "knapsack")
    assert plan.num_packs <= free.num_packs + 2
    once = np.arange(len(lengths))
    same = plan_packs(lengths, SEQ_LENGTH, strategy=strategy, seed=1, copy_of=once)
    assert np.array_equal(free.sample_ids, same.sample_ids)


@pytest.mark.parametrize(("offset", "count"), [(0, 3_000), (596, 6_000)])
def test_copies_cost_no_fill(offset: int, count: int) -> None:
    """Short texts, of which a pack holds many of one length, by themselves and after pictures."""
    rng = np.random.default_rng(0)
    copy_of = used(rng.integers(2, 4, count))
    lengths = (offset + np.clip(rng.lognormal(3.2, 0.6, count), 4, 400).astype(np.int64))[copy_of]
    plan = plan_packs(lengths, 8192, copy_of=copy_of)
    assert doubled(plan, copy_of) == 0
    free = plan_packs(lengths, 8192)
    assert doubled(free, copy_of) > 0
    assert plan.num_packs <= free.num_packs + 1


@settings(deadline=None, max_examples=30)
@given(
    uses=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
    longest=st.integers(1, 40),
)
def test_any_uses_can_be_kept_apart(uses: list[int], seed: int, longest: int) -> None:
    copy_of = used(np.array(uses))
    lengths = np.random.default_rng(seed).integers(1, longest + 1, len(uses))[copy_of]
    plan = plan_packs(lengths, 40, seed=seed, copy_of=copy_of)
    assert_sound(plan, lengths, copy_of)
    assert plan.num_packs >= plan.info.lower_bound >= max(uses)
    assert plan.num_packs == max(uses) or lengths.sum() > 40

"""Packs of further epochs: the same samples, as full, and hardly any two of them together again."""

import itertools
from typing import Any

import numpy as np
import pytest

from offline_packing import plan_packs
from offline_packing.planner.pack_plan import PackPlan

SEQ_LENGTH = 8192


def draw(count: int, seed: int = 0) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(6.2, 0.7, count)
    return np.clip(lengths, 20, SEQ_LENGTH).astype(np.int32)


def pairs(plan: PackPlan) -> set[tuple[int, int]]:
    """All samples that share a pack."""
    return {pair for pack in plan for pair in itertools.combinations(sorted(pack.tolist()), 2)}


def test_pairs_do_not_meet_again() -> None:
    lengths = draw(6000)
    one_plan = plan_packs(lengths, SEQ_LENGTH, seed=0)
    plans = [plan_packs(lengths, SEQ_LENGTH, seed=e, exchange=True) for e in range(3)]
    for plan in plans:
        assert np.array_equal(np.sort(plan.sample_ids), np.arange(len(lengths)))
        assert max(int(lengths[pack].sum()) for pack in plan) <= SEQ_LENGTH
        assert abs(plan.fill - one_plan.fill) < 0.001
    for one, other in itertools.pairwise(plans):
        assert len(pairs(one) & pairs(other)) <= 0.01 * len(pairs(one))
    # which another seed alone does not do
    same = plan_packs(lengths, SEQ_LENGTH, seed=1)
    assert len(pairs(one_plan) & pairs(same)) > 0.1 * len(pairs(same))


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_samples": 16},
        {"pad_multiple": 64},
        {"homogeneous": True},
        {"copy_of": np.arange(2000) // 2},
        {"assignment": "locality", "source_order": np.arange(2000), "window_packs": 20},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_limits_are_kept(arguments: dict[str, Any]) -> None:
    lengths, kinds = draw(2000), np.arange(2000) % 2
    patches = np.random.default_rng(1).integers(0, 2000, 2000)
    if "homogeneous" in arguments:
        arguments = {**arguments, "groups": kinds}
    if "assignment" not in arguments:
        arguments = {**arguments, "budgets": {"patches": (patches, 20_000)}}
    plans = [
        plan_packs(lengths, SEQ_LENGTH, seed=0, exchange=exchange, **arguments)
        for exchange in (False, True)
    ]
    assert plans[0].num_packs == plans[1].num_packs
    assert len(pairs(plans[0]) & pairs(plans[1])) < 0.5 * len(pairs(plans[0]))
    multiple = arguments.get("pad_multiple", 1)
    for pack in plans[1]:
        assert (-(-lengths[pack] // multiple) * multiple).sum() <= SEQ_LENGTH
        assert patches[pack].sum() <= 20_000 or "budgets" not in arguments
        assert len(pack) <= arguments.get("max_samples", 2000)
        assert "homogeneous" not in arguments or len(set(kinds[pack].tolist())) == 1
        assert "copy_of" not in arguments or len(set((pack // 2).tolist())) == len(pack)
    if "assignment" in arguments:
        spread = [np.ptp(pack) for pack in plans[1]]
        assert np.mean(spread) < 1000  # of 2000, as windows hold a fifth of the packs
    assert np.array_equal(np.sort(plans[1].sample_ids), np.arange(2000))


def test_the_same_seed_gives_the_same_packs() -> None:
    lengths = draw(500)
    plans = [plan_packs(lengths, SEQ_LENGTH, seed=3, exchange=True) for _ in range(2)]
    assert np.array_equal(plans[0].sample_ids, plans[1].sample_ids)
    assert np.array_equal(plans[0].pack_offsets, plans[1].pack_offsets)

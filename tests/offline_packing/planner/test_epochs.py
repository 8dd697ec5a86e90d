"""Packs of further epochs: the same samples, as full, and hardly any two of them together again."""

import itertools
from typing import Any

import numpy as np
import pytest

from offline_packing import plan_packs
from offline_packing.plan.make_plan import join_plans, plan_epochs
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
    plans = plan_epochs(3, lengths, seq_length=SEQ_LENGTH, seed=0)
    for plan in plans:
        assert np.array_equal(np.sort(plan.sample_ids), np.arange(len(lengths)))
        assert max(int(lengths[pack].sum()) for pack in plan) <= SEQ_LENGTH
        assert plan.num_packs <= one_plan.num_packs
    shares = [len(pairs(a) & pairs(b)) / len(pairs(b)) for a, b in itertools.pairwise(plans)]
    assert max(shares) < 0.02
    assert join_plans({"": plans}).pairs_again() == pytest.approx(np.mean(shares), rel=0.01)
    # which another seed alone does not do
    same = plan_packs(lengths, SEQ_LENGTH, seed=1)
    assert len(pairs(one_plan) & pairs(same)) > 0.1 * len(pairs(same))


def test_pairs_of_copies_are_counted() -> None:
    """Packs of two samples, each used twice: a pair that met twice counts twice."""
    lengths, copy_of = np.full(8, 40), np.arange(8) // 2
    plans = plan_epochs(2, lengths, seq_length=80, seed=0, copy_of=copy_of)
    plan = join_plans({"": [plan.of(copy_of) for plan in plans]})
    before, now = (
        [{*pack.tolist()} for pack in packs] for packs in (list(plan)[:4], list(plan)[4:])
    )
    assert plan.pairs_again() == sum(before.count(pack) for pack in now) / 4 > 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_samples": 16},
        {"pad_multiple": 64},
        {"homogeneous": True},
        {"copy_of": np.arange(2000) // 2},
        {"assignment": ["shuffle", "balance"]},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_limits_are_kept(arguments: dict[str, Any]) -> None:
    lengths, kinds = draw(2000), np.arange(2000) % 2
    patches = np.random.default_rng(1).integers(0, 2000, 2000)
    if "homogeneous" in arguments:
        arguments = {**arguments, "groups": kinds}
    if "assignment" in arguments:
        arguments = {**arguments, "balance_by": patches}
    else:
        arguments = {**arguments, "budgets": {"patches": (patches, 20_000)}}
    plans = plan_epochs(2, lengths, seq_length=SEQ_LENGTH, seed=0, **arguments)
    assert abs(plans[0].num_packs - plans[1].num_packs) <= 1
    assert join_plans({"": plans}).pairs_again() < 0.03
    multiple = arguments.get("pad_multiple", 1)
    for pack in plans[1]:
        assert (-(-lengths[pack] // multiple) * multiple).sum() <= SEQ_LENGTH
        assert patches[pack].sum() <= 20_000 or "budgets" not in arguments
        assert len(pack) <= arguments.get("max_samples", 2000)
        assert "homogeneous" not in arguments or len(set(kinds[pack].tolist())) == 1
        assert "copy_of" not in arguments or len(set((pack // 2).tolist())) == len(pack)
    assert np.array_equal(np.sort(plans[1].sample_ids), np.arange(2000))

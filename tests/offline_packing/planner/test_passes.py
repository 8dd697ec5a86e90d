"""Passes: which run and in which order, what they need, and which cannot keep an earlier one."""

from typing import Any

import numpy as np
import pytest

from offline_packing import ContextParallel, plan_packs
from offline_packing.config.sections import PackConfig
from offline_packing.planner.passes import PlanOptions, PlanRequest
from offline_packing.planner.ranks.layout import RankLayout

SLOTS = {"context_parallel": ContextParallel(8, 64)}
LOCALITY = {"assignment": "locality", "source_order": np.arange(9)}
IMAGES = {"budgets": {"images": (np.ones(9, int), 4)}}
PICTURES = {"picture_ranks": 2, "units": np.ones(9, int), "tower_cost": np.ones(9)}


def test_passes_stand_in_the_order_in_which_they_run() -> None:
    layout = RankLayout(2, uniform=True)
    request = PlanRequest(PlanOptions(assignment=("balance",)), order=layout, picture_ranks=2)
    assert [one.name for one in request.passes()] == (
        "compose balance uniform equal_cost sample_order picture_split".split()
    )
    shuffled = PlanRequest(PlanOptions(max_samples=4), mixed=True).passes()
    assert [one.name for one in shuffled] == "limits epochs compose shuffle sample_order".split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "bdf"}, r"strategy is 'bdf'; not a known name; choose one of.*, best_fit_de"),
        ({"assignment": "locallity"}, "'locallity'.*; it must be 'shuffle', 'locality'"),
        ({"max_samples": 0}, "max_samples is 0; it must be at least 1"),
        ({"pad_multiple": 0}, "pad_multiple is 0; it must be at least 1"),
        ({"pad_multiple": 640}, "pad_multiple 640 > seq_length 512; no sample would fit a pack"),
        (PICTURES | {"picture_ranks": 0}, "picture_ranks is 0; it must be at least 1"),
        ({"assignment": "locality"}, "assignment locality needs source_order, an array with one "),
        ({"assignment": "balance"}, "assignment balance needs balance_by"),
        ({"homogeneous": True}, "homogeneous needs groups"),
        ({"order": RankLayout(2, uniform=True)}, "order.uniform needs media"),
        (PICTURES | {"units": None}, "picture_ranks needs units"),
        (PICTURES | {"tower_cost": None}, "picture_ranks needs tower_cost"),
        ({"groups": np.zeros(2)}, r"groups has shape \(2,\) for 9 samples"),
        ({"max_samples": 2, "strategy": "best_fit_decreasing"}, "cannot keep a limit of samples"),
        (IMAGES | {"strategy": "hash_bucket"}, "keep a limit of images: .*; choose one of auto, "),
        (IMAGES | LOCALITY, "assignment locality cannot keep a limit of images: it exchanges"),
        (IMAGES | {"assignment": "balance"}, "assignment balance cannot keep a limit of images"),
        (LOCALITY | {"order": RankLayout(2)}, "order cannot keep assignment locality"),
        (LOCALITY | {"strategy": "knapsack"}, "locality cannot keep strategy 'knapsack'"),
        (LOCALITY | {"mixed": True}, "assignment locality cannot keep several epochs"),
        ({"mixed": True, "strategy": "sequential"}, "'sequential' cannot keep several epochs"),
        (SLOTS | {"strategy": "sequential"}, "context_parallel cannot keep strategy 'sequential'"),
        (SLOTS | LOCALITY, "context_parallel cannot keep assignment locality"),
        (SLOTS | {"assignment": "balance"}, "assignment balance cannot keep context_parallel"),
        (SLOTS | {"max_samples": 4}, "context_parallel cannot keep a limit of samples"),
        (SLOTS | IMAGES, "context_parallel cannot keep a limit of images"),
        (SLOTS | {"order": RankLayout(8)}, "order cannot keep context_parallel"),
        (SLOTS | {"mixed": True}, "context_parallel cannot keep several epochs"),
    ],
)
def test_what_is_missing_or_cannot_be_kept_is_named(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_packs(np.full(9, 8), 512, **arguments)


def test_an_option_that_does_not_exist_is_named() -> None:
    with pytest.raises(TypeError, match="max_sample is unknown; valid: seq_length, strategy, seed"):
        plan_packs(np.array([3, 4, 5]), 10, max_sample=2)


def test_options_are_said_once() -> None:
    """Every option of a plan is a field of the configuration and an argument, and in the guide."""
    for name, field in PlanOptions.model_fields.items():
        assert PackConfig.model_fields[name].default == field.default
        assert name in (plan_packs.__doc__ or "")
    config = PackConfig(strategy="best_fit_decreasing", pad_multiple=4, homogeneous=True)
    options = config.model_dump(include=set(PlanOptions.model_fields))
    plan = plan_packs(np.array([3, 4, 5]), groups=np.zeros(3, int), **options)
    assert (plan.info.strategy, plan.info.pad_multiple) == ("best_fit_decreasing", 4)
    assert plan.info.settings["homogeneous"]

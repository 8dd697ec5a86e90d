"""plan_packs: every sample once, nothing over a limit, the same plan for the same seed."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing import plan_packs
from offline_packing.config.sections import PackConfig
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.planner.passes import PlanOptions
from offline_packing.planner.ranks.layout import RankLayout
from offline_packing.planner.strategies import STRATEGIES


def assert_valid(plan: PackPlan, num_tokens: np.ndarray) -> None:
    """Samples in = packed + set aside; no pack empty or over seq_length."""
    ids = np.concatenate([plan.sample_ids, plan.set_aside_ids])
    assert np.array_equal(np.sort(ids), np.arange(len(num_tokens)))
    assert len(plan.set_aside_ids) == len(plan.set_aside_reasons)
    assert (np.diff(plan.pack_offsets) > 0).all()
    multiple = plan.info.pad_multiple
    padded = -(-np.asarray(num_tokens, np.int64) // multiple) * multiple
    if plan.num_packs:
        loads = np.add.reduceat(padded[plan.sample_ids], plan.pack_offsets[:-1])
        assert loads.max() <= plan.info.seq_length
        assert plan.info.num_tokens == loads.sum()
    assert plan.num_packs >= plan.info.lower_bound


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 150), max_size=80),
    seed=st.integers(0, 2**32),
    pad_multiple=st.sampled_from([1, 2, 8, 16]),
)
def test_each_sample_once_nothing_over_capacity(strategy, lengths, seed, pad_multiple) -> None:
    num_tokens = np.array(lengths, np.int64)
    arguments = {"strategy": strategy, "seed": seed, "pad_multiple": pad_multiple}
    plan = plan_packs(num_tokens, 128, **arguments)
    assert_valid(plan, num_tokens)
    again = plan_packs(num_tokens, 128, **arguments)
    assert np.array_equal(plan.sample_ids, again.sample_ids)
    assert np.array_equal(plan.pack_offsets, again.pack_offsets)


def test_shuffle_changes_the_choice_but_not_the_composition() -> None:
    num_tokens = np.random.default_rng(0).integers(1, 900, 5000)
    plans = [plan_packs(num_tokens, 1024, seed=seed) for seed in (1, 2)]
    plans.append(plan_packs(num_tokens, 1024, assignment=()))
    for plan in plans:
        assert_valid(plan, num_tokens)
    assert not np.array_equal(plans[0].sample_ids, plans[1].sample_ids)
    contents = [
        sorted(tuple(sorted(num_tokens[plan.pack(i)])) for i in range(plan.num_packs))
        for plan in plans
    ]
    assert contents[0] == contents[1] == contents[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "bdf"}, r"strategy is 'bdf'; not a known name; choose one of.*, best_fit_de"),
        ({"assignment": "locallity"}, "'locallity'.*; it must be 'shuffle', 'locality'"),
        ({"max_samples": 0}, "max_samples is 0; it must be at least 1"),
        ({"pad_multiple": 0}, "pad_multiple is 0; it must be at least 1"),
        ({"pad_multiple": 64}, "pad_multiple 64 > seq_length 10; no sample would fit a pack"),
        ({"assignment": "locality"}, "assignment locality needs source_order"),
        ({"assignment": "balance"}, "assignment balance needs balance_by"),
        ({"homogeneous": True}, "homogeneous needs groups"),
        ({"groups": np.zeros(2)}, r"groups has shape \(2,\) for 3 samples"),
        ({"max_samples": 2, "strategy": "best_fit_decreasing"}, "cannot keep a limit of samples"),
        (
            {"assignment": "locality", "source_order": np.arange(3), "order": RankLayout(2)},
            "order cannot keep assignment locality",
        ),
    ],
)
def test_contradicting_arguments_are_named(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan_packs(np.array([3, 4, 5]), **({"seq_length": 10} | arguments))


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


def test_a_peer_packs_under_a_budget_what_is_not_set_aside() -> None:
    num_tokens = np.array([40, 500, 40, 40, 0, 40])
    num_images = np.array([3, 9, 1, 1, 9, 3])
    plan = plan_packs(num_tokens, 100, strategy="knapsack", budgets={"images": (num_images, 4)})
    assert plan.set_aside_ids.tolist() == [1, 4]
    assert [num_images[plan.pack(i)].sum() for i in range(plan.num_packs)] == [4, 4]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packs_are_in_random_order_whatever_the_strategy(strategy: str) -> None:
    lengths = np.random.default_rng(0).integers(50, 2000, 3000)
    plan = plan_packs(lengths, 4096, strategy=strategy)
    longest = [lengths[pack].max() for pack in plan]
    assert len(longest) > 700
    assert 0.3 < np.mean(np.diff(longest) < 0) < 0.7


def test_number_of_threads_does_not_change_the_plan() -> None:
    code = """
import hashlib
import numpy as np
from offline_packing.planner.strategies.pattern_lp import pattern_lp
lengths = 596 + np.random.default_rng(0).geometric(0.015, 5000)
found = pattern_lp(np.bincount(lengths, minlength=8193))
print(hashlib.sha256(b"".join(array.tobytes() for array in found[:4])).hexdigest())
"""
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads},
            capture_output=True,
            text=True,
        ).stdout
        for threads in ("1", "2")
    }
    assert len(hashes) == 1
    assert len(hashes.pop()) == 65

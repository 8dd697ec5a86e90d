"""plan_packs: every sample once, nothing over a limit, the same plan for the same seed."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing import plan_packs
from offline_packing.pack_plan import PackPlan
from offline_packing.strategies import STRATEGIES


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
    plans.append(plan_packs(num_tokens, 1024, shuffle=False))
    for plan in plans:
        assert_valid(plan, num_tokens)
    assert not np.array_equal(plans[0].sample_ids, plans[1].sample_ids)
    contents = [
        sorted(tuple(sorted(num_tokens[plan.pack(i)])) for i in range(plan.num_packs))
        for plan in plans
    ]
    assert contents[0] == contents[1] == contents[2]


def test_shuffled_packs_do_not_come_sorted_by_length() -> None:
    num_tokens = np.random.default_rng(0).integers(1, 900, 20_000)
    longest = {}
    for shuffle in (False, True):
        plan = plan_packs(num_tokens, 1024, shuffle=shuffle)
        maxima = np.maximum.reduceat(num_tokens[plan.sample_ids], plan.pack_offsets[:-1])
        longest[shuffle] = abs(np.corrcoef(maxima, np.arange(len(maxima)))[0, 1])
    assert longest[False] > 0.5
    assert longest[True] < 0.05


def test_overlong_and_empty_samples_are_set_aside_with_a_reason() -> None:
    plan = plan_packs(np.array([4, 0, 99, 6]), 10)
    assert plan.set_aside_ids.tolist() == [1, 2]
    assert plan.set_aside_counts() == {"empty": 1, "over_seq_length": 1}
    assert plan.num_packs == 1


@pytest.mark.parametrize("num_tokens", [[], [11, 12, 13]])
def test_nothing_to_pack_gives_an_empty_plan(num_tokens) -> None:
    plan = plan_packs(np.array(num_tokens), 10)
    assert plan.num_packs == 0
    assert plan.info.lower_bound == 0
    assert len(plan.set_aside_ids) == len(num_tokens)


def test_one_sample() -> None:
    plan = plan_packs(np.array([7]), 10)
    assert (plan.num_packs, plan.fill, plan.gap) == (1, 0.7, 0.0)


def test_long_sequences() -> None:
    num_tokens = np.random.default_rng(1).integers(1, 262_145, 3000)
    plan = plan_packs(num_tokens, 262_144)
    assert_valid(plan, num_tokens)
    assert plan.gap < 0.01


def test_unknown_strategy_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"'bdf' is unknown; choose one of .*best_fit_decreasing"):
        plan_packs(np.array([1]), 10, strategy="bdf")


def test_importing_and_planning_needs_no_training_library() -> None:
    code = """
import sys
for name in ("torch", "megatron", "megatron.energon", "ray", "transformers"):
    sys.modules[name] = None
import offline_packing
assert "numba" not in sys.modules and "scipy" not in sys.modules
import numpy as np
assert offline_packing.plan_packs(np.array([3, 4, 5]), 8).num_packs == 2
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

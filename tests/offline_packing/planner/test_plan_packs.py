"""plan_packs: every sample once, nothing over a limit, the same plan for the same seed."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing import plan_packs
from offline_packing.planner.pack_plan import PackPlan
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
digest = hashlib.sha256(b"".join(array.tobytes() for array in found[:4])).hexdigest()
print(digest)
"""
    here: dict[str, str] = {}
    exec(code, here)
    threads = "2" if os.environ.get("OMP_NUM_THREADS") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads},
        capture_output=True,
        text=True,
    )
    assert other.stdout == here["digest"] + "\n"


def test_samples_inside_packs() -> None:
    """In random order, and as another packer put them."""
    lengths = np.random.default_rng(0).integers(10, 900, 2000)
    plan, again = plan_packs(lengths, 1000), plan_packs(lengths, 1000)
    assert np.array_equal(plan.sample_ids, again.sample_ids)
    assert np.mean([lengths[pack].argmax() > 0 for pack in plan]) > 0.3
    for strategy in ("first_fit_decreasing", "to_constant_volume"):
        longest_first = plan_packs(lengths, 1000, strategy=strategy)
        assert all((np.diff(lengths[pack]) <= 0).all() for pack in longest_first)

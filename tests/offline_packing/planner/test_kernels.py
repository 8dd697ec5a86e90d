"""Kernels in Python make the packs that compiled ones make; small plans compile none, and no number
of threads changes a plan."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from offline_packing import PackPlan, plan_packs
from offline_packing.planner.ranks.layout import RankLayout
from offline_packing.planner.strategies import STRATEGIES, kernels

LENGTHS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "text": lambda rng, n: rng.lognormal(6, 1, n).clip(1, 8192),
    "half": lambda rng, n: rng.integers(3800, 4400, n),
    "captions": lambda rng, n: 729 + rng.gamma(2, 20, n),
    "narrow": lambda rng, n: rng.normal(1300, 150, n),
    "tiles": lambda rng, n: 256 * rng.integers(1, 13, n) + rng.integers(20, 300, n),
    "multiples": lambda rng, n: 512 * rng.integers(1, 17, n),
}


def options_of(rng: np.random.Generator, lengths: np.ndarray) -> dict[str, dict[str, Any]]:
    """Return arguments of plans by name: every strategy, and every pass."""
    count = len(lengths)
    images = rng.integers(0, 5, count), 18
    costs = {
        "cost": 1e3 * lengths + lengths**2.0,
        "tower_cost": 1e3 * lengths * rng.random(count),
        "media": rng.integers(0, 3, count),
        "features": [rng.random(count) * lengths],
    }
    window = {"assignment": "locality", "window_packs": 20}
    return {
        **{name: {"strategy": name} for name in STRATEGIES},
        "locality": {**window, "source_order": np.arange(count)},
        "groups": {"homogeneous": True, "groups": rng.integers(0, 2, count)},
        "copies": {"copy_of": rng.integers(0, count // 2 + 1, count)},
        "one budget": {"budgets": {"images": images}},
        "three budgets": {
            "budgets": {name: (rng.integers(0, 5, count), 14) for name in "abc"},
            "max_samples": 9,
        },
        "knapsack budgets": {"strategy": "knapsack", "budgets": {"images": images}},
        "order": {"order": RankLayout(4), **costs},
        "uniform": {"order": RankLayout(2, 2, uniform=True), **costs},
    }


OPTIONS = [*options_of(np.random.default_rng(0), np.ones(2))]
SMALL = [(*case, 80) for case in zip(itertools.cycle(("text", "tiles")), OPTIONS)]
ALL = [(*case, count) for case in itertools.product(LENGTHS, OPTIONS) for count in (1, 300)]
ALL += [(*case, 1000) for case in zip(itertools.cycle(LENGTHS), OPTIONS)]


@pytest.mark.parametrize(
    ("draw", "options", "num_samples"),
    [*SMALL, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ALL)],
)
@pytest.mark.filterwarnings("error")
def test_the_same_packs_in_python(
    draw: str, options: str, num_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(samples: float) -> PackPlan:
        @contextmanager
        def chosen(*_: int) -> Iterator[None]:
            token = kernels._samples.set(samples)
            with np.errstate(over="ignore"):
                yield
            kernels._samples.reset(token)

        monkeypatch.setattr("offline_packing.planner.plan_packs.kernels_for", chosen)
        rng = np.random.default_rng([1, num_samples])
        lengths = LENGTHS[draw](rng, num_samples).astype(np.int32)
        return plan_packs(lengths, 8192, seed=1, **options_of(rng, lengths)[options])

    interpreted, compiled = planned(0), planned(np.inf)
    for field in fields(PackPlan):
        mine, other = (getattr(plan, field.name) for plan in (interpreted, compiled))
        if isinstance(mine, np.ndarray):
            assert mine.dtype == other.dtype, field.name
        np.testing.assert_equal(mine, other)


#: Many lengths of few samples each, so that a linear program chooses the packs.
PLAN = """
import numpy as np
from offline_packing import plan_packs
rng = np.random.default_rng(0)
plan = plan_packs(rng.choice(rng.integers(2000, 4100, 100), 600), 8192)
"""
SMALL_PLANS = f"""
import gc, logging
import numpy as np
from numba.core.registry import CPUDispatcher
from offline_packing import plan_packs
from offline_packing.planner.ranks.layout import RankLayout
logging.basicConfig(level=logging.INFO)
lengths = np.random.default_rng(0).lognormal(6, 1, 120).clip(1, 8192).astype(np.int32)
plan_packs(lengths, 8192, order=RankLayout(4))
plan_packs(lengths, 8192, strategy="hash_bucket")
plan_packs(lengths, 8192, strategy="knapsack", budgets={{"images": (lengths % 5, 20)}})
plan_packs(lengths, 8192, budgets={{"images": (lengths % 5, 20)}})
functions = [one for one in gc.get_objects() if isinstance(one, CPUDispatcher)]
own = [one for one in functions if one.py_func.__module__.startswith("offline_packing")]
assert len(own) > 20 and not any(one.signatures for one in own)
{PLAN}
print(plan.sample_ids.tolist())
"""


def test_small_plans_compile_nothing_and_threads_change_no_plan() -> None:
    threads = "2" if os.environ.get("OMP_NUM_THREADS") == "1" else "1"
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads}
    command = [sys.executable, "-W", "error", "-c", SMALL_PLANS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "compiling" not in result.stderr
    here: dict[str, Any] = {}
    exec(PLAN, here)
    assert result.stdout == f"{here['plan'].sample_ids.tolist()}\n"


def test_samples_of_all_small_plans_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """After ten of the largest small plans, compiling pays; large plans do not count."""
    monkeypatch.setattr(kernels, "_planned", 0)
    most, found = kernels.MOST_INTERPRETED, []
    plans = [(most, 8192), (most + 1, 8192), (0, 1 << 30), *[(most, 8192)] * 10]
    for num_samples, seq_length in plans:
        with kernels.kernels_for(num_samples, seq_length):
            found.append(kernels._samples.get())
    assert found == [most, np.inf, np.inf, *[most] * 9, np.inf]
    assert kernels._samples.get() == np.inf  # online packing calls kernels outside of plans

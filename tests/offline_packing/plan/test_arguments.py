"""The planner's options from the configuration, through the real stages."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offline_packing.config.packing import parse_config
from offline_packing.demo.generate import generate_demo_dataset
from offline_packing.engines.local import LocalEngine
from offline_packing.index.rows import sample_flops
from offline_packing.measure.measure import measure
from offline_packing.plan.make_plan import make_plan
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run
from task_encoders.families.qwen2_vl import QWEN2_VL


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("options")
    generate_demo_dataset(folder / "data", num_samples=300, progress=False)
    return folder


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return LocalEngine(0)


def run(data: Path, engine: LocalEngine, **pack: Any) -> Run:
    config = {
        "source": [
            {"format": "pairs", "path": str(data / "data" / "bmr"), "task": "bmr"},
            {"format": "jsonl", "path": str(data / "data" / "bmr_jsonl"), "task": "bmr"},
        ],
        "model": {"max_pixels": 28 * 28 * 64},
        "pack": {"seq_length": 2048, **pack},
        "output": {"path": str(data / "out"), "packs_per_shard": 5},
    }
    made = Run(parse_config(config), engine)
    measure(made)
    return made


def planned(data: Path, engine: LocalEngine, **pack: Any) -> tuple[Any, Any]:
    made = run(data, engine, **pack)
    samples = open_index(made)
    plan = make_plan(made, samples)
    packed = np.sort(np.concatenate([plan.packs.sample_ids, plan.packs.set_aside_ids]))
    np.testing.assert_array_equal(packed, np.arange(samples.info.num_samples))
    return samples, plan


def pack_sums(plan: Any, values: np.ndarray) -> np.ndarray:
    return np.add.reduceat(values[plan.packs.sample_ids], plan.packs.pack_offsets[:-1])


@pytest.mark.parametrize("strategy", ["auto", "knapsack"])
def test_budgets_hold_and_what_is_over_them_alone_is_set_aside(
    data: Path, engine: LocalEngine, strategy: str
) -> None:
    budgets = {"vision_patches": 250, "images": 3}
    samples, plan = planned(data, engine, budgets=budgets, strategy=strategy)
    assert pack_sums(plan, samples.array("num_vision_patches")).max() <= 250
    assert pack_sums(plan, samples.array("num_images")).max() <= 3
    assert plan.set_aside.reasons["over_budget"] > 0
    assert any("vision_patches 250" in detail for _, detail in plan.set_aside.texts)


def test_homogeneous_packs_hold_one_kind_of_media(data: Path, engine: LocalEngine) -> None:
    samples, plan = planned(data, engine, homogeneous=True)
    with_image = pack_sums(plan, (samples.array("num_images") > 0).astype(int))
    sizes = np.diff(plan.packs.pack_offsets)
    assert set(np.unique(with_image / sizes)) == {0.0, 1.0}


def test_a_limit_on_samples(data: Path, engine: LocalEngine) -> None:
    _, plan = planned(data, engine, max_samples=4)
    assert np.diff(plan.packs.pack_offsets).max() == 4


@pytest.mark.parametrize("assignment", [["locality"], ["shuffle", "balance"], []])
def test_assignments_keep_every_sample(
    assignment: list[str], data: Path, engine: LocalEngine
) -> None:
    samples, plan = planned(data, engine, assignment=assignment)
    assert pack_sums(plan, samples.array("num_tokens")).max() <= 2048


def test_an_order_for_ranks_evens_out_their_steps(data: Path, engine: LocalEngine) -> None:
    from offline_packing.planner.order import RankLayout, idle_share

    layout = RankLayout(2, 1)
    idle = {}
    for name, order in (("shuffled", None), ("grouped", {"num_ranks": 2, "num_workers": 1})):
        samples, plan = planned(data, engine, order=order)
        cost = sample_flops(samples, QWEN2_VL.cost).total
        idle[name] = idle_share(pack_sums(plan, cost), layout)
    assert idle["grouped"] < idle["shuffled"]

"""Tokens and costs of written packs, by their index and plan; and schedules: equal numbers of micro
batches of equal cost on all ranks, every item in every epoch."""

import collections
import itertools
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing import plan_packs
from offline_packing.errors import StageError
from offline_packing.online.ranks.pack_costs import pack_costs, schedule_of
from offline_packing.online.ranks.rank_schedule import EpochSchedule, RankSchedule
from offline_packing.planner.ranks.layout import idle_shares
from offline_packing.runs.run import Run
from task_encoders.families import FAMILIES
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.loading.schedule import RankSampler
from task_encoders.packs.pack import parse_json
from tests.helpers.prepared_folders import blend_of
from tests.world import World, task_encoder
from tools.benchmarks.length_distributions import draw_sft

BUDGET = 8192
COST = FAMILIES["qwen2_vl"].cost


TOKENS, PATCHES = (sizes.astype(np.int64) for sizes in draw_sft(60_000))
PICTURES = np.maximum(1, -(-PATCHES // 4000))
TOWER = PICTURES * np.asarray(COST.tower_flops(PATCHES / PICTURES), np.float64)
FLOPS = COST.language_flops(TOKENS) + TOWER


def items_of(epoch: EpochSchedule) -> list[list[list[int]]]:
    """[step][rank] -> items."""
    steps, ranks = epoch.table.shape
    return [[epoch.items(s, r).tolist() for r in range(ranks)] for s in range(steps)]


def test_eight_ranks_cost_the_same_at_each_step() -> None:
    for cost in (FLOPS, None):
        schedule = RankSchedule(TOKENS, cost, 8, BUDGET)
        epoch = schedule.epoch(0)
        packs, table = epoch.micro_batches, epoch.table
        own = np.add.reduceat(schedule.cost[packs.sample_ids], packs.pack_offsets[:-1])[table]
        ratio = own.max(axis=1) / own.mean(axis=1)
        assert ratio.mean() <= 1.005
        assert (ratio <= 1.05).mean() >= 0.99
        assert own.sum() == pytest.approx((TOKENS**2.0 if cost is None else cost).sum())
        assert cost is None or ratio.max() <= 1.05
        assert len(ratio) > 900


def test_both_phases_cost_the_same() -> None:
    plan = plan_packs(TOKENS, BUDGET)
    cost, tower = (
        np.add.reduceat(of[plan.sample_ids], plan.pack_offsets[:-1]) for of in (FLOPS, TOWER)
    )
    ones = np.ones(len(cost), np.int64)
    epoch = RankSchedule(ones, cost, 32, tower_cost=tower).epoch(0)
    by_sum = RankSchedule(ones, cost, 32).epoch(0)
    one, two = idle_shares(cost[epoch.table], tower[epoch.table])
    assert two <= 0.007
    assert one <= idle_shares(cost[by_sum.table], tower[by_sum.table])[0] + 0.01


@given(
    items=st.lists(
        st.tuples(st.integers(1, 20), st.floats(0, 9), st.floats(0, 9), st.integers(0, 2)),
        min_size=1,
        max_size=60,
    ),
    given_costs=st.sampled_from(["none", "equal", "of both phases"]),
    num_ranks=st.integers(1, 9),
    budget=st.sampled_from([None, 20, 50]),
)
@settings(max_examples=60, deadline=None)
def test_every_item_comes_once_in_the_fewest_steps_of_one_kind(
    items: list[tuple[int, float, float, int]], given_costs: str, num_ranks: int, budget: int | None
) -> None:
    """The promises hold for each kind: every item once, repeated only what fills the last step, if
    samples are too few for a micro batch on each rank; the same epoch again; and with other ranks,
    the items left."""
    lengths, tower, language, kinds = (np.array(column) for column in zip(*items, strict=True))
    arrays: dict[str, Any] = {"kinds": kinds}
    if given_costs == "equal":
        arrays["cost"] = np.full(len(items), lengths[0] % 2, np.float64)
    elif given_costs == "of both phases":
        arrays |= {"cost": tower + language, "tower_cost": tower, "features": lengths[:, None]}
    made = [
        RankSchedule(lengths, num_ranks=ranks, budget=budget, seed=3, **arrays)
        for ranks in (num_ranks, num_ranks, num_ranks % 4 + 1)
    ]
    epoch = made[0].epoch(1)
    steps = items_of(epoch)
    assert steps == items_of(made[1].epoch(1))
    assert all(len({kinds[item] for own in step for item in own}) == 1 for step in steps)
    assert budget is None or all(lengths[own].sum() <= budget for step in steps for own in step)
    for kind in np.unique(kinds):
        of_kind = [step for step in steps if kinds[step[0][0]] == kind]
        count = (kinds == kind).sum()
        times = np.bincount([item for step in of_kind for own in step for item in own])
        times = times[kinds[: len(times)] == kind]
        assert len(times) == count
        assert times.sum() - count == max(0, len(of_kind) * num_ranks - count)
        assert times.max() - times.min() <= 1
        fewest = plan_packs(lengths[kinds == kind], budget).num_packs if budget else count
        assert len(of_kind) == -(-fewest // num_ranks)
        if budget is None:
            assert all(len({own[0] for own in s}) == min(num_ranks, count) for s in of_kind)
    if len(steps) > 1:
        rest = items_of(made[2].epoch(1, [(num_ranks, len(steps) // 2)]))
        trained = {item for step in steps[: len(steps) // 2] for own in step for item in own}
        left = [item for step in rest for own in step for item in own]
        assert set(left) == set(range(len(items))) - trained
        assert all(len({kinds[item] for own in step for item in own}) == 1 for step in rest)


@pytest.mark.parametrize("budget", [None, BUDGET])
def test_epochs_and_seeds_differ(budget: int | None) -> None:
    drawn = [
        items_of(RankSchedule(TOKENS[:400], None, 4, budget, seed).epoch(epoch))
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


@pytest.mark.parametrize("budget", [None, BUDGET])
def test_another_number_of_ranks_trains_the_rest_of_the_epoch(budget: int | None) -> None:
    lengths = TOKENS[:500]
    trained: list[int] = []
    state: Any = None
    for num_ranks, steps in ((8, 5), (3, 9), (3, 2), (16, None)):
        schedule = RankSchedule(lengths, None, num_ranks, budget)
        samplers = [RankSampler(schedule, rank) for rank in range(num_ranks)]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
            trained += itertools.chain(*itertools.islice(sampler, steps))
        states = [sampler.state_dict() for sampler in samplers]
        state = states[0]
        assert all(one == state for one in states)
    times = np.bincount(trained, minlength=500)
    assert times.min() == 1
    repeated = times.sum() - 500
    assert repeated == 0 if budget else repeated < 16


def test_what_is_longer_than_the_budget_is_set_aside(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        schedule = RankSchedule(np.array([5, 9, 3, 12, 0]), None, 1, budget=8)
    assert schedule.set_aside_ids.tolist() == [1, 3, 4]
    assert "3 of 5 items are set aside: without tokens, or longer than the budget 8" in caplog.text
    assert [sorted(items) for items in RankSampler(schedule, 0)] == [[0, 2]]


SPLIT = {"split": {"train": 0.6, "val": 0.4}}


@pytest.fixture
def captions(world: World) -> Run:
    return world.run("captioning", output=SPLIT)


@pytest.fixture
def dialogues(world: World) -> Path:
    return world.packed("bmr", output=SPLIT)


def tokens_of(folder: PackedFolder) -> list[int]:
    """As the packs themselves say."""
    return [sum(parse_json(p.record, p.key)["meta"]["num_tokens"]) for p in folder]


@pytest.mark.parametrize("split", ["train", "val"])
def test_tokens_and_costs_of_packs(split: str, captions: Run) -> None:
    folder = PackedFolder(captions.workspace.root, split=split)
    tokens, cost = pack_costs(folder)
    assert tokens.tolist() == tokens_of(folder)
    assert len(cost) == len(folder) > 1
    model = FAMILIES["qwen2_vl"].cost
    rows = PackedFolder(folder.path, task_encoder(captions), split=split)
    for number, own in enumerate(cost):
        row = rows.row(number).row
        expected = model.language_flops(row.cu_lengths.diff()).sum()
        expected += model.tower_flops(row.image_grid_thw.prod(1)).sum()
        assert own == pytest.approx(expected)


def test_costs_of_a_blend(captions: Run, dialogues: Path, tmp_path: Path) -> None:
    root = captions.workspace.root
    parts = [f"path: {dialogues}, repetitions: 2", f"path: {root}, subset: {{range: [1, 3]}}"]
    folder = PackedFolder(blend_of(tmp_path / "blend.yaml", parts))
    tokens, cost = pack_costs(folder)
    assert tokens.tolist() == tokens_of(folder)
    is_caption = [pack.subflavors["offline_packing"] == "captioning" for pack in folder]
    own_cost = pack_costs(PackedFolder(root))[1]
    assert cost[is_caption].tolist() == own_cost[1:3].tolist()


def test_the_schedule_is_that_of_a_blend(dialogues: Path, tmp_path: Path) -> None:
    """Of the same datasets, with as many packs, another blend trains others at each step."""
    roots = dialogues, shutil.copytree(dialogues, tmp_path / "copy")
    options: dict[str, Any] = {"num_ranks": 1, "packs_per_row": 1, "seed": 0, "repeat": True}
    found = collections.Counter()
    for first in ("[0, 2]", "[1, 3]"):
        for times in ((1, 2), (2, 1)):
            parts = [
                f"path: {root}, subset: {{range: {first}}}, repetitions: {n}"
                for root, n in zip(roots, times, strict=True)
            ]
            folder = PackedFolder(blend_of(tmp_path / "blend.yaml", parts))
            found[schedule_of(folder, order="written", **options).digest] += len(folder)
    assert [*found.values()] == [6] * 4


def test_packs_without_their_plan_are_named(captions: Run, dialogues: Path, tmp_path: Path) -> None:
    for name in ("plan.json", "measure.json"):
        copy = tmp_path / name
        shutil.copytree(dialogues, copy)
        (copy / "_packing" / name).unlink()
        with pytest.raises(StageError, match=f"{name} has no index and plan"):
            pack_costs(PackedFolder(copy))
    shutil.rmtree(copy / "_packing")
    shutil.copytree(captions.workspace.root / "_packing", copy / "_packing")
    with pytest.raises(StageError, match="the shards are not those of its plan and index"):
        pack_costs(PackedFolder(copy))

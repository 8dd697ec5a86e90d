"""Packs dealt by cost: through the trainer's own calls, saved and restored at any step."""

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.config import DataConfig
from launch.data.micro_batches import build_loader, build_task_encoder
from launch.data.packed_data import read_packed_data
from launch.loop.parallel import initialize_parallel
from launch.loop.setup import build_trainer
from offline_packing.online.ranks.pack_costs import pack_columns, pack_costs
from offline_packing.planner.ranks.layout import idle_shares
from task_encoders.families.base.cost import ModelCost
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.packed_runs import (
    WHOLE_VOCABULARY,
    make_config,
    make_trainer,
    step_lines,
)
from tests.helpers.rank_processes import run_ranks

pytestmark = pytest.mark.usefixtures("bmr_environment")


def test_ranks_have_rows_of_as_many_packs_and_similar_cost(folder: Path) -> None:
    config = DataConfig(
        path=str(folder), order="balanced", micro_batch_size=2, num_workers=0, repeat=False
    )
    encoder = build_task_encoder(config, read_packed_data(folder))
    by_key = dict(
        zip((p.key for p in PackedFolder(folder)), pack_costs(PackedFolder(folder))[1], strict=True)
    )
    rows = [list(build_loader(config, encoder, rank=rank, num_ranks=3)) for rank in range(3)]
    assert len(rows[0]) == len(rows[1]) == len(rows[2]) == -(-len(by_key) // 6)
    given = collections.Counter(key for own in rows for row in own for key in row.__key__)
    assert given == dict.fromkeys(by_key, 1)
    cost = [[sum(by_key[key] for key in row.__key__) for row in own] for own in rows]
    full = [step for step in zip(*cost, strict=True) if min(step) > 0.8 * max(step)]
    assert len(full) >= len(rows[0]) - 1  # one step may share what did not divide


@pytest.mark.parametrize("order", ["balanced", "written"])
def test_the_seed_of_a_run_decides_its_order(order: str, folder: Path, tmp_path: Path) -> None:
    """But for packs in the order written."""
    orders = []
    for seed in (0, 0, 7):
        sections: dict[str, Any] = {
            "model": WHOLE_VOCABULARY,
            "data": {"order": order, "repeat": False},
            "train": {"seed": seed},
        }
        config = make_config(folder, tmp_path, **sections)
        trainer, _ = build_trainer(config, initialize_parallel())
        orders.append([row.__key__ for row in iter(trainer.stages[0].train.next, None)])
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == sorted(orders[2])
    assert (orders[0] == orders[2]) == (order == "written")


def train_an_epoch(folder: Path, output: Path) -> tuple[list[str], ModelCost]:
    """Run as one rank of a group; returns the packs that it trained on, and the model's cost."""
    num_packs = len(PackedFolder(folder))
    config = make_config(
        folder,
        output,
        data={"order": "balanced", "num_workers": 0, "repeat": False},
        batch={"global_batch_packs": 4},
        train={"iterations": -(-num_packs // 4)},
    )
    trainer, seen, _ = make_trainer(config)
    assert trainer.run()
    return seen.keys, trainer._model.cost


def test_two_processes_share_an_epoch(folder: Path, tmp_path: Path) -> None:
    """Each makes the schedule for itself: no pack is given to both, none is left out. The log names
    the idle shares that a plan with the model's cost has at these steps."""
    results = run_ranks(2, tmp_path / "group", train_an_epoch, folder, tmp_path / "run")
    keys = [seen for seen, _ in results]
    packs = sorted(pack.key for pack in PackedFolder(folder))
    assert len(keys[0]) == len(keys[1]) == -(-len(packs) // 2)
    times = collections.Counter([*keys[0], *keys[1]])
    assert sorted(times) == packs
    assert times.total() - len(packs) == len(packs) % 2

    numbers = {pack.key: pack.number for pack in PackedFolder(folder)}
    rows = np.array([[numbers[key] for key in own] for own in keys]).T
    _, tower, language = pack_columns(PackedFolder(folder), results[0][1])
    none, cost = np.zeros(len(tower)), tower + language
    steps = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    for name, of, phase, number in (
        ("idle_share", cost, tower, 0),
        ("two_phase_idle_share", cost, tower, 1),
        ("tower_idle_share", tower, none, 0),
        ("language_idle_share", language, none, 0),
    ):
        logged = [line[name] for line in step_lines(tmp_path / "run")]
        assert logged == pytest.approx([idle_shares(of[s], phase[s])[number] for s in steps])
        assert max(logged) > 0

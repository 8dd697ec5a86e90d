"""A run goes on with another number of ranks, in real processes: nothing is lost or doubled."""

import collections
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from launch.loop.parallel import initialize_parallel
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.packed_runs import (
    bmr_folder,
    losses,
    make_config,
    make_trainer,
    step_lines,
)
from tests.helpers.rank_processes import run_ranks

PACKS_PER_STEP = 4
#: Ranks, and the last step that they train: through an epoch, and on in the second.
LEGS = [(2, 2), (1, 3), (2, 5), (4, 7)]
ORDERS = ("written", "balanced")


@dataclass
class Leg:
    """One rank's work, by order of the packs."""

    keys: dict[str, list[str]]
    #: weights and moments before the first step, and after the last
    before: dict[str, dict[str, torch.Tensor]]
    after: dict[str, dict[str, torch.Tensor]]


def train(folder: Path, output: Path, last_step: int, tensor: int) -> Leg:
    initialize_parallel(tensor)
    leg = Leg({}, {}, {})
    for order in ORDERS:
        config = make_config(
            folder,
            output / order,
            data={"order": order, "num_workers": 0},
            batch={"global_batch_packs": PACKS_PER_STEP},
            train={"iterations": last_step},
            parallel={"tensor": tensor},
        )
        trainer, seen, _ = make_trainer(config, accept=["train.iterations"])
        trainer.resume()
        leg.before[order] = whole(trainer)
        assert trainer.run()
        leg.after[order], leg.keys[order] = whole(trainer), seen.keys
    parallel_state.destroy_model_parallel()
    return leg


def whole(trainer: Any) -> dict[str, torch.Tensor]:
    """Weights and moments of this rank's part of the model, from all its ranks."""
    return {
        f"{kind}.{name}": tensor.full_tensor().clone()
        for kind, named in trainer._optimizer.state().items()
        for name, tensor in named.items()
    }


def assert_equal(saved: dict[str, torch.Tensor], restored: dict[str, torch.Tensor]) -> None:
    assert saved.keys() == restored.keys()
    assert all(torch.equal(saved[name], restored[name]) for name in saved)
    assert all(saved[name].any() for name in saved if "linear" in name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bmr_folder(tmp_path_factory.mktemp("bmr"), 30)


@pytest.fixture(scope="module")
def legs(folder: Path, bmr_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    output = tmp_path_factory.mktemp("legs")
    results = [
        run_ranks(ranks, output / f"processes_{step}", train, folder, output, step, 1)
        for ranks, step in LEGS
    ]
    return results, output


def test_each_pack_comes_once_per_epoch(legs: Any, folder: Path) -> None:
    results, output = legs
    packs = sorted(pack.key for pack in PackedFolder(folder))
    total = LEGS[-1][1] * PACKS_PER_STEP
    assert len(packs) < LEGS[-2][1] * PACKS_PER_STEP < 2 * len(packs)  # changed in the second epoch
    keys = [key for ranks in results for leg in ranks for key in leg.keys["written"]]
    counts = collections.Counter(keys)
    assert (len(keys), sorted(counts)) == (total, packs)
    epochs, rest = divmod(total, len(packs))
    assert sorted(counts.values()) == [epochs] * (len(packs) - rest) + [epochs + 1] * rest
    balanced = {key for ranks in results for leg in ranks for key in leg.keys["balanced"]}
    assert sorted(balanced) == packs
    for order in ORDERS:
        assert len(losses(output / order)) == LEGS[-1][1]
        assert {line["packs"] for line in step_lines(output / order)} == {PACKS_PER_STEP}


@pytest.mark.parametrize("order", ORDERS)
def test_weights_and_moments_go_on_as_they_were(legs: Any, order: str) -> None:
    results, _ = legs
    for earlier, later in itertools.pairwise(results):
        assert_equal(earlier[0].after[order], later[0].before[order])


def test_tensor_parallel_ranks_go_on_with_their_own_parts(
    folder: Path, bmr_environment: None, tmp_path: Path
) -> None:
    four, two = (
        run_ranks(ranks, tmp_path / f"processes_{ranks}", train, folder, tmp_path, step, 2)
        for ranks, step in ((4, 1), (2, 2))
    )
    for tensor_rank in range(2):
        assert_equal(four[2 + tensor_rank].after["written"], two[tensor_rank].before["written"])
    keys = four[0].keys["written"] + four[2].keys["written"] + two[0].keys["written"]
    assert len(set(keys)) == len(keys) == 2 * PACKS_PER_STEP
    assert two[0].keys == two[1].keys

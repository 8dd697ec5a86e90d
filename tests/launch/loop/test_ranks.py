"""Runs of several ranks, which may share rows and layers: steps, validations, kills and resumes are
those of one rank; and what is refused."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed

from launch.config import LaunchConfig
from launch.data.micro_batches import MicroBatches, build_task_encoder
from launch.data.packed_data import check_room, read_packed_data
from launch.loop.metrics import read_metrics
from launch.loop.parallel import initialize_parallel, shutdown_parallel
from offline_packing.errors import StageError
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.packed_runs import bmr_folder, losses, make_config, step_lines, trained
from tests.helpers.rank_processes import run_ranks

STEPS, PACKS_PER_STEP, SAVE_EVERY = 6, 2, 2

pytestmark = pytest.mark.usefixtures("bmr_environment")


class Layout(NamedTuple):
    """Division of the work among ranks."""

    context: int = 1
    tensor: int = 1
    data: int = 1

    @property
    def world_size(self) -> int:
        return self.context * self.tensor * self.data


def config_of(folder: Path, output: Path, layout: Layout, *, once: bool = False) -> LaunchConfig:
    return make_config(
        folder,
        output,
        data={"num_workers": 0, "repeat": not once},
        batch={"global_batch_packs": 6 if once else PACKS_PER_STEP},
        train={"iterations": 100 if once else STEPS, "normalization": "sample"},
        checkpoint={"every": SAVE_EVERY, "export": False},
        validation={"every": 3},
        parallel={"context": layout.context, "tensor": layout.tensor},
    )


def train(
    folder: Path, output: Path, layout: Layout, fail_at: int | None = None, once: bool = False
) -> tuple[list[str], list[torch.Tensor]]:
    """One rank's packs and final weights; at pack `fail_at` it is killed. `once`: an epoch, of
    steps that leave a rank short in the last one."""
    run = trained(config_of(folder, output, layout, once=once), fail_at=fail_at)
    return run.keys, [parameter.detach() for parameter in run.model.parameters()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bmr_folder(tmp_path_factory.mktemp("bmr"), 62, context_parallel=4)


@pytest.fixture(scope="module")
def alone(
    folder: Path, bmr_environment: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], Path]:
    """Packs and output of a run of one rank."""
    output = tmp_path_factory.mktemp("alone")
    keys, _ = train(folder, output, Layout())
    return keys, output


def packs_of_steps(*keys_of_ranks: list[str]) -> list[list[str]]:
    """Packs of each step, those of all ranks."""
    count = len(keys_of_ranks[0]) // STEPS
    steps = range(0, STEPS * count, count)
    return [sorted(key for keys in keys_of_ranks for key in keys[n : n + count]) for n in steps]


def validation_losses(output: Path) -> list[float]:
    lines = read_metrics(output / "metrics.jsonl")
    return [line["validation_loss"] for line in lines if "validation_loss" in line]


def whole_and_killed(folder: Path, output: Path, layout: Layout) -> list[Any]:
    """Train a run, and another one that is killed and continued; return what `train` returned for
    each. `moved` holds a copy of the second run as the kill left it."""
    whole = train(folder, output / "whole", layout)
    train(folder, output / "killed", layout, 4 * PACKS_PER_STEP // layout.data)
    if distributed.get_rank() == 0:
        shutil.copytree(output / "killed", output / "moved")
    distributed.barrier()
    return [whole, train(folder, output / "killed", layout)]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2),
        Layout(tensor=2),
        pytest.param(Layout(2, 2), marks=pytest.mark.exhaustive),
        pytest.param(Layout(tensor=2, data=2), marks=pytest.mark.exhaustive),
    ],
)
def test_killed_and_resumed_it_trains_as_one_rank_to_the_last_bit(
    layout: Layout, folder: Path, alone: Any, tmp_path: Path
) -> None:
    """Also where fewer ranks go on with what several left: one alone, or those that share a
    model."""
    keys_alone, output_alone = alone
    ranks: Any = whole_and_killed, folder, tmp_path, layout
    whole, resumed = zip(*run_ranks(layout.world_size, tmp_path / "ranks", *ranks), strict=True)
    expected, validated = losses(output_alone), validation_losses(output_alone)
    assert (len(expected), len(validated)) == (STEPS, 2)
    assert losses(tmp_path / "whole") == pytest.approx(expected, abs=2e-5)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    for name in ("whole", "killed"):
        assert validation_losses(tmp_path / name) == pytest.approx(validated, abs=2e-5)
    together = layout.context * layout.tensor
    assert packs_of_steps(*(keys for keys, _ in whole[::together])) == packs_of_steps(keys_alone)
    for rank, (keys, weights) in enumerate(whole):
        assert keys == whole[rank - rank % together][0]
        later, same = resumed[rank]
        assert later == keys[-len(later) :]
        assert len(later) == 2 * len(keys) // STEPS
        assert all(map(torch.equal, weights, same))
    for one, other in zip(step_lines(output_alone), step_lines(tmp_path / "whole"), strict=True):
        assert all(one[name] == other[name] for name in ("packs", "tokens", "sub_samples"))
    fewer = layout._replace(context=1, data=1)
    if fewer != layout and 1 in (layout.tensor, layout.context):
        ranks = run_ranks(
            fewer.tensor, tmp_path / "fewer", train, folder, tmp_path / "moved", fewer
        )
        assert all(keys == keys_alone[-len(keys) :] for keys, _ in ranks)
        assert losses(tmp_path / "moved") == pytest.approx(expected, abs=2e-5)


def two_epochs(folder: Path, output: Path) -> list[Any]:
    """Train an epoch twice, and damage another rank's file of the last checkpoint in between;
    return what `train` returned each time."""
    first = train(folder, output, Layout(data=2), once=True)
    if distributed.get_rank() == 0:
        newest = max((output / "checkpoints").glob("iter_*"))
        (newest / "shard-00002-model-00003-of-00003.safetensors").write_bytes(b"")
    distributed.barrier()
    return [first, train(folder, output, Layout(data=2), once=True)]


def test_ranks_end_an_epoch_together_and_pass_over_a_damaged_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    """They have seen each pack once, and not all have one in the last step."""
    ranks = run_ranks(2, tmp_path / "ranks", two_epochs, folder, tmp_path / "out")
    keys = [key for (once, _), _ in ranks for key in once]
    assert sorted(keys) == sorted(pack.key for pack in PackedFolder(folder))
    packs = [line["packs"] for line in step_lines(tmp_path / "out")]
    assert sum(packs) == len(keys)
    assert packs == [6] * 6 + [1]
    for (once, weights), (again, same) in ranks:
        assert again == once[6 * 3 :]  # of the last step
        assert all(map(torch.equal, weights, same))


def test_ranks_and_packs_that_cannot_be_divided_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor_parallel 1 × context_parallel 2 does not div"):
        initialize_parallel(1, 2)
    check_room(folder, 4)  # planned with multiples of 8
    planned = bmr_folder(tmp_path / "plain", 20)
    check_room(planned, 1)
    message = r"pads samples to multiples of 8, so that packs of .* > seq_length 256; pack it with"
    with pytest.raises(StageError, match=message):
        check_room(planned, 4)
    shutil.rmtree(planned / "_packing")
    with pytest.raises(StageError, match=r"of 8; .* no index and plan .*_parallel=4"):
        check_room(planned, 4)


def test_packs_with_room_are_padded(tmp_path: Path) -> None:
    """One sample each, all shorter than what they may take."""
    folder = bmr_folder(tmp_path / "single", 20, max_samples=1)
    config = config_of(folder, tmp_path, Layout(2))
    check_room(folder, 2)
    device = initialize_parallel()
    encoder = build_task_encoder(config.data, read_packed_data(folder), pad_multiple=4)
    batches = MicroBatches(config.data, encoder, device)
    lengths = [batches.next().cu_lengths.diff() for _ in range(10)]
    shutdown_parallel()
    assert all((length % 4 == 0).all() for length in lengths)

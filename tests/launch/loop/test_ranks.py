"""Runs of several ranks, which may share rows and layers: steps, validations, kills and resumes are
those of one rank; and what is refused."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from launch.config import LaunchConfig
from launch.data.micro_batches import MicroBatches, build_task_encoder
from launch.data.packed_data import check_room, read_packed_data
from launch.loop.metrics import read_metrics
from launch.loop.parallel import initialize_parallel, shutdown_parallel
from offline_packing.errors import StageError
from task_encoders.loading.packed_folder import PackedFolder
from tests.helpers.packed_runs import (
    KilledError,
    bmr_folder,
    losses,
    make_config,
    make_trainer,
    step_lines,
)
from tests.helpers.rank_processes import run_ranks

STEPS, PACKS_PER_STEP, SAVE_EVERY = 6, 4, 2

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
    config = config_of(folder, output, layout, once=once)
    trainer, seen, model = make_trainer(config, fail_at=fail_at)
    trainer.resume()
    try:
        assert trainer.run()
    except KilledError:
        os.kill(os.getpid(), signal.SIGKILL)
    return seen.keys, [parameter.detach() for parameter in model.parameters()]


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
    shutdown_parallel()
    return keys, output


def packs_of_steps(*keys_of_ranks: list[str]) -> list[list[str]]:
    """Packs of each step, those of all ranks."""
    count = len(keys_of_ranks[0]) // STEPS
    steps = range(0, STEPS * count, count)
    return [sorted(key for keys in keys_of_ranks for key in keys[n : n + count]) for n in steps]


def validation_losses(output: Path) -> list[float]:
    lines = read_metrics(output / "metrics.jsonl")
    return [line["validation_loss"] for line in lines if "validation_loss" in line]


@pytest.mark.parametrize(
    "layout",
    [Layout(2), Layout(tensor=2, data=2), pytest.param(Layout(2, 2), marks=pytest.mark.exhaustive)],
)
def test_killed_and_resumed_it_trains_as_one_rank_to_the_last_bit(
    layout: Layout, folder: Path, alone: Any, tmp_path: Path
) -> None:
    """Also where fewer ranks go on with what several left: one alone, or those that share a
    model."""

    def run(name: str, output: Path, *fail_at: int) -> list[Any]:
        arguments = folder, output, layout, *fail_at
        return run_ranks(layout.world_size, tmp_path / name, train, *arguments)

    keys_alone, output_alone = alone
    outputs = {name: tmp_path / f"{name}_run" for name in ("whole", "killed", "moved")}
    whole = run("whole", outputs["whole"])
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run("killed", outputs["killed"], 4 * PACKS_PER_STEP // layout.data)
    shutil.copytree(outputs["killed"], outputs["moved"])
    resumed = run("resumed", outputs["killed"])

    expected = losses(output_alone)
    assert len(expected) == STEPS
    assert losses(outputs["whole"]) == pytest.approx(expected, abs=2e-5)
    assert losses(outputs["killed"]) == losses(outputs["whole"])
    validated = validation_losses(output_alone)
    assert len(validated) == 2
    for name in ("whole", "killed"):
        assert validation_losses(outputs[name]) == pytest.approx(validated, abs=2e-5)
    together = layout.context * layout.tensor
    assert packs_of_steps(*(keys for keys, _ in whole[::together])) == packs_of_steps(keys_alone)
    for rank, (keys, weights) in enumerate(whole):
        assert keys == whole[rank - rank % together][0]
        later, same = resumed[rank]
        assert later == keys[-len(later) :]
        assert len(later) == 2 * len(keys) // STEPS
        assert all(map(torch.equal, weights, same))
    for one, other in zip(step_lines(output_alone), step_lines(outputs["whole"]), strict=True):
        assert all(one[name] == other[name] for name in ("packs", "tokens", "sub_samples"))
    if layout.tensor == 1 or layout.context == 1:
        fewer = layout._replace(context=1, data=1)
        ranks = run_ranks(fewer.tensor, tmp_path / "fewer", train, folder, outputs["moved"], fewer)
        assert all(keys == keys_alone[-len(keys) :] for keys, _ in ranks)
        assert losses(outputs["moved"]) == pytest.approx(expected, abs=2e-5)


def test_ranks_end_an_epoch_together_and_pass_over_a_damaged_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    """They have seen each pack once, not all have one in the last step, and it is a file of one
    rank that is damaged."""
    arguments = train, folder, tmp_path / "out", Layout(data=2), None, True
    first = run_ranks(2, tmp_path / "first", *arguments)
    newest = max((tmp_path / "out" / "checkpoints").glob("iter_*"))
    (newest / "shard-00002-model-00003-of-00003.safetensors").write_bytes(b"")
    second = run_ranks(2, tmp_path / "second", *arguments)
    keys = first[0][0] + first[1][0]
    assert sorted(keys) == sorted(pack.key for pack in PackedFolder(folder))
    packs = [line["packs"] for line in step_lines(tmp_path / "out")]
    assert sum(packs) == len(keys)
    assert packs == [6] * 6 + [1]
    for (once, weights), (again, same) in zip(first, second, strict=True):
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

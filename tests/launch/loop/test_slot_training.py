"""`launch.train` on packs that go over 1, 2 and 4 ranks: its steps are those of one process."""

import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.energon import stateless
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from torch.multiprocessing import ProcessExitedException

from launch.config import LaunchConfig, load_config
from launch.data.packed_data import PackedData, read_packed_data
from launch.loop import setup
from launch.loop.metrics import read_metrics, row_flops
from launch.loop.optimizer import ShardedAdamW
from launch.loop.parallel import initialize_parallel, shutdown_parallel
from launch.loop.plan import TrainPlan, plan_training
from launch.loop.trainer import Trainer
from launch.model.megatron_model import build_model
from launch.train import cli
from offline_packing.storage.files import to_json
from task_encoders import PackedTaskEncoder
from task_encoders.energon_samples import PackedBatch
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.model_inputs import normalise_pixels
from task_encoders.packs.manifest import read_manifest
from task_encoders.packs.slots import Slots
from tests.helpers.packed_runs import (
    IMAGE_TOKEN,
    TINY_MODEL,
    fold_vocabulary,
    losses,
    slots_folder,
    step_lines,
)
from tests.helpers.rank_processes import run_ranks

STEPS, SAVE_EVERY, KILL_AT = 4, 2, 3
SLOTS_PER_STEP = 2


class FoldingTaskEncoder(PackedTaskEncoder):
    """Rows in the words of the tiny model."""

    @stateless
    def batch(self, samples: Any) -> PackedBatch:
        return fold_vocabulary(super().batch(samples))


class Watched:
    """What one rank did: the packs it trained, over how many ranks, and the gradients of all."""

    def __init__(self) -> None:
        self.keys: list[list[str]] = []
        self.sizes: set[int | None] = set()
        #: operations of each row, by the key of its first pack
        self.flops: dict[str, float] = {}
        self.gradients: list[dict[str, torch.Tensor]] = []


def watch(patch: pytest.MonkeyPatch, kill_at: int | None = None) -> Watched:
    """Watch a run in this process, and kill it at the begin of a step."""
    watched = Watched()
    step, forward, update = Trainer._step, Trainer._forward_backward, ShardedAdamW.step

    def watched_step(self: Trainer, *arguments: Any) -> Any:
        if self.iteration == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        watched.keys.append([])
        return step(self, *arguments)

    def watched_forward(self: Trainer, row: PackedBatch, counts: Any) -> None:
        watched.keys[-1] += row.__key__
        watched.sizes.add(row.local_cp_size)
        tower, _, language = row_flops(self._model.cost, row).tolist()
        watched.flops[row.__key__[0]] = tower + language
        forward(self, row, counts)

    def watched_update(self: ShardedAdamW, **options: Any) -> float:
        gradients = {n: one.grad.full_tensor() for n, one in self._parameters.items()}
        watched.gradients.append({name: one.clone() for name, one in gradients.items()})
        return update(self, **options)

    patch.setattr(Trainer, "_step", watched_step)
    patch.setattr(Trainer, "_forward_backward", watched_forward)
    patch.setattr(ShardedAdamW, "step", watched_update)
    patch.setattr(setup, "build_model", build_tiny_model)
    patch.setattr(setup, "check_token_ids", lambda *_: None)  # of its folded vocabulary
    return watched


def build_tiny_model(*arguments: Any, **options: Any) -> Any:
    model = build_model(*arguments, **options)
    model.hf_config.image_token_id = IMAGE_TOKEN
    return model


def train(command: list[str], kill_at: int | None = None) -> Watched:
    """`launch.train` on one rank."""
    with pytest.MonkeyPatch.context() as patch:
        watched = watch(patch, kill_at)
        with pytest.raises(SystemExit) as ended:
            cli.main(command, standalone_mode=False)
    assert ended.value.code == 0
    return watched


def slots_of(folder: Path, split: str) -> Slots:
    manifest = read_manifest(folder)
    assert manifest is not None
    slots = manifest.slots(split)
    assert slots is not None
    return slots


class PacksOfSlots:
    """The packs of slots one after another, for one process; None fills a slot of `ranks` packs."""

    def __init__(self, config: Any, encoder: Any, _: Any, split: str = "train", **__: Any) -> None:
        self._folder, self._encoder = PackedFolder(config.path, encoder, split=split), encoder
        slots = slots_of(Path(config.path), split)
        self._ranks, self._offsets = slots.over.ranks, slots.offsets
        self._split = split
        self.restart()

    def restart(self) -> None:
        self._rows = self._read()

    def _read(self) -> Iterator[PackedBatch | None]:
        while True:
            for first, end in itertools.pairwise(self._offsets.tolist()):
                for number in range(first, end):
                    row = normalise_pixels(self._encoder.batch([self._folder.row(number)]))
                    yield replace(row, local_cp_size=None)
                if self._split == "train":
                    yield from [None] * (self._ranks - (end - first))
            if self._split == "val":
                yield None

    def next(self) -> PackedBatch | None:
        return next(self._rows)

    def state(self) -> None: ...

    def close(self) -> None: ...


def train_alone(command: list[str], slots_per_step: int) -> Watched:
    """The same steps in one process, a pack at a time."""

    def plan(config: LaunchConfig, data: list[PackedData], _: int) -> TrainPlan:
        ranks = data[0].slot_ranks
        found = plan_training(config, data, ranks)
        stage = replace(found.stages[0], accumulation=slots_per_step * ranks)
        return replace(found, stages=(stage,))

    with pytest.MonkeyPatch.context() as patch:
        watched = watch(patch)
        patch.setattr(setup, "plan_training", plan)
        patch.setattr(setup, "LoaderBatches", PacksOfSlots)
        trainer, _ = setup.build_trainer(
            load_config(command[0], command[1:]), initialize_parallel()
        )
        assert trainer.run()
    shutdown_parallel()
    return watched


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLINE_PACKED_DATA", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slots_folder(tmp_path_factory.mktemp("slots"), 4)


def command_of(folder: Path, output: Path, slots: int, **parallel: int) -> list[str]:
    """A command line for a run of so many slots to a step."""
    data = read_packed_data(folder)
    config = {
        "model": TINY_MODEL,
        "data": {
            "path": str(folder),
            "num_workers": 0,
            "task_encoder": f"{__name__}:{FoldingTaskEncoder.__name__}",
        },
        "batch": {"global_batch_packs": round(slots * data.num_packs / data.num_slots)},
        "train": {"iterations": STEPS, "normalization": "sample"},
        "schedule": {"learning_rate": 3e-3},
        "checkpoint": {"every": SAVE_EVERY, "export": False},
        "validation": {"every": STEPS},
        "output": {"path": str(output)},
        "parallel": parallel,
    }
    path = output.parent / f"{output.name}.yaml"
    path.write_bytes(to_json(config))
    return [str(path)]


def weights_of(output: Path) -> dict[str, torch.Tensor]:
    """Weights and moments in the newest checkpoint."""
    path = max((output / "checkpoints").iterdir())
    reader = HuggingFaceStorageReader(str(path))
    found = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(one.size) for name, one in found.items()}
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def check_against_one_process(
    alone: Watched, ranks: list[Watched], output: Path, alone_in: Path
) -> None:
    """Losses of steps and of validation, what was counted, gradients and weights."""
    expected, found = (
        read_metrics(alone_in / "metrics.jsonl"),
        read_metrics(output / "metrics.jsonl"),
    )
    assert len(found) == len(expected) == STEPS + 1
    for one, other in zip(expected, found, strict=True):
        for name in {"loss", "grad_norm", "validation_loss"} & one.keys():
            assert other[name] == pytest.approx(one[name], rel=1e-5), name
        for name in {
            "packs",
            "tokens",
            "loss_tokens",
            "sub_samples",
            "validation_packs",
        } & one.keys():
            assert other[name] == one[name], name
        assert other.get("fill", 1) <= 1
    for step, gradients in enumerate(alone.gradients):
        for name, whole in gradients.items():
            found = ranks[0].gradients[step][name]
            assert (found - whole).abs().max() <= 1e-5 * max(whole.abs().max(), 1e-3), name
    for name, weight in weights_of(alone_in).items():
        torch.testing.assert_close(weights_of(output)[name], weight, rtol=1e-5, atol=1e-5)


def test_four_ranks_train_as_one_process_and_resume_to_the_last_bit(
    folder: Path, tmp_path: Path
) -> None:
    def run(name: str, *kill_at: int) -> list[Watched]:
        folder_of_ranks = tmp_path / f"ranks_{len(list(tmp_path.iterdir()))}"
        command = command_of(folder, tmp_path / name, SLOTS_PER_STEP)
        return run_ranks(4, folder_of_ranks, train, command, *kill_at)

    alone = train_alone(command_of(folder, tmp_path / "alone", SLOTS_PER_STEP), SLOTS_PER_STEP)
    whole = run("whole")
    check_against_one_process(alone, whole, tmp_path / "whole", tmp_path / "alone")
    assert set.union(*(rank.sizes for rank in whole)) == {1, 2, 4}
    for step, keys in enumerate(alone.keys):
        assert set(keys) == {key for rank in whole for key in rank.keys[step]}
    slots = slots_of(folder, "train")
    for keys, line in zip(alone.keys, step_lines(tmp_path / "whole"), strict=True):
        flops = np.array([alone.flops[key] for key in keys])
        own = Slots(slots.over, slots.cp_sizes[[int(key[-8:]) for key in keys]])
        assert line["idle_share"] == pytest.approx(own.idle_share(flops), rel=1e-6)

    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run("killed", KILL_AT)
    resumed = run("killed")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    for once, again in zip(whole, resumed, strict=True):
        assert again.keys == once.keys[SAVE_EVERY * (KILL_AT // SAVE_EVERY) :]
    weights = weights_of(tmp_path / "killed")
    assert all(
        torch.equal(weights[name], one) for name, one in weights_of(tmp_path / "whole").items()
    )


@pytest.fixture(scope="module")
def for_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """References with token ids."""
    root = tmp_path_factory.mktemp("for_two")
    return slots_folder(root, 2, layout="references", pretokenize=True)


def test_two_groups_of_ranks_go_on_where_one_was_killed(for_two: Path, tmp_path: Path) -> None:
    """With processes that read, of which both had other numbers."""
    command = [*command_of(for_two, tmp_path / "out", SLOTS_PER_STEP), "data.num_workers=1"]
    alone = train_alone(command_of(for_two, tmp_path / "alone", SLOTS_PER_STEP), SLOTS_PER_STEP)
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run_ranks(2, tmp_path / "two", train, command, KILL_AT)
    four = run_ranks(4, tmp_path / "four", train, [*command[:-1], "data.num_workers=2"])
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    saved = SAVE_EVERY * (KILL_AT // SAVE_EVERY)
    for step, keys in enumerate(alone.keys[saved:]):
        both = [{key for rank in four[n : n + 2] for key in rank.keys[step]} for n in (0, 2)]
        assert both[0] | both[1] == set(keys)
        assert not both[0] & both[1]


@pytest.mark.exhaustive
def test_ranks_of_a_slot_may_be_tensor_parallel(for_two: Path, tmp_path: Path) -> None:
    commands = [
        command_of(for_two, tmp_path / name, SLOTS_PER_STEP, tensor=tensor)
        for name, tensor in (("alone", 1), ("four", 2))
    ]
    train_alone(commands[0], SLOTS_PER_STEP)
    for rank in run_ranks(4, tmp_path / "ranks", train, commands[1]):
        assert rank.sizes == {1, 2}
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)

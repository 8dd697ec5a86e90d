"""Runs of `launch.train_transformers` on tiny checkpoints of every family."""

import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from launch.loop.setup import run
from launch.loop.trainer import Trainer
from launch.train_transformers import load_config, main
from tests.helpers.packed_runs import KilledError, losses
from tests.helpers.tiny_families import encoder_options

FAMILIES = ["qwen2_vl", "qwen3_vl", "qwen3_5", "llava_1_5", "mistral3", "internvl3"]
STEPS = 6
Case = Callable[[str], Path]


def make_case(world: Any, name: str, folder: Path) -> None:
    """Link a family's tiny checkpoint with a tokenizer as `model`, and dialogues, or "of videos",
    packed for it as `packed`."""
    family, _, kind = name.partition(" of ")
    checkpoint = world.checkpoint(f"{family}_moe" if kind == "experts" else family)
    packed = world.packed(
        "videos" if kind == "videos" else "bmr",
        model={"family": family, "processor": str(checkpoint), "max_pixels": None}
        | encoder_options(family),
        output={"packs_per_shard": 8, "split": {"train": 0.85, "val": 0.15}},
    )
    folder.mkdir()
    (folder / "model").symlink_to(checkpoint)
    (folder / "packed").symlink_to(packed)


def command(folder: Path, output: Path, *overrides: str, family: str = "qwen2_vl") -> list[str]:
    """Arguments of the command for a case."""
    config = output.with_suffix(".yaml")
    config.write_text("batch: {global_batch_packs: 2}\ncheckpoint: {every: 2}\n")
    fields = {
        "model.family": family,
        "model.checkpoint": folder / "model",
        "data.path": folder / "packed",
        "data.num_workers": 0,
        "train.iterations": STEPS,
        "schedule.learning_rate": 1e-3,
        "output.path": output,
    }
    return [str(config), *(f"{name}={value}" for name, value in fields.items()), *overrides]


def train(arguments: list[str], status: int = 0) -> str:
    """Run the command in this process; returns what it printed."""
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output


def run_here(arguments: list[str]) -> int:
    """The command, as one rank of a group."""
    return run(load_config(arguments[0], arguments[1:]))


def stop_here(arguments: list[str]) -> int:
    """The same, stopped in its third step."""
    act = partial(os.kill, os.getpid(), signal.SIGTERM)
    Trainer._step = Interrupted(3, act, Trainer._step)  # type: ignore[method-assign,assignment]
    return run_here(arguments)


def weights(output: Path) -> dict[str, torch.Tensor]:
    """All weights of a run's export."""
    return load_file(output / "hf" / "model.safetensors")


def assert_equal_runs(first: Path, second: Path, steps: int = STEPS) -> None:
    """Losses and weights are equal to the last bit."""
    assert losses(first) == losses(second)
    assert len(losses(first)) == steps
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class Interrupted:
    """A trainer's method that does something first in its n-th call."""

    def __init__(self, number: int, act: Callable[[], None], method: Callable[..., Any]) -> None:
        self._left, self._act, self._method = number, act, method

    def __get__(self, trainer: Any, _: type) -> Any:
        def call(*args: Any) -> Any:
            self._left -= 1
            if not self._left:
                self._act()
            return self._method(trainer, *args)

        return call


def _killed() -> None:
    raise KilledError


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


#: What ends a run, and the status that it then has.
STOPS: dict[str, tuple[Callable[[], None], int]] = {
    "SIGTERM": (partial(signal.raise_signal, signal.SIGTERM), 143),
    "SIGINT": (partial(signal.raise_signal, signal.SIGINT), 130),
    "SIGKILL": (_killed, 0),
    "full disk": (partial(_limit_files, 100_000), 1),  # files end in the middle of the weights
}


def stop(arguments: list[str], how: str, at: int, where: str = "_step") -> str:
    """Run the command and end it in the n-th call of a method of the trainer; returns what it
    printed."""
    act, status = STOPS[how]
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, where, Interrupted(at, act, getattr(Trainer, where)))
        try:
            return train(arguments, status)
        except KilledError:
            return ""
        finally:
            _limit_files(limit)

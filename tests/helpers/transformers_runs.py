"""Runs of `launch.train_transformers` on tiny checkpoints of every family."""

import os
import resource
import shutil
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
from task_encoders.families import build_sample_encoder
from task_encoders.packs.manifest import Manifest
from tests.helpers.datasets import make_run, mixed_pairs, pack_all
from tests.helpers.packed_runs import KilledError, losses
from tests.helpers.tiny_families import encoder_options, save_tokenizer, tiny_model
from tests.helpers.video_packs import video_packs

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava_1_5", "mistral3", "internvl3"]
STEPS = 6
Case = Callable[[str], Path]


def make_case(name: str, folder: Path) -> None:
    """Write a family's tiny checkpoint with a tokenizer to `model`, and dialogues packed for it.
    They have pictures; those of a case "of videos" also videos."""
    family, _, kind = name.partition(" of ")
    save_tokenizer(family, folder / "tokenizer")
    token_ids = build_sample_encoder(family, str(folder / "tokenizer")).media_token_ids
    model = tiny_model(family, token_ids, experts=kind == "experts")
    shutil.copytree(folder / "tokenizer", folder / "model")
    model.save_pretrained(folder / "model")
    if kind == "videos":
        video_packs("bmr", folder, family=family, processor=str(folder / "model"))
        return
    mixed_pairs(folder / "source", 30)
    pack_dialogues(family, folder, folder / "packed")


def pack_dialogues(family: str, folder: Path, packed: Path, **sections: dict[str, Any]) -> Manifest:
    """Pack the dialogues of a case, with other options."""
    model = {"family": family, "processor": str(folder / "model"), "max_pixels": None}
    output = {"packs_per_shard": 8, "split": {"train": 0.85, "val": 0.15}}
    made = make_run(
        {"format": "pairs", "path": str(folder / "source"), "task": "bmr"},
        packed,
        model=model | encoder_options(family),
        pack={"seq_length": 512} | sections.get("pack", {}),
        output=output | sections.get("output", {}),
    )
    return pack_all(made)


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

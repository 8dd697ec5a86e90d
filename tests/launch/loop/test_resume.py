"""Killed at any step and resumed, a run must be the run that was never killed, bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from launch.config import LaunchConfig
from launch.loop.setup import run
from offline_packing.errors import ConfigError, MismatchError, StageError
from tests.helpers.packed_runs import (
    KilledError,
    bmr_folder,
    losses,
    make_config,
    make_trainer,
)
from tests.helpers.transformers_runs import Case

STEPS = 8
PACKS_PER_STEP = 3
SAVE_EVERY = 2


pytestmark = pytest.mark.usefixtures("bmr_environment")


def run_config(folder: Path, output: Path, num_workers: int = 0, **sections: Any) -> LaunchConfig:
    return make_config(
        folder,
        output,
        data={"num_workers": num_workers},
        train={"iterations": STEPS},
        batch={"global_batch_packs": PACKS_PER_STEP},
        checkpoint={"every": SAVE_EVERY},
        **sections,
    )


Run = tuple[list[float], list[str], list[torch.Tensor], LaunchConfig]


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses, pack keys, final weights and configuration of a whole run, by number of loader
    processes."""
    done: dict[int, Run] = {}

    def run(num_workers: int) -> Run:
        if num_workers not in done:
            output = tmp_path_factory.mktemp("whole")
            (output / "checkpoints" / "iter_00000099.tmp").mkdir(parents=True)  # left by a kill
            config = run_config(folder, output, num_workers)
            trainer, recorded, model = make_trainer(config)
            assert trainer.run()
            done[num_workers] = (
                *(losses(output), recorded.keys, list(model.parameters())),
                config,
            )
        return done[num_workers]

    return run


@pytest.mark.parametrize(
    ("num_workers", "killed_at"),
    [(0, 1), (0, 2), (0, 7), (2, 3)],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    num_workers: int, killed_at: int, folder: Path, uninterrupted: Any, tmp_path: Path
) -> None:
    expected_losses, expected_keys, expected_weights, _ = uninterrupted(num_workers)
    assert len(expected_losses) == STEPS
    assert len(expected_keys) == STEPS * PACKS_PER_STEP
    config = run_config(folder, tmp_path, num_workers)
    fail_at = (killed_at - 1) * PACKS_PER_STEP + 1  # in the middle of that step
    killed, seen, _ = make_trainer(config, fail_at=fail_at)
    with pytest.raises(KilledError):
        killed.run()
    assert seen.keys == expected_keys[:fail_at]
    resumed, seen_again, model = make_trainer(config)
    resumed.resume()
    saved = (killed_at - 1) // SAVE_EVERY * SAVE_EVERY
    assert resumed.iteration == saved
    assert resumed.run()
    assert losses(tmp_path) == expected_losses
    assert seen_again.keys == expected_keys[saved * PACKS_PER_STEP :]
    assert all(map(torch.equal, model.parameters(), expected_weights))


def test_a_finished_run_keeps_its_newest_checkpoints_and_does_nothing_more(
    uninterrupted: Any,
) -> None:
    *_, config = uninterrupted(0)
    again, seen, _ = make_trainer(config)
    again.resume()
    assert again.run()
    assert seen.keys == []
    assert len(losses(config.output.path)) == STEPS
    names = sorted(path.name for path in (config.output.path / "checkpoints").iterdir())
    assert names == ["iter_00000006", "iter_00000008"]


CHANGES: dict[str, dict[str, Any]] = {
    "train.iterations": {"train": {"iterations": 2}},
    "train.normalization": {"train": {"iterations": 1, "normalization": "sample"}},
    "schedule.learning_rate": {"schedule": {"learning_rate": 3e-5, "warmup": 0.25}},
    "schedule.decay": {"schedule": {"learning_rate": 3e-3, "warmup": 0.25, "decay": "linear"}},
    "optimizer.beta2": {"optimizer": {"beta2": 0.5}},
    "batch.global_batch_packs": {"batch": {"global_batch_packs": 6}},
    "data.cross_sample_attention": {"data": {"num_workers": 0, "cross_sample_attention": True}},
}


@pytest.fixture(scope="module")
def one_step(folder: Path, bmr_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("one")
    assert make_trainer(make_config(folder, output, train={"iterations": 1}))[0].run()
    return output


@pytest.mark.parametrize("field", CHANGES)
def test_another_setting_is_refused_unless_it_is_named(
    field: str, folder: Path, one_step: Path
) -> None:
    sections = {"train": {"iterations": 1}, **CHANGES[field]}
    other = make_config(folder, one_step, **sections)
    trainer, _, _ = make_trainer(other)
    with pytest.raises(MismatchError) as refused:
        trainer.resume()
    head, line = str(refused.value).splitlines()
    assert f"add --accept-mismatch {field} if that is meant" in head
    assert line.startswith(f"  {field} was ")
    assert ", is " in line
    accepting, _, _ = make_trainer(other, accept=[field])
    accepting.resume()
    assert accepting.iteration == 1


def test_only_fields_that_may_differ_can_be_accepted(folder: Path, one_step: Path) -> None:
    sections = {"train": {"iterations": 1}, "data": {"micro_batch_size": 3, "num_workers": 0}}
    config = make_config(folder, one_step, **sections)
    for name in ("optimizer.beta3", "data.micro_batch_size"):
        with pytest.raises(ConfigError, match=f"--accept-mismatch {name}: .*; valid: "):
            make_trainer(config, accept=[name])[0].resume()
    with pytest.raises(StageError, match=r"data\.micro_batch_size was 1, is 3"):
        make_trainer(config)[0].resume()


def test_other_packs_are_named_by_their_paths(one_step: Path, tmp_path: Path, folder: Path) -> None:
    other = bmr_folder(tmp_path / "other", 20)
    trainer, _, _ = make_trainer(make_config(other, one_step, train={"iterations": 1}))
    with pytest.raises(MismatchError) as refused:
        trainer.resume()
    assert f"data.packs was those of {folder}" in str(refused.value)
    assert f"is those of {other}" in str(refused.value)
    (tmp_path / "moved").symlink_to(folder)  # the same packs at another path
    moved, _, _ = make_trainer(make_config(tmp_path / "moved", one_step, train={"iterations": 1}))
    moved.resume()
    assert moved.iteration == 1


def test_nothing_is_accepted_without_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    """If output.path is misspelt, for example, the run would begin anew."""
    with pytest.raises(ConfigError, match=r"holds no checkpoint to resume from; correct output"):
        run(make_config(folder, tmp_path), ["train.iterations"])


def test_accepted_settings_of_the_optimizer_take_effect(folder: Path, one_step: Path) -> None:
    sections = {"train": {"iterations": 1}, "optimizer": {"beta2": 0.5, "weight_decay": 0.3}}
    trainer, _, _ = make_trainer(
        make_config(folder, one_step, **sections),
        accept=["optimizer.beta2", "optimizer.weight_decay"],
    )
    trainer.resume()
    groups = trainer._optimizer._adamw.param_groups
    assert {group["betas"] for group in groups} == {(0.9, 0.5)}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.3}


def test_a_run_that_is_extended_keeps_the_model_that_it_exported(
    case: Case, tmp_path: Path
) -> None:
    def train(iterations: int, *accept: str) -> None:
        sections: dict[str, Any] = {
            "model": {"checkpoint": str(case("qwen2_vl") / "model"), "text": {}, "vision": {}},
            "train": {"iterations": iterations},
            "batch": {"global_batch_packs": 1},
        }
        config = make_config(case("qwen2_vl") / "packed", tmp_path, **sections)
        assert run(config, accept) == 0

    train(1)
    exported = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    train(1)
    with pytest.raises(MismatchError, match=r"train\.iterations was 1, is 2"):
        train(2)
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == exported
    train(2, "train.iterations")
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf_1").iterdir()} == exported
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() != exported["model.safetensors"]
    assert sorted(path.name for path in tmp_path.glob("hf*")) == ["hf", "hf_1"]
    assert len(losses(tmp_path)) == 2

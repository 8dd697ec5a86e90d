"""Killed at any step and resumed, a run must be the run that was never killed, bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from launch.config import LaunchConfig
from offline_packing.errors import StageError
from tests.helpers.packed_runs import (
    BMR_ENVIRONMENT,
    KilledError,
    bmr_folder,
    losses,
    make_config,
    make_trainer,
)

STEPS = 8
PACKS_PER_STEP = 3
SAVE_EVERY = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bmr_folder(tmp_path_factory.mktemp("bmr"))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in BMR_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


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


Run = tuple[list[float], list[str], list[torch.Tensor]]


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses, pack keys and final weights of a whole run, by number of loader processes."""
    done: dict[int, Run] = {}

    def run(num_workers: int) -> Run:
        if num_workers not in done:
            output = tmp_path_factory.mktemp("whole")
            trainer, recorded, model = make_trainer(run_config(folder, output, num_workers))
            assert trainer.run()
            done[num_workers] = losses(output), recorded.keys, list(model.parameters())
        return done[num_workers]

    return run


@pytest.mark.parametrize(
    ("num_workers", "killed_at"),
    [(0, 1), (0, 2), (0, 3), (0, 6), (0, 7), (2, 3), (2, 6)],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    num_workers: int, killed_at: int, folder: Path, uninterrupted: Any, tmp_path: Path
) -> None:
    expected_losses, expected_keys, expected_weights = uninterrupted(num_workers)
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


def test_a_finished_run_does_nothing_more(folder: Path, tmp_path: Path) -> None:
    config = run_config(folder, tmp_path)
    trainer, _, _ = make_trainer(config)
    trainer.run()
    again, seen, _ = make_trainer(config)
    again.resume()
    assert again.run()
    assert seen.keys == []
    assert len(losses(tmp_path)) == STEPS


def test_only_the_newest_checkpoints_stay(folder: Path, tmp_path: Path) -> None:
    trainer, _, _ = make_trainer(run_config(folder, tmp_path))
    (tmp_path / "checkpoints" / "iter_00000099.tmp").mkdir(parents=True)  # left by a kill
    trainer.run()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["iter_00000006", "iter_00000008"]


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"data": {"micro_batch_size": 3, "num_workers": 0}}, "data.micro_batch_size 1"),
        ({"batch": {"global_batch_packs": 6}}, "packs per step 3"),
    ],
)
def test_a_run_that_would_not_continue_exactly_is_refused(
    section: dict[str, Any], name: str, folder: Path, tmp_path: Path
) -> None:
    trainer, _, _ = make_trainer(make_config(folder, tmp_path, train={"iterations": 1}))
    trainer.run()
    other, _, _ = make_trainer(make_config(folder, tmp_path, **section))
    with pytest.raises(StageError, match=name):
        other.resume()

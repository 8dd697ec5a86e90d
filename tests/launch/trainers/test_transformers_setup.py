"""Runs in transformers' Trainer from the configuration of our own loop."""

import os
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from launch.config import MetricsConfig
from launch.trainers.transformers_setup import name_projects


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "another")
    monkeypatch.setenv("SWANLAB_PROJECT", "another")


def test_each_tracker_gets_its_own_project() -> None:
    name_projects(MetricsConfig(wandb="a"))
    assert (os.environ["WANDB_PROJECT"], os.environ["SWANLAB_PROJECT"]) == ("a", "another")
    name_projects(MetricsConfig(wandb="a", swanlab="b"))
    assert (os.environ["WANDB_PROJECT"], os.environ["SWANLAB_PROJECT"]) == ("a", "b")


@pytest.mark.exhaustive
def test_transformers_begins_the_run_in_that_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import WandbCallback

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    name_projects(MetricsConfig(wandb="my-packs"))
    tracker = WandbCallback()
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="wandb")
    tracker.on_train_begin(args, TrainerState(is_world_process_zero=True), TrainerControl())
    assert tracker._wandb.run.project == "my-packs"
    tracker._wandb.finish()

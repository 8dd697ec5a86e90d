"""transformers' Trainer on packs. It builds no batches of its own: that the rows equal what its
processors make of the samples is tested in tests/task_encoders/families."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.helpers.hf_trainers import (
    check_resuming,
    numbers_read,
    packed_trainer,
    recorded_run,
    several_packs,
)
from tests.helpers.peers import check_losses, check_order, open_packs
from tests.helpers.tiny_families import FURTHER
from tests.peers import Say

VERSION = f"transformers {transformers.__version__}"


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def family(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_steps_are_those_of_our_own_trainer_and_are_resumed(
    family: str, case: Any, tmp_path: Path, say: Say
) -> None:
    checkpoint, packed = case
    _, losses = check_resuming(tmp_path, recorded_run, packed_trainer, checkpoint, packed)
    said = check_losses(packed, checkpoint, losses, tmp_path / "ours")
    say(f"{said}, 6 steps resumed after 3 to the last bit")


def test_a_step_on_videos_is_that_of_our_own_trainer(family: str, tmp_path: Path, say: Say) -> None:
    checkpoint, packed = several_packs(family, tmp_path)
    assert all(len(open_packs(packed).row(number).row.video_grid_thw) for number in (0, 1))
    packs, losses, _ = recorded_run(
        packed_trainer, checkpoint, packed, tmp_path / "theirs", steps=2
    )
    assert packs == [0, 1]
    say(f"videos: {check_losses(packed, checkpoint, losses, tmp_path / 'ours')}")


@pytest.mark.parametrize("family", FURTHER)
def test_steps_are_those_of_the_samples_alone(family: str, tmp_path: Path, say: Say) -> None:
    checkpoint, packed = several_packs(family, tmp_path)
    packs, losses, _ = recorded_run(
        packed_trainer, checkpoint, packed, tmp_path / "output", steps=2
    )
    assert packs == [0, 1]
    say(check_losses(packed, checkpoint, losses))


@pytest.mark.parametrize("family", ["qwen2_vl"], scope="module")
def test_order(case: Any, tmp_path: Path, say: Say) -> None:
    checkpoint, packed = case
    say(check_order(packed, tmp_path, numbers_read, packed_trainer, checkpoint, tmp_path / "out"))

"""transformers' Trainer on packs. It builds no batches of its own: that the rows equal what its
processors make of the samples is tested in tests/task_encoders/families."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import TrainingArguments

from launch.trainers.transformers_trainer import PackedTrainer
from tests.helpers.hf_trainers import QUIET, check_order, check_resuming
from tests.helpers.packed_runs import BMR_ENVIRONMENT
from tests.helpers.peers import largest_difference, our_losses, small_checkpoint, small_packs

Say = Callable[[str], None]


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp(request.param)
    checkpoint = small_checkpoint(request.param, root / "checkpoint")
    return request.param, checkpoint, small_packs(request.param, checkpoint, root)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in BMR_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def make(output: Path, model: Any, packs: Any, checkpoint: Path, **options: Any) -> PackedTrainer:
    args = TrainingArguments(output_dir=str(output), **QUIET, **options)
    return PackedTrainer(args=args, model=model, train_dataset=packs)


def test_steps_are_those_of_our_own_trainer_and_are_resumed(
    case: Any, tmp_path: Path, say: Say
) -> None:
    family, checkpoint, packed = case
    _, losses = check_resuming(make, checkpoint, packed, tmp_path)
    difference = largest_difference(our_losses(packed, checkpoint, tmp_path / "ours"), losses)
    say(
        f"transformers {transformers.__version__}, {family}: loss before and after a step as "
        f"launch.train's (to {difference:.0e}), 6 steps resumed after 3 to the last bit"
    )


def test_order(case: Any, tmp_path: Path, say: Say) -> None:
    family, checkpoint, packed = case
    if family != "qwen2_vl":
        pytest.skip("order does not depend on the model")
    check_order(make, checkpoint, packed, tmp_path)
    say(f"transformers {transformers.__version__}: order of packs kept on 1, 2 and 4 ranks")

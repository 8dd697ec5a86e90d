"""NeMo AutoModel on packs of families beside Qwen's."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from launch.trainers.automodel import PacksConfig
from tests.helpers.automodel import losses_of_packs
from tests.helpers.hf_trainers import several_packs
from tests.helpers.parity import check_losses
from tests.helpers.peers import small_checkpoint, small_packs

Say = Callable[[str], None]
VERSION = f"NeMo AutoModel {version('nemo-automodel')}"


@pytest.mark.parametrize("family", ["glm4v", "glm46v", "internvl3"])
def test_steps_are_those_of_the_samples_alone(family: str, tmp_path: Path, say: Say) -> None:
    checkpoint, packed = several_packs(family, tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, attn_implementation="sdpa")
    losses = losses_of_packs(model, packed)
    difference = check_losses(packed, checkpoint, losses, pixels=torch.bfloat16)
    say(
        f"{VERSION}, {family}: loss before and after a step as of the samples alone "
        f"(to {difference:.0e})"
    )


@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified", "mistral3"])
def test_it_packs_no_gemma_and_no_mistral(family: str, tmp_path: Path) -> None:
    checkpoint = small_checkpoint(family, tmp_path / "checkpoint")
    packed = small_packs(family, checkpoint, tmp_path, samples=8)
    with pytest.raises(ValueError, match="AutoModel does not pack this model's images"):
        PacksConfig(str(packed)).build()[0]

"""ms-swift on packs of families beside Qwen's, where its templates pack: on GLM-V and InternVL3."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import swift
from transformers import (
    AutoTokenizer,
    Glm4vImageProcessor,
    Glm4vProcessor,
    Glm4vVideoProcessor,
    Glm46VImageProcessor,
    Glm46VProcessor,
    Glm46VVideoProcessor,
    GotOcr2ImageProcessor,
    InternVLProcessor,
    InternVLVideoProcessor,
)

from tests.helpers.hf_trainers import several_packs
from tests.helpers.ms_swift import make_trainer
from tests.helpers.parity import check_losses

Say = Callable[[str], None]
VERSION = f"ms-swift {swift.__version__}"
#: Model type and template of ms-swift, and transformers' processors.
TRAINED: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "glm4v": ("glm4v", "glm4v", (Glm4vProcessor, Glm4vImageProcessor, Glm4vVideoProcessor)),
    "glm46v": ("glm4v", "glm4_5v", (Glm46VProcessor, Glm46VImageProcessor, Glm46VVideoProcessor)),
    "internvl3": (
        "internvl",
        "internvl_hf",
        (InternVLProcessor, GotOcr2ImageProcessor, InternVLVideoProcessor),
    ),
}


def save_its_processor(checkpoint: Path, whole: Any, images: Any, videos: Any) -> None:
    """The one that ms-swift loads; packs do without."""
    names = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>"}
    names = {f"{name}_token": token for name, token in names.items()} | {"video_token": "<video>"}
    options = {"extra_special_tokens": names} if whole is InternVLProcessor else {}
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, **options)
    template = tokenizer.chat_template
    whole(images(), tokenizer, videos(), chat_template=template).save_pretrained(checkpoint)


@pytest.mark.parametrize("family", TRAINED)
def test_steps_are_those_of_the_samples_alone(family: str, tmp_path: Path, say: Say) -> None:
    model_type, template, processors = TRAINED[family]
    checkpoint, packed = several_packs(family, tmp_path)
    save_its_processor(checkpoint, *processors)
    names = {"model_type": model_type, "template": template}
    trainer = make_trainer(checkpoint, packed, tmp_path / "output", **names, max_steps=2)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    difference = check_losses(packed, checkpoint, losses)
    say(
        f"{VERSION}, {family}: loss before and after a step as of the samples alone "
        f"(to {difference:.0e})"
    )

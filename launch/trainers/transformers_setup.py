"""Parts of a training run in transformers: a random model, and a trainer."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments

from launch.model.config import ELSEWHERE, config_of_preset, transformers_classes
from launch.trainers.transformers_trainer import PackedTrainer
from task_encoders.families import FAMILIES, ModelOptions


def make_model(settings: ModelOptions, token_ids: Mapping[str, Any]) -> PreTrainedModel:
    """The family's tiny preset with random weights, and with these ids of media tokens.

    Raises:
        ValueError: the family has no model in transformers.
    """
    if FAMILIES[settings.family].transformers_name is None:
        raise ValueError(f"family {settings.family} has no model in transformers; {ELSEWHERE}")
    vision = settings.model_dump(include={"image_size", "patch_size"})
    config = config_of_preset(settings.family, "tiny", vision=vision, **token_ids)
    model: PreTrainedModel = transformers_classes(settings.family).model(config)
    return model


def make_trainer(name: str, output: str, steps: int, learning_rate: float) -> Any:
    """A trainer that still needs its model and data."""
    trainer: Any = PackedTrainer
    make_arguments: Any = TrainingArguments
    if name == "trl":
        from trl import SFTConfig

        from launch.trainers.trl_trainer import PackedSFTTrainer

        trainer, make_arguments = PackedSFTTrainer, SFTConfig
    args = make_arguments(
        output_dir=output,
        max_steps=steps,
        learning_rate=learning_rate,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        logging_steps=1,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    return partial(trainer, args=args)

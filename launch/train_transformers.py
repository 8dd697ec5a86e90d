"""Train a model of any family that transformers has on packs, in its Trainer or in TRL's.

    OFFLINE_PACKED_DATA=1 OFFLINE_PACKING_VQA=1 \
        python -m launch.train_transformers out/packed out/checkpoint --model FOLDER --steps 2
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    TrainingArguments,
)

from launch.hf_checkpoint import copy_companions
from launch.model_config import (
    ELSEWHERE,
    config_of_preset,
    family_of_checkpoint,
    transformers_classes,
)
from launch.open_packs import open_packs, settings_of_packs
from launch.train import failing_in_one_line
from launch.trainers.transformers_trainer import PackedTrainer
from task_encoders.families import FAMILIES, ModelSettings
from task_encoders.packed_task_encoder import Qwen2VLTaskEncoder


def make_model(settings: ModelSettings, token_ids: Mapping[str, Any]) -> PreTrainedModel:
    """The family's tiny preset with random weights, and with these ids of media tokens.

    Raises:
        ValueError: the family has no model in transformers.
    """
    if FAMILIES[settings.family].transformers_name is None:
        raise ValueError(f"family {settings.family} has no model in transformers; {ELSEWHERE}")
    square = {"image_size": settings.image_size, "patch_size": settings.patch_size}
    vision = {name: size for name, size in square.items() if size}
    config = config_of_preset(settings.family, "tiny", vision=vision, **token_ids)
    model: PreTrainedModel = transformers_classes(settings.family).model(config)
    return model


def _make_trainer(name: str, output: str, steps: int, learning_rate: float) -> Any:
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


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("output")
@click.option(
    "--model", type=click.Path(path_type=Path), help="Folder of a checkpoint; else random."
)
@click.option("--family", help="Instead of that of the checkpoint or the packs.")
@click.option("--processor", help="Folder of a tokenizer, in the same way.")
@click.option("--max-pixels", type=int, help="As when packs without a manifest were measured.")
@click.option("--seq-length", type=int, help="Capacity of packs without a manifest.")
@click.option("--trainer", type=click.Choice(["transformers", "trl"]), default="transformers")
@click.option("--steps", default=2)
@click.option("--learning-rate", default=1e-5)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(
    path: Path,
    output: str,
    model: Path | None,
    trainer: str,
    steps: int,
    learning_rate: float,
    debug: bool,
    **options: Any,
) -> None:
    """Train a checkpoint, or a tiny random model, on the packs in PATH, and save it in OUTPUT. PATH
    is a folder, a metadataset YAML, or the prefix of packs as token ids."""
    make_trainer = _make_trainer(trainer, output, steps, learning_rate)
    with failing_in_one_line(debug=debug):
        if model is not None:
            options["family"] = options["family"] or family_of_checkpoint(model)
            options["processor"] = options["processor"] or str(model)
        settings, seq_length = settings_of_packs(path, **options)
        task_encoder = Qwen2VLTaskEncoder(seq_length=seq_length, model=settings)
        if model is None:
            trained = make_model(settings, task_encoder.encoder.media_token_ids)
        else:
            trained = AutoModelForImageTextToText.from_pretrained(model)
        if trainer == "trl":
            tokenizer = AutoTokenizer.from_pretrained(settings.processor)
            make_trainer = partial(make_trainer, processing_class=tokenizer)
        running = make_trainer(model=trained, train_dataset=open_packs(path, task_encoder))
        running.train()
        running.save_model()
        if running.is_world_process_zero():
            copy_companions(Path(settings.processor), Path(output))


if __name__ == "__main__":
    main()

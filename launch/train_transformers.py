"""Train a model of any family that transformers has on packs, in its Trainer or in TRL's.

    OFFLINE_PACKED_DATA=1 OFFLINE_PACKING_VQA=1 \
        python -m launch.train_transformers out/packed out/checkpoint --model FOLDER --steps 2
"""

from functools import partial
from pathlib import Path
from typing import Any

import click

from launch.config import MAX_RATE
from launch.train import failing_in_one_line
from offline_packing.errors import StageError


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
@click.option("--learning-rate", default=1e-5, type=click.FloatRange(0, MAX_RATE))
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
    with failing_in_one_line(debug=debug):
        from transformers import AutoModelForImageTextToText, AutoTokenizer

        from launch.data.open_packs import open_packs, settings_of_packs
        from launch.model.config import family_of_checkpoint
        from launch.model.hf_checkpoint import copy_companions
        from launch.trainers.transformers_setup import make_model, make_trainer
        from task_encoders.packed_task_encoder import PackedTaskEncoder

        _check_output(output)
        if model is not None:
            options["family"] = options["family"] or family_of_checkpoint(model)
            options["processor"] = options["processor"] or str(model)
        settings, seq_length = settings_of_packs(path, **options)
        make = make_trainer(trainer, output, steps, learning_rate)
        task_encoder = PackedTaskEncoder(seq_length=seq_length, model=settings)
        if model is None:
            trained = make_model(settings, task_encoder.encoder.media_token_ids)
        else:
            trained = AutoModelForImageTextToText.from_pretrained(model)
        if trainer == "trl":
            make = partial(make, processing_class=AutoTokenizer.from_pretrained(settings.processor))
        running = make(model=trained, train_dataset=open_packs(path, task_encoder))
        _say_beginning(running.args, len(running.train_dataset), model)
        running.train()
        running.save_model()
        if running.is_world_process_zero():
            copy_companions(Path(settings.processor), Path(output))


def _check_output(output: str) -> None:
    """Refuse to replace a trained model. Raises StageError."""
    if (Path(output) / "config.json").exists():
        raise StageError(f"{output} holds a model already; give OUTPUT another name")


def _say_beginning(args: Any, num_packs: int, model: Path | None) -> None:
    """Say what a run begins with, and how often it trains the packs."""
    if model is None:
        click.echo("random weights; --model FOLDER trains a checkpoint")
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    passes = args.max_steps * batch / max(num_packs, 1)
    click.echo(f"--steps {args.max_steps}: {passes:.2f} times all {num_packs} packs")


if __name__ == "__main__":
    main()

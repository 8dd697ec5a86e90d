"""Packs in transformers' Trainer: a collator and a loader that close off its traps.

What goes wrong without a word otherwise, and is taken care of here:

- three M-RoPE rows as position_ids, or a cache left on: tokens attend across samples
  (`to_transformers_kwargs` adds the row that makes transformers cut at boundaries)
- Trainer's own collator pads and stacks; a pack is a row already
- accelerate hands every rank a part of what another rank read, or slices a batch along its first
  dimension, which of position_ids is not the batch; Energon has given each rank its own packs
- torch's DataParallel slices in the same way
- recurrent layers carry their state across samples (`isolate_segments`)

Run as a module it trains a model of any family that transformers has on packs:

    OFFLINE_PACKED_DATA=1 OFFLINE_PACKING_VQA=1 \\
        python -m launch.transformers_trainer out/packed out/checkpoint --model FOLDER --steps 2
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from megatron.energon import WorkerConfig, get_loader
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from launch.data_manifest import read_packed_data
from launch.hf_checkpoint import copy_companions
from launch.indexed_loader import IndexedLoader
from launch.model_config import (
    ELSEWHERE,
    config_of_preset,
    family_of_checkpoint,
    transformers_classes,
)
from launch.segments import isolate_segments
from launch.train import failing_in_one_line
from task_encoders.energon_samples import PackedBatch
from task_encoders.families import FAMILIES, ModelSettings
from task_encoders.indexed_dataset import IndexedPackDataset
from task_encoders.indexed_packs import find_prefix
from task_encoders.model_inputs import to_transformers_kwargs
from task_encoders.packed_dataset import get_packed_train_dataset
from task_encoders.packed_task_encoder import Qwen2VLTaskEncoder


def collate_packed(batches: Sequence[PackedBatch]) -> dict[str, Any]:
    """One `PackedBatch` as the arguments of transformers' models.

    Labels stay as they are: transformers shifts them inside, and the first of every sub-sample is
    ignored, so the number of labels that Trainer divides by is exact too.

    Raises:
        ValueError: several; k packs in one row are `micro_batch_size=k` of the packed dataset.
    """
    if len(batches) != 1:
        raise ValueError(
            f"{len(batches)} rows in a batch; set per_device_train_batch_size=1, and "
            "micro_batch_size of get_packed_train_dataset for more packs in a row"
        )
    return to_transformers_kwargs(batches[0])


class PackedRows(IterableDataset[PackedBatch]):
    """Energon's loader as a dataset that Trainer accepts."""

    def __init__(self, loader: Iterable[PackedBatch]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[PackedBatch]:
        return iter(self._loader)


class PackedTrainer(Trainer):
    """transformers' Trainer on `PackedRows`; `data_collator` is `collate_packed`.

    Raises:
        ValueError: the process sees several GPUs, or the model cannot be trained on packs (see
            `isolate_segments`).
    """

    def __init__(self, *, args: TrainingArguments, **kwargs: Any) -> None:
        if args.n_gpu > 1:
            raise ValueError(
                f"one process sees {args.n_gpu} GPUs and would slice rows over them; start with "
                f"torchrun --nproc-per-node {args.n_gpu}"
            )
        super().__init__(args=args, data_collator=collate_packed, **kwargs)
        isolate_segments(self.model)

    def call_model_init(self, trial: Any = None) -> Any:
        """As Trainer's, which makes a new model for every run of `model_init`."""
        model = super().call_model_init(trial)
        isolate_segments(model)
        return model

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This rank's rows, as Energon gives them: not prepared by accelerate."""
        return self._rows(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """As get_train_dataloader."""
        return self._rows(self.eval_dataset if eval_dataset is None else eval_dataset)

    def _rows(self, dataset: Any) -> DataLoader[Any]:
        # Energon's loader has workers of its own.
        return DataLoader(dataset, batch_size=1, num_workers=0, collate_fn=self.data_collator)


def settings_of_packs(path: Path, **options: Any) -> tuple[ModelSettings, int]:
    """Settings of the model and seq_length of packs, as their manifest says, but for options that
    are not None. Packs written by others have no manifest: the rest is the family's defaults."""
    given = {name: value for name, value in options.items() if value is not None}
    path = path if (prefix := find_prefix(path)) is None else prefix.parent
    seq_length = given.pop("seq_length", None)
    if path.is_dir() and not (path / "manifest.json").is_file():
        return ModelSettings.model_validate(given), seq_length or 2048
    data = read_packed_data(path)
    model = ModelSettings.model_validate({**data.model.model_dump(), **given})
    return model, seq_length or data.seq_length


def open_loader(path: Path, task_encoder: Qwen2VLTaskEncoder) -> Iterable[PackedBatch]:
    """This rank's rows of packs, endless. After TrainingArguments, which joins the process group,
    where ranks come from."""
    config = WorkerConfig.default_worker_config(num_workers=0)
    prefix = find_prefix(path)
    if prefix is None:
        return get_loader(get_packed_train_dataset(path, task_encoder, worker_config=config))
    rows = IndexedPackDataset(prefix, task_encoder)
    return IndexedLoader(rows, rank=config.rank, world_size=config.world_size, repeat=True)


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


def _arguments(output: str, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        logging_steps=1,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        **options,
    )


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
@click.option("--steps", default=2)
@click.option("--learning-rate", default=1e-5)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(
    path: Path,
    output: str,
    model: Path | None,
    steps: int,
    learning_rate: float,
    debug: bool,
    **options: Any,
) -> None:
    """Train a checkpoint, or a tiny random model, on the packs in PATH, and save it in OUTPUT. PATH
    is a folder, a metadataset YAML, or the prefix of packs as token ids."""
    args = _arguments(output, max_steps=steps, learning_rate=learning_rate)
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
        rows = PackedRows(open_loader(path, task_encoder))
        trainer = PackedTrainer(args=args, model=trained, train_dataset=rows)
        trainer.train()
        trainer.save_model()
        if trainer.is_world_process_zero():
            copy_companions(Path(settings.processor), Path(output))


if __name__ == "__main__":
    main()

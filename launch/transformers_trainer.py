"""Packs in transformers' Trainer: a collator and a loader that close off its traps.

What goes wrong without a word otherwise, and is taken care of here:

- three M-RoPE rows as position_ids, or a cache left on: tokens attend across samples
  (`to_transformers_kwargs` adds the row that makes transformers cut at boundaries)
- Trainer's own collator pads and stacks; a pack is a row already
- accelerate hands every rank a part of what another rank read, or slices a batch along its first
  dimension, which of position_ids is not the batch; Energon has given each rank its own packs
- torch's DataParallel slices in the same way
- recurrent layers carry their state across samples (`isolate_segments`)

Run as a module it trains a tiny model on packs:

    OFFLINE_PACKED_DATA=1 OFFLINE_PACKING_VQA=1 \\
        python -m launch.transformers_trainer out/packed out/checkpoint --steps 2
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments

from launch.segments import isolate_segments
from task_encoders.energon_samples import PackedBatch
from task_encoders.families import ModelSettings
from task_encoders.model_inputs import to_transformers_kwargs


def collate_packed(batches: Sequence[PackedBatch]) -> dict[str, Any]:
    """One `PackedBatch` as the arguments of transformers' Qwen2-VL.

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


@click.command()
@click.argument("path")
@click.argument("output")
@click.option("--steps", default=2)
@click.option("--seq-length", default=2048)
@click.option(
    "--max-pixels", default=ModelSettings().max_pixels, help="as when the packs were measured"
)
def main(path: str, output: str, steps: int, seq_length: int, max_pixels: int) -> None:
    """Train a tiny random model on the packs in PATH, and save it in OUTPUT."""
    from megatron.energon import WorkerConfig, get_loader

    from launch.model_config import ModelConfig, transformers_classes
    from task_encoders.packed_dataset import get_packed_train_dataset
    from task_encoders.packed_task_encoder import Qwen2VLTaskEncoder

    args = TrainingArguments(
        output_dir=output,
        max_steps=steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    task_encoder = Qwen2VLTaskEncoder(seq_length=seq_length, max_pixels=max_pixels)
    dataset = get_packed_train_dataset(
        path,
        task_encoder,
        # After TrainingArguments, which joins the process group: rank and world size come from it.
        worker_config=WorkerConfig.default_worker_config(num_workers=0),
    )
    config = ModelConfig()
    model = transformers_classes(config.family).model(config.build_transformers_config())
    trainer = PackedTrainer(args=args, model=model, train_dataset=PackedRows(get_loader(dataset)))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()

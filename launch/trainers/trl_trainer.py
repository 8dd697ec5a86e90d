"""Packs in TRL's SFTTrainer, which refuses to pack pictures itself.

    PackedSFTTrainer(
        args=SFTConfig("out/trained", per_device_train_batch_size=1),
        model=model, processing_class=tokenizer,
        train_dataset=PackedFolder("out/packed", task_encoder),
    )

- Data: a table of numbers, from which `collate_packed` makes rows; nothing is tokenized.
- Order, boundaries: those of `TrainsPacks`.
- Loss: Trainer's.
- Options: `max_length` has no effect: packs are cut to `seq_length` already.
- Figures: TRL's `num_tokens` counts 1 per row, the wrong dimension of M-RoPE's positions.
"""

from functools import partial
from typing import Any

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from launch.trainers.transformers_trainer import TrainsPacks
from task_encoders.loading.packed_folder import PackedFolder


class PackedSFTTrainer(TrainsPacks, SFTTrainer):
    """TRL's SFTTrainer on packs. `processing_class` is a tokenizer: with a processor TRL would
    prepare pictures itself. Raises ValueError if TRL is asked to pack again."""

    def __init__(self, *, args: SFTConfig, **kwargs: Any) -> None:
        if args.packing or args.padding_free:
            raise ValueError(
                "the data are packed already; set packing=False and padding_free=False"
            )
        args.dataset_kwargs = {"skip_prepare_dataset": True}
        super().__init__(args=args, **kwargs)

    @staticmethod
    def as_dataset(packs: PackedFolder) -> Dataset:
        """Make a table of numbers, whose rows are the items of `UnreadPacks`."""
        numbers = Dataset.from_dict({"number": range(len(packs))})
        return numbers.with_transform(partial(_with_packs, packs))


def _with_packs(packs: PackedFolder, rows: dict[str, list[int]]) -> dict[str, list[Any]]:
    return {"packs": [packs] * len(rows["number"]), **rows}

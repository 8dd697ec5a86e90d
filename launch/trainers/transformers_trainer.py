"""Packs in transformers' Trainer and in classes made from it, such as TRL's SFTTrainer.

    PackedTrainer(args=args, model=model, train_dataset=PackedFolder("out/packed", task_encoder))

Load the model with `dtype=torch.float32, attn_implementation="flash_attention_2"` and set `bf16`:
attention is then computed in autocast's dtype, without the mask of S × S that sdpa makes of a row.

- Data: k packs are one longer row (`collate_packed`). Trainer's own collator would pad it, and
  torch's DataParallel would cut it along the wrong dimension.
- Order: rank r of W trains packs r, r + W, r + 2·W, ..., as written; Trainer alone would shuffle.
  Steps of `pack.order.uniform` are kept. Resuming skips finished packs without reading them.
- Boundaries: positions restart, and nothing is cached (`token_kwargs`); recurrent layers
  (`isolate_segments`); branches of prefix trees, with `PackedTaskEncoder(trees=True)`, by
  `use_tree_attention`, whatever attention the model was loaded with.
- Loss: transformers shifts labels inside, and Trainer divides by the labels of a step.
- Weights: towers without gradients in packs without images (`ddp_find_unused_parameters`; FSDP and
  ZeRO-3 are warned of); resuming under other names when saved (Qwen2-VL, 2.5-VL).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from launch.model.prefix_trees import segment_params
from launch.model.segments import (
    check_positions,
    has_tree_attention,
    isolate_segments,
    trees_of_row,
    use_tree_attention,
)
from launch.trainers.shared import by_saved_names, warn_of_mixed_steps
from task_encoders.energon_samples import PackedBatch
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.loading.schedule import dealt_in_rows
from task_encoders.model_inputs import pixel_kwargs, token_kwargs
from task_encoders.samples import IGNORE_INDEX
from task_encoders.versions import require_supported

require_supported("transformers")


class UnreadPacks(Dataset[dict[str, Any]]):
    """Packs that `collate_packed` will read, in the loader's workers."""

    def __init__(self, packs: PackedFolder) -> None:
        self._packs = packs

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"packs": self._packs, "number": number}


def collate_packed(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join packs in a row, as arguments of transformers' models without media and prefix trees: the
    trainer makes these from `batch` on its device, as pixels in bytes are an eighth of their
    values.

    Labels stay as they are: transformers shifts them inside, and the first of every sub-sample is
    ignored, so the number of labels that Trainer divides by is exact too.
    """
    packs = items[0]["packs"]
    batch: PackedBatch = packs.batch([item["number"] for item in items])
    return {**token_kwargs(batch, trees=packs.task_encoder.trees), "batch": batch}


class TrainsPacks:
    """Mixin for Trainer and its subclasses, the first of the bases. Takes their arguments by name.

    The ranks need equal numbers of rows: accelerate repeats the first few in the last round, unless
    `dataloader_drop_last` leaves it out.

    Raises:
        ValueError: the process sees several GPUs, label smoothing is on, the model cannot be
            trained on packs (see `isolate_segments`) or on their trees (`use_tree_attention`), or
            its weights are in 16 bits and nothing keeps them in float32.
    """

    def __init__(
        self, *, args: TrainingArguments, train_dataset: PackedFolder, **kwargs: Any
    ) -> None:
        if args.n_gpu > 1:
            raise ValueError(
                f"one process sees {args.n_gpu} GPUs and would slice rows over them; start with "
                f"torchrun --nproc-per-node {args.n_gpu}"
            )
        if args.label_smoothing_factor:
            raise ValueError("Trainer would smooth unshifted labels; set label_smoothing_factor 0")
        _check_precision(args, kwargs)
        args.remove_unused_columns = False
        if args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = True
        kwargs["train_dataset"] = self._packs = train_dataset
        #: the longest row, where rows may have prefix trees
        self._longest_tree = 0
        for name in ("train_dataset", "eval_dataset"):
            if kwargs.get(name) is not None:
                encoder = kwargs[name].task_encoder
                encoder.check_trainer(type(self).__name__)
                if encoder.trees:
                    self._longest_tree = max(self._longest_tree, encoder.seq_length)
                kwargs[name] = self.as_dataset(kwargs[name])
        super().__init__(args=args, data_collator=collate_packed, **kwargs)  # type: ignore[call-arg]
        self._make_ready(self.model)  # type: ignore[attr-defined]
        # Gemma's classes say no, and yet their loss divides by the labels of the whole step.
        self.model_accepts_loss_kwargs = True
        if self.is_fsdp_enabled or is_deepspeed_zero3_enabled():  # type: ignore[attr-defined]
            warn_of_mixed_steps(train_dataset, args.world_size, args.per_device_train_batch_size)

    @staticmethod
    def as_dataset(packs: PackedFolder) -> Any:
        """Wrap packs in a form that the trainer accepts."""
        return UnreadPacks(packs)

    def call_model_init(self, trial: Any = None) -> Any:
        """Make a new model for a run of `model_init`, as Trainer does, and prepare it."""
        model = super().call_model_init(trial)  # type: ignore[misc]
        self._make_ready(model)
        return model

    def _make_ready(self, model: Any) -> None:
        """Keep samples apart in a model, and give it the attention of prefix trees, if needed."""
        isolate_segments(model)
        if self._longest_tree:
            check_positions(model.config, self._longest_tree, trees=True)
            use_tree_attention(model)

    _load_from_checkpoint = by_saved_names(Trainer._load_from_checkpoint)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Move a batch to the device, where pixels become values, and `parents` the keys that
        branches see. Trainer's hook."""
        given = super()._prepare_inputs(inputs)  # type: ignore[misc]
        prepared = {name: value for name, value in given.items() if name != "batch"}
        if "batch" in given:
            batch = given["batch"].to(self.args.device, non_blocking=True)  # type: ignore[attr-defined]
            prepared |= pixel_kwargs(batch)
            config = self.model.config  # type: ignore[attr-defined]
            if batch.parents.numel() or has_tree_attention(config):
                trees = trees_of_row(config, segment_params(batch), batch.tokens)
                prepared["row_trees"] = trees
        return prepared

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        args: TrainingArguments = self.args  # type: ignore[attr-defined]
        size = args.per_device_train_batch_size
        if size > 1 and self._packs.uniform_ranks:
            return dealt_in_rows(len(self._packs), args.world_size, size).tolist()
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)  # type: ignore[attr-defined]


def _check_precision(args: TrainingArguments, given: Mapping[str, Any]) -> None:
    """Refuse 16-bit weights that the optimizer updates in place: near .02 they are 1e-4 apart, so
    that a step of 1e-5 changes nothing."""
    model = given.get("model")
    own_optimizer = given.get("optimizers", (None, None))[0] or given.get(
        "optimizer_cls_and_kwargs"
    )
    if model is None or args.deepspeed or own_optimizer:
        return
    short = [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and weight.dtype in (torch.bfloat16, torch.float16)
    ]
    if short:
        raise ValueError(
            f"{short[0]} and {len(short) - 1} other weights are trained in 16 bits, which small "
            "steps do not change; load the model with dtype=torch.float32, and set bf16=True to "
            "compute in bfloat16"
        )


class PackedTrainer(TrainsPacks, Trainer):
    """Trainer on packs. In training, logits are made only where there are labels."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute Trainer's loss. Custom losses, liger's kernel and metrics need the whole row."""
        is_own = self.compute_loss_func is not None or self.args.use_liger_kernel
        if model.training and not is_own:
            inputs = where_labelled(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


def where_labelled(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Limit the logits of transformers' models to the tokens before labels, with the same loss: a
    vocabulary of 152,000 for 8,192 tokens is 5 GB in float32. The models shift labels inside, in
    every version, so one token without a label ends the row."""
    labels = inputs["labels"]
    before = (labels[0, 1:] != IGNORE_INDEX).nonzero()[:, 0]  # labels [-100, 7, -100, 9] -> [0, 2]
    kept = F.pad(before, (0, 1), value=labels.shape[1] - 1)  # [0, 2, 3]
    shifted_inside = F.pad(labels[:, before + 1], (1, 0), value=IGNORE_INDEX)  # [-100, 7, 9]
    return {**inputs, "logits_to_keep": kept, "labels": shifted_inside}

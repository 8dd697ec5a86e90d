"""Packs in LLaMA-Factory, in place of its `neat_packing`; docs/recipes.md has a whole recipe.

    OFFLINE_PACKED_DATA=1 DISABLE_VERSION_CHECK=1 torchrun --nproc-per-node 8 \\
        -m launch.trainers.llama_factory train.yaml

- Data: `dataset: out/packed`, and `eval_dataset: out/packed` for its val split; other datasets are
  left to LLaMA-Factory. Nothing is tokenized or packed at the start.
- Order, boundaries: those of `TrainsPacks`.
- Loss: divided by the labels of a whole step, where LLaMA-Factory gives every micro batch of a
  model with images equal weight.
- Options: `cutoff_len`, the limits of pixels and the text of the template have no effect, as packs
  keep what they were measured with.
- Versions: LLaMA-Factory 0.9.5 refuses transformers above 5.6 unless told not to check; packs need
  a newer version.
"""

from functools import partial
from typing import Any

from llamafactory.train import tuner
from llamafactory.train.sft import workflow
from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

from launch.trainers.shared import open_as_measured
from launch.trainers.transformers_trainer import TrainsPacks
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.storage.paths import path_of

#: Options that choose, cut or encode samples, which packing has done; by group of arguments.
_DONE_BEFORE = {
    "data": (
        *("packing", "neat_packing", "streaming", "max_samples", "val_size", "tokenized_path"),
        *("train_on_prompt", "mask_history", "default_system", "tool_format", "interleave_probs"),
        "eval_on_each_dataset",
    ),
    "model": ("shift_attn", "add_tokens", "add_special_tokens"),
    "training": ("predict_with_generate", "do_predict"),
    "finetuning": ("use_asft_loss", "include_effective_tokens_per_second"),
}


class PackedSeq2SeqTrainer(TrainsPacks, CustomSeq2SeqTrainer):
    """LLaMA-Factory's trainer on packs. The loss is divided by the labels of a whole step;
    LLaMA-Factory gives every micro batch of a model with images equal weight."""


def is_packed(name: str) -> bool:
    """Tell whether a dataset's name is a folder of packs, or a metadataset YAML that blends
    several."""
    path = path_of(name)
    return (path / ".nv-meta").is_dir() or (path.suffix in (".yaml", ".yml") and path.is_file())


def prepare(model_args: Any, data_args: Any, training_args: Any, finetuning_args: Any) -> None:
    """Set options that packs need, and check the others. Raises ValueError if packs are mixed with
    other datasets, would not be trained on, or would be changed by an option; or weights are
    trained in 16 bits."""
    datasets = [*(data_args.dataset or []), *(data_args.eval_dataset or [])]
    path = next(filter(is_packed, datasets))
    if len(data_args.dataset or []) != 1 or len(data_args.eval_dataset or []) > 1:
        raise ValueError(f"{path} holds packs, which no other data joins; name one dataset")
    if not all(map(is_packed, datasets)):
        raise ValueError(f"{path} holds packs; give packs as both dataset and eval_dataset")
    if not training_args.do_train:
        raise ValueError(f"{path} holds packs, evaluated during training only; set do_train: true")
    if finetuning_args.pure_bf16:
        raise ValueError(
            "pure_bf16 keeps 16-bit weights, which small steps do not change; set bf16: true"
        )
    given = zip(
        (data_args, model_args, training_args, finetuning_args), _DONE_BEFORE.values(), strict=True
    )
    refused = [name for arguments, names in given for name in names if getattr(arguments, name)]
    if refused:
        raise ValueError(f"{path} is packed and tokenized already; leave out {', '.join(refused)}")
    if not (finetuning_args.freeze_vision_tower and finetuning_args.freeze_multi_modal_projector):
        # A pack without images leaves these without gradients; LLaMA-Factory adds an image.
        training_args.ddp_find_unused_parameters = True
        model_args.use_reentrant_gc = False  # DDP cannot do both
    elif training_args.ddp_find_unused_parameters is None:
        training_args.ddp_find_unused_parameters = False  # our trainer's default is for towers


def get_dataset(template: Any, model_args: Any, data_args: Any, *args: Any, **options: Any) -> Any:
    """Open LLaMA-Factory's datasets, or packs. Raises as `open_as_measured`."""
    if not is_packed((data_args.dataset or [""])[0]):
        return _llama_factorys_dataset(template, model_args, data_args, *args, **options)
    open_packs = partial(
        open_as_measured,
        trainer="LLaMA-Factory",
        processor=model_args.model_name_or_path,
        pixel_transport="uint8",
        trees=True,
    )
    opened = {"train_dataset": open_packs(data_args.dataset[0])[0]}
    if data_args.eval_dataset:
        opened["eval_dataset"] = open_packs(data_args.eval_dataset[0], split="val")[0]
    return opened


def make_trainer(*, train_dataset: Any = None, **options: Any) -> CustomSeq2SeqTrainer:
    """Make LLaMA-Factory's trainer, or the trainer on packs."""
    if not isinstance(train_dataset, PackedFolder):
        return CustomSeq2SeqTrainer(train_dataset=train_dataset, **options)
    del options["data_collator"]  # it pads, and prepares images again
    return PackedSeq2SeqTrainer(train_dataset=train_dataset, **options)


def run_sft(
    model_args: Any, data_args: Any, training_args: Any, finetuning_args: Any, *args: Any
) -> None:
    """Run LLaMA-Factory's stage `sft`, which may be on packs. Raises as `prepare`."""
    if any(map(is_packed, [*(data_args.dataset or []), *(data_args.eval_dataset or [])])):
        prepare(model_args, data_args, training_args, finetuning_args)
    _llama_factorys_stage(model_args, data_args, training_args, finetuning_args, *args)


_llama_factorys_dataset, workflow.get_dataset = workflow.get_dataset, get_dataset
_llama_factorys_stage, tuner.run_sft = tuner.run_sft, run_sft
workflow.CustomSeq2SeqTrainer = make_trainer


if __name__ == "__main__":
    tuner.run_exp()

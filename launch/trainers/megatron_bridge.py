"""Packs in Megatron-Bridge: its own recipes for Qwen2.5-VL and Qwen3-VL, trained on packs.

    OFFLINE_PACKED_DATA=1 torchrun --nproc-per-node 8 -m launch.trainers.megatron_bridge \\
        qwen25_vl_7b_sft_config out/packed checkpoint.pretrained_checkpoint=FOLDER

In a script of your own: `finetune(on_packs(recipe(), "out/packed"), vlm_step.forward_step)`, also
for Qwen3-VL: Bridge's `qwen3_vl_step` refuses packs. `train.global_batch_size` counts packs. They
keep the order that they were written in, and Bridge's checkpoints keep the place.
"""

from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import click
from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider

from launch.data.packed_data import read_packed_data
from launch.trainers.megatron_bridge_data import build_iterators
from task_encoders.model_inputs import required_pad_multiple


@dataclass(kw_only=True)
class PacksConfig(DatasetProvider):
    """A recipe's `dataset` section, which `on_packs` makes.

    Args:
        path: a folder of packs, or a metadataset YAML that blends several.
        pad_to_max_length: Bridge sets it where it needs rows of one length.
    """

    path: str
    dataloader_type: str = "external"
    pad_to_max_length: bool = False

    def finalize(self) -> None:
        """Bridge's hook, after overrides. Raises ValueError where they contradict the packs."""
        super().finalize()
        for name, (value, reason) in _needed(self.recipe).items():
            found = attrgetter(name)(self.recipe)
            if found != value:
                raise ValueError(f"{name} is {found}; set {value}: {reason}")

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any, Any, None]:
        """Bridge's hook."""
        model = self.recipe.model
        pad_multiple = required_pad_multiple(
            context_parallel=model.context_parallel_size,
            tensor_parallel=model.tensor_model_parallel_size,
            sequence_parallel=model.sequence_parallel,
        )
        train, validation = build_iterators(
            self.path,
            model,
            context,
            num_workers=self.num_workers,
            pad_multiple=pad_multiple,
            pad_to_seq_length=self.pad_to_max_length,
        )
        return train, validation, None


def _needed(recipe: Any) -> dict[str, tuple[Any, str]]:
    """What packs need of a recipe: by a field's name, its value and why."""
    data = read_packed_data(Path(recipe.dataset.path))
    full, unequal = "a pack is a full row", "rows differ in their number of labels"
    needed: dict[str, tuple[Any, str]] = {
        "model.seq_length": (data.seq_length, f"that of {recipe.dataset.path}"),
        "train.micro_batch_size": (1, full),
        "validation.eval_micro_batch_size": (1, full),
        "model.calculate_per_token_loss": (True, unequal),
        "ddp.average_in_collective": (False, unequal),
    }
    if not data.num_val_packs:
        needed["validation.eval_iters"] = (0, f"{recipe.dataset.path} has no val split")
    if isinstance(recipe.model, Qwen25VLModelProvider):
        needed["model.context_parallel_size"] = (1, "Bridge's Qwen2.5-VL does not cut rows")
    return needed


def on_packs(recipe: Any, path: str | Path) -> Any:
    """One of Bridge's recipes (a ConfigContainer), changed to what packs need. Overrides follow."""
    recipe.dataset = PacksConfig(path=str(path))
    recipe.dataset.recipe = recipe  # not a field: Bridge writes those to its checkpoints
    for name, (value, _) in _needed(recipe).items():
        section, _, field = name.partition(".")
        setattr(getattr(recipe, section), field, value)
    return recipe


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("recipe")
@click.argument("path")
@click.argument("overrides", nargs=-1)
def main(recipe: str, path: str, overrides: tuple[str, ...]) -> None:
    """Train RECIPE of Bridge on the packs in PATH, with OVERRIDES such as train.train_iters=9."""
    from megatron.bridge import recipes
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
    from megatron.bridge.training.vlm_step import forward_step

    if not hasattr(recipes, recipe):
        raise click.BadParameter(f"megatron.bridge.recipes has no {recipe}")
    config = on_packs(getattr(recipes, recipe)(), path)
    finetune(process_config_with_overrides(config, cli_overrides=list(overrides)), forward_step)


if __name__ == "__main__":
    # Under its own name, which Bridge writes to its checkpoints.
    from launch.trainers import megatron_bridge

    megatron_bridge.main()

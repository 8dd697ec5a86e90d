"""Packs in Megatron-Bridge: its own recipes for Qwen2.5-VL, Qwen3-VL and Qwen3.5, on packs.

    OFFLINE_PACKED_DATA=1 torchrun --nproc-per-node 8 -m launch.trainers.megatron_bridge \\
        qwen25_vl_7b_sft_config out/packed checkpoint.pretrained_checkpoint=FOLDER

In your own script: `finetune(on_packs(recipe(), "out/packed"), vlm_step.forward_step)`, for all
recipes: Bridge's `qwen3_vl_step` refuses packs.

- Data: a `DatasetProvider` in place of the recipe's; every rank reads for itself.
- Order: as written; Bridge's checkpoints keep the place. `train.global_batch_size` counts packs.
- Boundaries: `cu_seqlens` of a row, with M-RoPE's positions.
- Loss: labels shifted; the mean over the labels of a step (`calculate_per_token_loss`).
- Options: those of `_needed` are set; overrides that contradict the packs are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import click
import torch
from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from megatron.bridge.models.qwen_vl import (
    Qwen3VLModelProvider,
    Qwen3VLMoEModelProvider,
    Qwen25VLModelProvider,
    Qwen35VLModelProvider,
    Qwen35VLMoEModelProvider,
)
from megatron.bridge.training.utils.packed_seq_utils import unpack_mcore_thd_tensor_for_position_ids
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from megatron.energon import WorkerConfig

from launch.data.packed_data import read_packed_data
from launch.loop.loss import shift_labels
from launch.trainers.megatron_lm import DataIterator
from task_encoders.energon_samples import PackedBatch
from task_encoders.families import change_options
from task_encoders.families.qwen2_vl import QWEN2_5_VL
from task_encoders.families.qwen3_vl import QWEN3_5, QWEN3_VL
from task_encoders.loading.packed_dataset import (
    get_packed_loader,
    get_packed_train_dataset,
    get_packed_val_dataset,
)
from task_encoders.model_inputs import (
    look_up,
    media_kwargs,
    required_pad_multiple,
    to_packed_seq_params,
)
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.samples import IGNORE_INDEX

#: Family of a provider's packs. Packs of another family with the same lengths get its positions.
_FAMILIES: Final[Mapping[type, str]] = {
    Qwen25VLModelProvider: QWEN2_5_VL.name,
    Qwen3VLModelProvider: QWEN3_VL.name,
    Qwen3VLMoEModelProvider: QWEN3_VL.name,
    Qwen35VLModelProvider: QWEN3_5.name,
    Qwen35VLMoEModelProvider: QWEN3_5.name,
}
_BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


@dataclass
class VisualBytes(GenericVisualInputs):
    """Pixels as bytes, which become values when Bridge's step asks for the model's arguments: on
    the GPU, and on the pipeline stages that take them."""

    #: (T, C, 256), the values of a batch's bytes for each frame that a picture stands for; C = 0:
    #: pixels are values already
    tables: torch.Tensor | None = None

    def normalized_for_model(self) -> dict[str, torch.Tensor]:
        """Return the model's arguments, pixels as values. Bridge's hook."""
        given: dict[str, torch.Tensor] = super().normalized_for_model()
        tables = given.pop("tables")
        for name, repeats in (("pixel_values", len(tables)), ("pixel_values_videos", 1)):
            if tables.numel() and name in given:
                given[name] = look_up(given[name], tables[0], repeats)
        return given


def to_vlm_batch(batch: PackedBatch) -> dict[str, Any]:
    """Convert a row to the form in which Bridge's own collator packs the same samples, with
    M-RoPE's positions.

    Returns:
        tokens, labels (shifted) and loss_mask (1, S), position_ids (3, 1, S), the boundaries
        (P + 1,) int32, boundaries of padded samples only if there is padding, max_seqlen_q/kv ()
        int32 on the host. Bridge's collator gives positions that count tokens, (1, S), from which
        its models make M-RoPE's on the GPU, each step.
    """
    videos = batch.pixel_values_videos, batch.video_grid_thw
    labels = shift_labels(batch.labels)
    params = to_packed_seq_params(batch)
    boundaries = {name: getattr(params, name) for name in _BOUNDARIES}
    longest = torch.tensor(params.max_seqlen_q, dtype=torch.int32)
    return {
        "tokens": batch.tokens,
        "labels": labels,
        "loss_mask": (labels != IGNORE_INDEX).float(),
        "attention_mask": None,
        "position_ids": batch.position_ids,
        **{name: value for name, value in boundaries.items() if value is not None},
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "visual_inputs": VisualBytes(
            **media_kwargs(batch.imgs, batch.image_grid_thw, *videos),
            tables=batch.byte_values.expand(batch.frame_repeats, -1, -1),
        ),
    }


def take_positions(chunks: list[Any]) -> list[Any]:
    """Make Bridge's Qwen2.5-VL take the positions that it is given. It would ask transformers,
    which counts the time of a video in whole seconds per step. A hook of its provider."""

    def take(model: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        params = kwargs["packed_seq_params"]
        axes = [
            unpack_mcore_thd_tensor_for_position_ids(axis, params)[0]
            for axis in kwargs["position_ids"]
        ]
        model.get_rope_index = lambda *_, **__: (torch.stack(axes), None)

    for model in chunks:
        model.register_forward_pre_hook(take, with_kwargs=True)
    return chunks


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
        """Check the recipe after overrides. Bridge's hook. Raises ValueError if they contradict the
        packs."""
        super().finalize()
        for name, (value, reason) in _needed(self.recipe).items():
            found = attrgetter(name)(self.recipe)
            if found != value:
                raise ValueError(f"{name} is {found}; set {value}: {reason}")

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any, Any, None]:
        """Build training and validation data, if Bridge asks for samples; on every rank, as each of
        Bridge's ranks reads for itself. Bridge's hook.

        Raises:
            PackingSettingsError: the environment or the parallel sizes contradict the packs.
            ValueError: the packs are of another family than the model, or the model takes none.
        """
        data, model = read_packed_data(self.path), self.recipe.model
        family = next((name for kind, name in _FAMILIES.items() if isinstance(model, kind)), None)
        if family is None:
            names = ", ".join(kind.__name__ for kind in _FAMILIES)
            raise ValueError(f"{type(model).__name__} does not take packs; those that do: {names}")
        task_encoder = PackedTaskEncoder(
            seq_length=data.seq_length,
            model=change_options(data.model, family=family),
            pixel_transport="uint8",
            pad_multiple=required_pad_multiple(
                context_parallel=model.context_parallel_size,
                tensor_parallel=model.tensor_model_parallel_size,
                sequence_parallel=model.sequence_parallel,
            ),
            pad_to_seq_length=self.pad_to_max_length,
        )
        task_encoder.check_trainer("Megatron-Bridge")
        ranks, count = context.pg_collection.dp, self.num_workers
        workers = WorkerConfig(rank=ranks.rank(), world_size=ranks.size(), num_workers=count)

        def iterator(get_dataset: Any, num_samples: int) -> DataIterator | None:
            if not num_samples:
                return None
            dataset = get_dataset(self.path, task_encoder, worker_config=workers)
            return DataIterator(get_packed_loader(dataset), to_vlm_batch)

        return (
            iterator(get_packed_train_dataset, context.train_samples),
            iterator(get_packed_val_dataset, context.valid_samples),
            None,
        )


def _needed(recipe: Any) -> dict[str, tuple[Any, str]]:
    """List the fields of a recipe that packs need: by name, the value and the reason."""
    data = read_packed_data(recipe.dataset.path)
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
    """Change one of Bridge's recipes (a ConfigContainer) for packs. Overrides may follow."""
    recipe.dataset = PacksConfig(path=str(path))
    recipe.dataset.recipe = recipe  # not a field: Bridge writes those to its checkpoints
    for name, (value, _) in _needed(recipe).items():
        section, _, field = name.partition(".")
        setattr(getattr(recipe, section), field, value)
    if isinstance(recipe.model, Qwen25VLModelProvider):
        recipe.model.register_pre_wrap_hook(take_positions)
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

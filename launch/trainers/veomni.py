"""Packs in VeOmni, in place of its dynamic batches; docs/recipes.md has a whole recipe.

    OFFLINE_PACKED_DATA=1 torchrun --nproc-per-node 8 -m launch.trainers.veomni recipe.yaml \\
        --data.train_path out/packed --train.micro_batch_size 1 --train.dyn_bsz false

- Data: a `train_path` that is not a folder of packs is left to VeOmni; `micro_batch_size: k` puts k
  packs into one row.
- Order: rank r of W trains packs r, r + W, ..., as written; VeOmni alone would always shuffle.
- Boundaries: VeOmni finds them in positions, which begin at 0 in every sample.
- Loss: VeOmni shifts the labels itself.
- Options: `data.mm_configs`, `max_seq_len` and `chat_template` have no effect: packs keep what they
  were measured with.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from veomni.arguments import parse_args
from veomni.data.data_loader import DATALOADER_REGISTRY
from veomni.data.dataset import DATASET_REGISTRY
from veomni.distributed.parallel_state import get_parallel_state

from launch.trainers.shared import PacksAsItems, warn_of_mixed_steps
from task_encoders.model_inputs import MEDIA_INPUTS, to_transformers_kwargs, token_types
from task_encoders.storage.paths import path_of


class VeOmniPacks(PacksAsItems):
    """Packs as VeOmni has samples. It finds the boundaries in a pack's positions, which begin at 0
    in every sample, and shifts the labels itself."""

    def __getitem__(self, number: int) -> list[dict[str, torch.Tensor]]:
        batch = self.packs.batch([number])
        row = to_transformers_kwargs(batch)
        tokens = batch.tokens[0]
        types = token_types(tokens, self.token_ids)
        positions = batch.position_ids[:, 0]
        pack = {
            "input_ids": tokens.masked_fill(types > 0, 0),  # it finds media by their masks
            "attention_mask": torch.ones_like(tokens),
            "labels": batch.labels[0],
            "position_ids": positions[0] if len(positions) == 1 else positions,
            "image_mask": types == 1,
            "video_mask": types == 2,
        }
        return [pack | {name: row[name] for name in MEDIA_INPUTS if name in row}]


def build_dataset(kind: str, build: Callable[..., Any], *, train_path: str, **options: Any) -> Any:
    """Open packs, or build another dataset as VeOmni does. Raises ValueError if VeOmni would take
    the packs for a stream, and count the steps of an epoch wrong; or as `open_as_measured`.

    Args:
        kind: VeOmni's `datasets_type`.
        build: VeOmni's own function for it.
    """
    path = path_of(train_path)
    if not (path / ".nv-meta").is_dir():
        return build(train_path=train_path, **options)
    if kind != "mapping":
        raise ValueError(f"{path} holds packs; set data.datasets_type mapping, not {kind}")
    processor = getattr(options.get("transform"), "keywords", {}).get("processor")
    model = processor.tokenizer.name_or_path if processor else None
    return VeOmniPacks(path, "VeOmni", processor=model or None)


def build_loader(dataset: Any, **options: Any) -> Any:
    """Build VeOmni's loader, in the packs' own order. Raises ValueError if samples would be packed
    again."""
    if isinstance(dataset, VeOmniPacks):
        if options.get("dyn_bsz", True):
            raise ValueError("the data are packed already; set train.dyn_bsz=false")
        options["shuffle"] = False
        warn_of_mixed_steps(dataset.packs, get_parallel_state().dp_size)
    return _veomnis_loader(dataset=dataset, **options)


for name, own in DATASET_REGISTRY.items():
    DATASET_REGISTRY.register(name, partial(build_dataset, name, own))
_veomnis_loader = DATALOADER_REGISTRY["native"]
DATALOADER_REGISTRY.register("native", build_loader)


if __name__ == "__main__":
    from veomni.trainer.vlm_trainer import VeOmniVLMArguments, VLMTrainer

    VLMTrainer(parse_args(VeOmniVLMArguments)).train()

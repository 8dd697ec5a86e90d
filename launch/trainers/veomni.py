"""Packs in VeOmni, in place of its dynamic batches:

    OFFLINE_PACKED_DATA=1 torchrun -m launch.trainers.veomni recipe.yaml \\
        --data.train_path out/packed --train.micro_batch_size 1 --train.dyn_bsz false

The rest of the recipe is VeOmni's. A `train_path` that is no folder of packs goes VeOmni's way.
VeOmni always shuffles; packs keep the order that they were written in: rank r of W trains packs
r, r + W, ... `micro_batch_size: k` puts k packs into one row. `data.mm_configs` and
`data.chat_template` have no effect: packs keep what they were measured with.
"""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from veomni.arguments import parse_args
from veomni.data.data_loader import DATALOADER_REGISTRY
from veomni.data.dataset import DATASET_REGISTRY

from launch.open_packs import settings_of_packs
from task_encoders.model_inputs import to_transformers_kwargs, token_types
from task_encoders.packed_folder import PackedFolder
from task_encoders.packed_task_encoder import Qwen2VLTaskEncoder

_MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


class VeOmniPacks(Dataset[list[dict[str, torch.Tensor]]]):
    """Packs as VeOmni has samples: it finds the boundaries in a pack's positions, which begin at 0
    in every sample, and shifts the labels itself."""

    def __init__(self, packs: PackedFolder, task_encoder: Qwen2VLTaskEncoder) -> None:
        self._packs = packs
        self._token_ids = task_encoder.encoder.media_token_ids

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, number: int) -> list[dict[str, torch.Tensor]]:
        batch = self._packs.batch([number])
        row = to_transformers_kwargs(batch)
        tokens = batch.tokens[0]
        types = token_types(tokens, self._token_ids)
        positions = batch.position_ids[:, 0]
        pack = {
            "input_ids": tokens.masked_fill(types > 0, 0),  # it finds media by their masks
            "attention_mask": torch.ones_like(tokens),
            "labels": batch.labels[0],
            "position_ids": positions[0] if len(positions) == 1 else positions,
            "image_mask": types == 1,
            "video_mask": types == 2,
        }
        return [pack | {name: row[name] for name in _MEDIA if name in row}]


_veomnis_dataset = DATASET_REGISTRY["mapping"]
_veomnis_loader = DATALOADER_REGISTRY["native"]


def build_dataset(train_path: str, **options: Any) -> Any:
    """Packs, if the path is a folder of them."""
    path = Path(train_path)
    if not (path / ".nv-meta").is_dir():
        return _veomnis_dataset(train_path=train_path, **options)
    settings, seq_length = settings_of_packs(path)
    task_encoder = Qwen2VLTaskEncoder(seq_length=seq_length, model=settings)
    return VeOmniPacks(PackedFolder(path, task_encoder), task_encoder)


def build_loader(dataset: Any, **options: Any) -> Any:
    """VeOmni's loader, in the packs' own order.

    Raises:
        ValueError: samples are to be packed again.
    """
    if isinstance(dataset, VeOmniPacks):
        if options.get("dyn_bsz", True):
            raise ValueError("packs are full already; set train.dyn_bsz false")
        options["shuffle"] = False
    return _veomnis_loader(dataset=dataset, **options)


DATASET_REGISTRY.register("mapping", build_dataset)
DATALOADER_REGISTRY.register("native", build_loader)


if __name__ == "__main__":
    from veomni.trainer.vlm_trainer import VeOmniVLMArguments, VLMTrainer

    VLMTrainer(parse_args(VeOmniVLMArguments)).train()

"""Packs in NeMo AutoModel, in place of its own packing. In a recipe for vision models:

    dataset:
      _target_: launch.trainers.automodel.PacksConfig
      path: out/packed
    packed_sequence: {pack_size: 8192}
    dataloader: {shuffle: false, drop_last: true}

    OFFLINE_PACKED_DATA=1 automodel recipe.yaml

AutoModel's own collator, loader and attention take it from there. No length is estimated and no
sample replaced or dropped. `shuffle: false` keeps the order that packs were written in; rank r of W
trains packs r, r + W, ... Validation: `split: val`, under `validation_dataset`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nemo_automodel.components.datasets.vlm.neat_packing_vlm import NeatPackConfig
from torch.utils.data import Dataset

from launch.open_packs import settings_of_packs
from task_encoders.model_inputs import to_transformers_kwargs, token_types
from task_encoders.packed_folder import PackedFolder
from task_encoders.packed_task_encoder import Qwen2VLTaskEncoder

#: Names of media, as transformers' models take them; None in packs without.
_MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


class AutoModelPacks(Dataset[dict[str, Any]]):
    """Packs as AutoModel's `PackedDatasetWrapper` has them: labels shifted within every sample,
    whose last token is left out."""

    def __init__(self, packs: PackedFolder, token_ids: Mapping[str, int]) -> None:
        self._packs = packs
        self._token_ids = token_ids

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, number: int) -> dict[str, Any]:
        batch = self._packs.batch([number])
        row = to_transformers_kwargs(batch)
        tokens, real = batch.tokens[0], ~batch.attn_mask[0]
        lengths = batch.cu_lengths[0].diff()
        sample = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), lengths)
        # every token with another one behind it in its sample
        kept = torch.zeros_like(real)
        kept[:-1] = real[:-1] & real[1:] & (sample[:-1] == sample[1:])
        # of segments that are not padding only
        counts = [count for count in torch.bincount(sample[kept]).tolist() if count]
        positions = batch.position_ids[:, 0, kept]
        return {
            "input_ids": tokens[kept],
            "labels": batch.labels[0].roll(-1)[kept],
            "attention_mask": torch.repeat_interleave(
                torch.arange(1, len(counts) + 1), torch.tensor(counts)
            ),
            "position_ids": positions[0] if len(positions) == 1 else positions,
            "mm_token_type_ids": token_types(tokens[kept], self._token_ids),
            "seq_lens": counts,
            "seq_lens_padded": counts,
            "n_images": len(batch.image_grid_thw),
            "n_videos": len(batch.video_grid_thw),
            **{name: row.get(name) for name in _MEDIA},
        }


@dataclass
class PacksConfig:
    """A recipe's `dataset` section.

    Args:
        path: a folder of packs.
        split: train, val or test.
        processor: the model's, where its folder is not the one that packs were measured with.
    """

    path: str
    split: str = "train"
    processor: str | None = None

    def build(self) -> AutoModelPacks:
        """Raises PackingSettingsError where the environment or the processor contradict packs."""
        settings, seq_length = settings_of_packs(Path(self.path), processor=self.processor)
        task_encoder = Qwen2VLTaskEncoder(seq_length=seq_length, model=settings)
        packs = PackedFolder(self.path, task_encoder, split=self.split)
        return AutoModelPacks(packs, task_encoder.encoder.media_token_ids)


_automodels_own = NeatPackConfig.build


def _build(config: NeatPackConfig, *, ds_raw: Any = None, cp_size: int = 1, **options: Any) -> Any:
    """Packs stay as they are; anything else goes AutoModel's way."""
    if not isinstance(ds_raw, AutoModelPacks):
        return _automodels_own(config, ds_raw=ds_raw, cp_size=cp_size, **options)
    if cp_size > 1 and config.packing_format == "thd":
        raise ValueError(
            f"packing_format thd with context parallelism {cp_size} needs samples padded by "
            "AutoModel; set packing_format: neat"
        )
    return ds_raw


NeatPackConfig.build = _build

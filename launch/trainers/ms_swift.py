"""Packs in ms-swift and Megatron-SWIFT, in place of their own packing. This file is a plugin.

    OFFLINE_PACKED_DATA=1 swift sft --external_plugins launch/trainers/ms_swift.py \\
        --model FOLDER --dataset out/packed --packing true --attn_impl flash_attn \\
        --train_dataloader_shuffle false --per_device_train_batch_size 1

- Data: `--dataset` is a folder of packs, `--val_dataset` a folder whose val split is evaluated;
  other data are left to ms-swift. Its collator joins the samples of a pack.
- Order: as written, by `--train_dataloader_shuffle false`; rank r of W trains packs r, r + W, ...,
  and what does not divide evenly at the end of an epoch is left out by ms-swift.
- Boundaries: by `--packing true`, from positions; recurrent layers need its kernels.
- Loss: ms-swift's, of the packs' labels.
- Options: resuming finds the weights of Qwen2-VL and Qwen2.5-VL, which Trainer alone does not.
"""

from typing import Any

import torch
from swift.pipelines.train.sft import SwiftSft
from transformers import Trainer

from launch.trainers.shared import PacksAsItems, by_saved_names, require_kernels
from task_encoders.concatenate import split_row
from task_encoders.model_inputs import media_kwargs, token_types
from task_encoders.storage.paths import path_of


class SwiftPacks(PacksAsItems):
    """Packs as ms-swift's `PackingDataset` has them: lists of encoded samples, which its collator
    concatenates."""

    def __getitem__(self, number: int) -> list[dict[str, Any]]:
        samples = []
        for row in split_row(self.packs.row(number).row):
            tokens = row.tokens
            sample = {
                "input_ids": tokens.tolist(),
                "labels": row.labels.tolist(),
                "length": len(tokens),
                "mm_token_type_ids": token_types(tokens, self.token_ids),
            }
            if len(row.position_ids) == 3:  # others count tokens, which ms-swift does itself
                sample["position_ids"] = row.position_ids[:, None]
            videos = row.pixel_values_videos, row.video_grid_thw
            media = row.pixel_values, row.image_grid_thw, *videos
            samples.append(sample | media_kwargs(*media, layout=row.image_layout))
        return samples


def positions_of_packs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Replace a template's `_get_position_ids`, which would compute a sample's positions again,
    for Qwen2.5-VL's videos from a time that packs do not keep. With a first row for attention,
    (4, 1, S); padding of context parallelism continues them."""
    length, positions = inputs["input_ids"].shape[1], inputs["position_ids"]
    after = positions[:, :, -1:] + 1 + torch.arange(length - positions.shape[2])
    positions = torch.cat([positions, after], dim=2)
    return {"position_ids": torch.cat([torch.arange(length)[None, None], positions])}


def packs_for(pipeline: SwiftSft, path: str, split: str) -> SwiftPacks:
    """Open the packs at a path for a pipeline that has its template. Raises ValueError if the
    pipeline does not pack, so that attention would cross samples, or as `require_kernels`; and
    PackingSettingsError as `open_as_measured`."""
    args = pipeline.args
    if not args.packing:
        raise ValueError(f"{path} holds packs; set --packing true")
    pipeline.template.packing = pipeline.template.padding_free = True
    pipeline.template._get_position_ids = positions_of_packs
    packs = SwiftPacks(path, "ms-swift", split=split, processor=args.model_dir)
    require_kernels(packs.family, "ms-swift", "fla.modules.convolution", "fla.ops.gated_delta_rule")
    return packs


_swifts_own = SwiftSft._prepare_dataset


def _prepare_dataset(pipeline: SwiftSft) -> list[Any]:
    """Prepare the train and val datasets. Raises ValueError if packs are mixed with other datasets,
    or would train in another order."""
    args = pipeline.args
    packed = [path for path in args.dataset if (path_of(path) / ".nv-meta").is_dir()]
    if not packed:
        return _swifts_own(pipeline)
    if len(args.dataset) > 1:
        raise ValueError(f"{packed[0]} holds packs, which train alone; give one --dataset")
    if args.train_dataloader_shuffle or args.group_by_length:
        raise ValueError(
            f"{packed[0]} holds packs in their training order; set --train_dataloader_shuffle "
            "false, and leave out --group_by_length"
        )
    validation = packs_for(pipeline, args.val_dataset[0], "val") if args.val_dataset else None
    return [packs_for(pipeline, args.dataset[0], "train"), validation]


SwiftSft._prepare_dataset = _prepare_dataset
Trainer._load_from_checkpoint = by_saved_names(Trainer._load_from_checkpoint)

"""Rows for ranks that must run the same layers together, as sharded weights demand: one rank whose
row has no picture would leave the others waiting in the vision tower.

    rank 0   [text image text]                     [text image text]
    rank 1   [text]                           ->   [text][image]       the last segment is padding
    rank 2   nothing: its data ended          ->   [image]             the same
"""

from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from task_encoders.energon_samples import PackedBatch, empty_batch
from task_encoders.families.base.family import Family
from task_encoders.model_inputs import pad_batch


class EvenRows:
    """Padding of a rank's row, so that all ranks have a row while any has one, with an image if any
    of these rows has an image, and likewise a video. Added tokens are padding without loss.

    Args:
        family: the model's family.
        hf_config: transformers' config of the whole model.
    """

    def __init__(self, family: Family, hf_config: Any, device: torch.device) -> None:
        self._device = device
        blank = family.build.blank_image(hf_config)
        self._medium = torch.zeros(blank.shape, device=device)
        self._grid = torch.tensor([blank.grid], dtype=torch.int32, device=device)
        self._num_tokens = blank.num_tokens
        self._num_positions = family.build.POSITION_ROWS
        self._layout = family.build.IMAGE_LAYOUT
        self._token_ids = [hf_config.image_token_id, getattr(hf_config, "video_token_id", None)]

    def __call__(self, row: PackedBatch | None) -> PackedBatch | None:
        """Pad a row, pixels as values; None: this rank's data ended. A collective."""
        has_own = row is not None
        if row is None:
            row = empty_batch(self._num_positions).to(self._device)
        own = [has_own, len(row.image_grid_thw) > 0, len(row.video_grid_thw) > 0]
        of_any = torch.tensor(own, dtype=torch.int32, device=self._device)
        distributed.all_reduce(of_any, op=distributed.ReduceOp.MAX)
        has_row, has_image, has_video = map(bool, of_any.tolist())
        if not has_row:
            return None
        if has_image and not own[1]:
            row = self._with_segment(row, self._token_ids[0])
            row = replace(row, imgs=self._medium, image_grid_thw=self._grid)
        if has_video and not own[2]:
            row = self._with_segment(row, self._token_ids[1])
            row = replace(row, pixel_values_videos=self._medium, video_grid_thw=self._grid)
        return row

    def _with_segment(self, row: PackedBatch, token_id: int) -> PackedBatch:
        """Append the tokens of a medium to the row, as one more segment of padding."""
        padded = pad_batch(row, row.tokens.shape[1] + self._num_tokens, token_id)
        # Empty rows know no layout.
        return replace(padded, is_padded=row.is_padded, image_layout=self._layout)

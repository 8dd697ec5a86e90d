"""Rows for ranks that train together. Of ranks that share a row, one reads it and sends it to the
others. Ranks that run the same layers together, as sharded weights demand, have pictures at the
same time: one rank whose row has none would leave the others waiting in the vision tower.

    rank 0   [text image text]                     [text image text]
    rank 1   [text]                           ->   [text][image]       the last segment is padding
    rank 2   nothing: its data ended          ->   [image]             the same
"""

from dataclasses import fields, replace
from typing import Any, Final

import torch
from torch import distributed

from task_encoders.energon_samples import BATCH_TENSORS, PackedBatch, empty_batch
from task_encoders.families.base.family import Family
from task_encoders.model_inputs import normalise_pixels, pad_batch

#: Fields besides tensors that are sent. Energon's own notes on the origin of a batch are not.
_OTHERS: Final = [
    f.name
    for f in fields(PackedBatch)
    if f.name not in BATCH_TENSORS and (f.name == "__key__" or not f.name.startswith("__"))
]


def broadcast_batch(
    batch: PackedBatch | None, device: torch.device, group: distributed.ProcessGroup
) -> PackedBatch | None:
    """Send the batch of a group's first rank to the others. Returns it on this rank's device,
    pixels as values; None for None.

    There are two messages: shapes and everything that is not a tensor, then one buffer with all
    tensors. Pixels may be sent as bytes. (Megatron-LM's own `broadcast_data` sends one dtype at a
    time, and only on CUDA devices.)

    Args:
        batch: None on the other ranks, and on the first when there are no more batches.
    """
    if batch is not None:
        batch = batch.to(device, non_blocking=True)
    if distributed.get_world_size(group) == 1:
        return None if batch is None else normalise_pixels(batch)
    source = distributed.get_global_rank(group, 0)
    header: list[Any] = [None]
    if batch is not None:
        tensors = [(name, getattr(batch, name)) for name in BATCH_TENSORS]
        # Wide types come first, so that every tensor is aligned in the one buffer.
        tensors.sort(key=lambda item: -item[1].dtype.itemsize)
        layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors}
        header = [(layout, {name: getattr(batch, name) for name in _OTHERS})]
    distributed.broadcast_object_list(header, source, group=group, device=device)
    if header[0] is None:
        return None
    layout, others = header[0]
    if batch is not None:
        buffer = torch.cat([getattr(batch, name).flatten().view(torch.uint8) for name in layout])
        distributed.broadcast(buffer, source, group=group)
        return normalise_pixels(batch)
    sizes = [shape.numel() * dtype.itemsize for dtype, shape in layout.values()]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    distributed.broadcast(buffer, source, group=group)
    received = {
        name: part.view(dtype).view(shape)
        for part, (name, (dtype, shape)) in zip(buffer.split(sizes), layout.items(), strict=True)
    }
    return normalise_pixels(PackedBatch(__restore_key__=(), **received, **others))


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

"""One batch for all ranks of a group: one rank reads, all train on its rows."""

from dataclasses import fields
from typing import Any, Final

import torch
from torch import distributed

from task_encoders.energon_samples import BATCH_TENSORS, PackedBatch
from task_encoders.model_inputs import normalise_pixels

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

"""One batch to all ranks of a tensor parallel group: one of them reads, all train on its rows."""

from dataclasses import fields, replace
from typing import Any, Final

import torch
from megatron.core import parallel_state
from torch import distributed

from task_encoders.energon_samples import BATCH_TENSORS, PackedBatch

#: Wide types come first, so that every tensor is aligned when all lie in one buffer.
_WIDE_FIRST: Final = dict(sorted(BATCH_TENSORS.items(), key=lambda item: -item[1].dtype.itemsize))
#: What goes along; Energon's own notes on where a batch came from do not.
_OTHERS: Final = [
    f.name
    for f in fields(PackedBatch)
    if f.name not in BATCH_TENSORS and (f.name == "__key__" or not f.name.startswith("__"))
]


def broadcast_batch(batch: PackedBatch | None, device: torch.device) -> PackedBatch | None:
    """The batch of the first tensor parallel rank, on this rank's device.

    Two messages: shapes with what is no tensor, and one buffer that holds all tensors.
    (Megatron-LM's own `broadcast_data` sends one dtype at a time, and only on CUDA devices.)

    Args:
        batch: None on the other ranks, and on the first when there are no more.

    Returns:
        None on all ranks when the first gave none.
    """
    if batch is not None:
        tensors = {name: getattr(batch, name) for name in _WIDE_FIRST}
        batch = replace(batch, **{n: t.to(device, non_blocking=True) for n, t in tensors.items()})
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return batch
    group = parallel_state.get_tensor_model_parallel_group()
    source = parallel_state.get_tensor_model_parallel_src_rank()
    header: list[Any] = [None if batch is None else _header(batch)]
    distributed.broadcast_object_list(header, source, group=group, device=device)
    if header[0] is None:
        return None
    shapes, others = header[0]
    sizes = [shape.numel() * _WIDE_FIRST[name].dtype.itemsize for name, shape in shapes.items()]
    if batch is None:
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    else:
        parts = [getattr(batch, name).flatten().view(torch.uint8) for name in _WIDE_FIRST]
        buffer = torch.cat(parts)
    distributed.broadcast(buffer, source, group=group)
    if batch is not None:
        return batch
    received = {
        name: part.view(_WIDE_FIRST[name].dtype).view(shape)
        for part, (name, shape) in zip(buffer.split(sizes), shapes.items(), strict=True)
    }
    return PackedBatch(__restore_key__=(), **received, **others)


def _header(batch: PackedBatch) -> tuple[dict[str, torch.Size], dict[str, Any]]:
    shapes = {name: getattr(batch, name).shape for name in _WIDE_FIRST}
    return shapes, {name: getattr(batch, name) for name in _OTHERS}

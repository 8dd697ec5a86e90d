"""The batch in a Megatron-LM pretrain script: `get_batch`, `loss_func` and `forward_step`.

These three have the form that Megatron-LM's `pretrain()` calls, and can be copied into a
`pretrain_*.py` beside its own `model_provider`. Run as a module they do a few steps on packs:

    OFFLINE_PACKED_DATA=1 OFFLINE_PACKING_VQA=1 \\
        torchrun --nproc-per-node 2 -m launch.megatron_lm_batch out/packed --tensor-parallel 2
"""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

import click
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from launch.loss import shift_labels
from task_encoders.energon_samples import PackedBatch
from task_encoders.model_inputs import to_packed_seq_params
from task_encoders.sample_encoder import IGNORE_INDEX

logger = logging.getLogger(__name__)

#: The tensors of a PackedBatch that a model needs: name, dtype, dimensions. Wide types come first,
#: so that every tensor is aligned when all lie in one buffer.
FIELDS: Final = (
    ("tokens", torch.int64, 2),
    ("labels", torch.int64, 2),
    ("position_ids", torch.int64, 3),
    ("cu_lengths", torch.int32, 2),
    ("image_grid_thw", torch.int32, 2),
    ("video_grid_thw", torch.int32, 2),
    ("imgs", torch.float32, 2),
    ("pixel_values_videos", torch.float32, 2),
    ("attn_mask", torch.bool, 2),
)


@dataclasses.dataclass(frozen=True, slots=True)
class MegatronBatch:
    """What forward_step gives to the model."""

    tokens: torch.Tensor  #: (1, S) int64
    labels: torch.Tensor  #: (1, S) int64, shifted
    loss_mask: torch.Tensor  #: (1, S) float32
    position_ids: torch.Tensor  #: (3, 1, S) int64
    packed_seq_params: PackedSeqParams
    imgs: torch.Tensor  #: (patches, C·T·p·p) float32
    image_grid_thw: torch.Tensor  #: (N, 3) int32
    pixel_values_videos: torch.Tensor  #: (patches, C·T·p·p) float32
    video_grid_thw: torch.Tensor  #: (M, 3) int32


@dataclasses.dataclass(slots=True)
class _Received:
    """A PackedBatch without what the model does not need."""

    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    cu_lengths: torch.Tensor
    image_grid_thw: torch.Tensor
    video_grid_thw: torch.Tensor
    imgs: torch.Tensor
    pixel_values_videos: torch.Tensor
    attn_mask: torch.Tensor


def get_batch(data_iterator: Iterator[PackedBatch] | None, device: torch.device) -> MegatronBatch:
    """The next batch, read by the first tensor parallel rank and broadcast to the others.

    Args:
        data_iterator: over Energon's loader; None on the other tensor parallel ranks.
        device: of the result.

    Raises:
        StopIteration: on all ranks, when the data ends.
    """
    batch = next(data_iterator, None) if data_iterator is not None else None
    received = _broadcast(batch, device)
    labels = shift_labels(received.labels)
    return MegatronBatch(
        tokens=received.tokens,
        labels=labels,
        loss_mask=(labels != IGNORE_INDEX).float(),
        position_ids=received.position_ids,
        packed_seq_params=to_packed_seq_params(received),
        imgs=received.imgs,
        image_grid_thw=received.image_grid_thw,
        pixel_values_videos=received.pixel_values_videos,
        video_grid_thw=received.video_grid_thw,
    )


def _broadcast(batch: PackedBatch | None, device: torch.device) -> _Received:
    """Two messages: the sizes of all tensors, and one buffer that holds them all.

    Megatron-LM's own `broadcast_data` sends one dtype at a time, and only on CUDA devices.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    source = parallel_state.get_tensor_model_parallel_src_rank()
    num_sizes = sum(dims for _, _, dims in FIELDS)
    sizes = torch.zeros(num_sizes, dtype=torch.int64, device=device)  # all 0: no more data
    tensors = [] if batch is None else [getattr(batch, name).to(device) for name, _, _ in FIELDS]
    if tensors:
        sizes.copy_(torch.tensor([size for tensor in tensors for size in tensor.shape]))
    dist.broadcast(sizes, source, group=group)
    shape_of = iter(sizes.tolist())
    shapes = [torch.Size(itertools.islice(shape_of, dims)) for _, _, dims in FIELDS]
    if not any(shapes[0]):
        raise StopIteration
    num_bytes = [
        shape.numel() * dtype.itemsize for shape, (_, dtype, _) in zip(shapes, FIELDS, strict=True)
    ]
    if tensors:
        buffer = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])
    else:
        buffer = torch.empty(sum(num_bytes), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, source, group=group)
    parts = zip(buffer.split(num_bytes), FIELDS, shapes, strict=True)
    return _Received(
        **{name: part.view(dtype).view(shape) for part, (name, dtype, _), shape in parts}
    )


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Megatron-LM's loss with `--calculate-per-token-loss`: a sum and the tokens it is over.

    Args:
        loss_mask: (1, S).
        output_tensor: (1, S) per-token losses.
    """
    loss = (output_tensor.float() * loss_mask).sum()
    num_tokens = loss_mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(
    data_iterator: Iterator[PackedBatch] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """Per-token losses of the next batch, and what makes one number of them."""
    batch = get_batch(data_iterator, next(model.parameters()).device)
    output_tensor = model(
        batch.tokens,
        batch.position_ids,
        batch.packed_seq_params,
        batch.imgs,
        batch.image_grid_thw,
        batch.labels,
        batch.pixel_values_videos,
        batch.video_grid_thw,
    )
    return output_tensor, functools.partial(loss_func, batch.loss_mask)


@click.command()
@click.argument("path")
@click.option("--tensor-parallel", default=1)
@click.option("--steps", default=2)
@click.option("--seq-length", default=2048)
@click.option("--max-pixels", default=28 * 28 * 5120, help="as when the packs were measured")
def main(path: str, tensor_parallel: int, steps: int, seq_length: int, max_pixels: int) -> None:
    """Train a tiny random model on the packs in PATH for a few steps."""
    from megatron.energon import WorkerConfig, get_loader

    from launch.model import build_model
    from launch.model_config import ModelConfig
    from launch.parallel import initialize_parallel
    from task_encoders.packed_dataset import get_packed_train_dataset
    from task_encoders.packed_task_encoder import Qwen2VLTaskEncoder

    device = initialize_parallel(tensor_parallel)
    model = build_model(ModelConfig(), device=device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data_iterator = None
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        worker_config = WorkerConfig(
            rank=parallel_state.get_data_parallel_rank(),
            world_size=parallel_state.get_data_parallel_world_size(),
            num_workers=0,
        )
        task_encoder = Qwen2VLTaskEncoder(seq_length=seq_length, max_pixels=max_pixels)
        dataset = get_packed_train_dataset(path, task_encoder, worker_config=worker_config)
        data_iterator = iter(get_loader(dataset))
    for step in range(steps):
        output_tensor, reduce = forward_step(data_iterator, model)
        loss, num_tokens, _ = reduce(output_tensor)
        optimizer.zero_grad()
        (loss / num_tokens).backward()
        optimizer.step()
        mean = float(loss.detach() / num_tokens)
        logger.info("step %d: loss %.4f over %d tokens", step, mean, int(num_tokens))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main()

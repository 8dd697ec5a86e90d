"""Process groups: tensor parallel inside, then context parallel, data parallel outside, on gloo
(CPU) or NCCL (GPU).

world of 8, tensor 2, context 2:   ranks 0 1 | 2 3 | …   share one model (tensor parallel group)
                                   ranks 0 2 | 1 3 | …   share rows (context parallel group)
                                   ranks 0 4 | 1 5 | …   see different packs (data parallel group)

Weights and optimizer treat context parallel ranks as data parallel ones: gradients are sums.
"""

import os
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state

#: Time after which a collective counts as hung, as in megatron-core's own groups. NCCL's ten
#: minutes are no longer than a rank may wait for its loader's first row.
_TIMEOUT: Final = timedelta(minutes=30)


class ParallelError(RuntimeError):
    """Processes that cannot be laid out as asked for."""


def initialize_parallel(
    tensor_parallel: int = 1, context_parallel: int = 1, *, seed: int = 0
) -> torch.device:
    """Join the process group, lay out megatron-core's groups, and seed torch.

    Under torchrun, rank and world size come from the environment; otherwise the world is this
    process.

    Args:
        tensor_parallel: ranks that share one model.
        context_parallel: ranks that share a row; times tensor_parallel it must divide the world
            size.
        seed: the seed of torch's generators, the same on all ranks.

    Returns:
        The device of this rank.

    Raises:
        ParallelError: the world size cannot be divided this way.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=_TIMEOUT)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    world_size = dist.get_world_size()
    if world_size % (tensor_parallel * context_parallel):
        context = f" × context_parallel {context_parallel}" if context_parallel > 1 else ""
        raise ParallelError(
            f"tensor_parallel {tensor_parallel}{context} does not divide the {world_size} "
            "processes; set NNODES × NPROC_PER_NODE to a multiple of it"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel,
            context_parallel_size=context_parallel,
            create_gloo_process_groups=False,  # a second set, which nothing uses
        )
    torch.manual_seed(seed)
    if device.type == "cuda":
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(seed)
    return device


def context_group() -> dist.ProcessGroup | None:
    """Return the group of ranks that share this rank's rows; None: no other rank does."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return None
    group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
    return group


def shutdown_parallel() -> None:
    """Leave the groups and the process group."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def on_all_ranks(own: Any) -> list[Any]:
    """Gather the objects of all ranks, in order. A collective."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone

"""Process groups: tensor parallel inside, data parallel outside, on gloo (CPU) or NCCL (GPU).

world of 4, tensor_parallel 2:   ranks 0 1 | 2 3   share one model (tensor parallel group)
                                 ranks 0 2 | 1 3   see different packs (data parallel group)
"""

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state


class ParallelError(RuntimeError):
    """The given processes cannot be laid out as asked for."""


def initialize_parallel(tensor_parallel: int = 1, *, seed: int = 0) -> torch.device:
    """Join the process group, lay out megatron-core's groups, and seed torch.

    Under torchrun the environment says who we are; without it this process is a world of its own.
    Pipeline and context parallelism are 1.

    Args:
        tensor_parallel: ranks that share one model; must divide the world size.
        seed: of torch's generators, the same on all ranks.

    Returns:
        The device of this rank.

    Raises:
        ParallelError: the world size cannot be divided this way.
    """
    device = _select_device()
    _join_process_group(device)
    world_size = dist.get_world_size()
    if world_size % tensor_parallel:
        raise ParallelError(
            f"tensor_parallel {tensor_parallel} does not divide the {world_size} processes; "
            "set NNODES × NPROC_PER_NODE to a multiple of it"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    elif parallel_state.get_tensor_model_parallel_world_size() != tensor_parallel:
        raise ParallelError(
            f"this process already has tensor_parallel "
            f"{parallel_state.get_tensor_model_parallel_world_size()}, not {tensor_parallel}; "
            "call shutdown_parallel first"
        )
    torch.manual_seed(seed)
    if device.type == "cuda":
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(seed)
    return device


def _join_process_group(device: torch.device) -> None:
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _select_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def shutdown_parallel() -> None:
    """Leave the groups and the process group."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether tensor parallel ranks hold different parts of this parameter."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def on_all_ranks(keys: list[str]) -> list[str]:
    """The keys of every rank, each once, in order. A collective."""
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, keys)
    return sorted({key for rank_keys in gathered for key in rank_keys})

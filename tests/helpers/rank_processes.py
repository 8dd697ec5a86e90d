"""Run a function in several processes that form a torch.distributed group."""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed

#: Imported once, by a server of which the ranks are forks: for each by itself it takes 5 s.
PRELOADED = (
    "tests.helpers.torchvision_stub",
    "launch.loop.setup",
    "tests.helpers.packed_runs",
    "tests.helpers.tiny_checkpoints",
    "transformers.models.qwen2_vl.modeling_qwen2_vl",
    "tests.helpers.warm_ranks",
)
multiprocessing.set_forkserver_preload(list(PRELOADED))


def run_ranks(world_size: int, folder: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` on `world_size` gloo ranks. Returns what each rank returned.

    `folder` carries the rendezvous and the results; results must be picklable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.multiprocessing.start_processes(
        _run_rank,
        (world_size, folder, dict(os.environ), function, args),
        nprocs=world_size,
        start_method="forkserver",
    )
    return [
        torch.load(folder / f"result_{rank}.pt", weights_only=False) for rank in range(world_size)
    ]


def _run_rank(
    rank: int,
    world_size: int,
    folder: Path,
    environment: Mapping[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    # Loaders fork their workers, as under torchrun: by default each rank would start a server.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.clear()  # the server that forks has that of its start
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # accelerate asks, and joins
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    try:
        torch.save(function(*args), folder / f"result_{rank}.pt")
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()

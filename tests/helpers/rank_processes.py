"""Run a function in several processes that form a torch.distributed group; free ports."""

import multiprocessing
import os
import random
import socket
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed

#: Imported once, by a server of which the ranks are forks: for each by itself it takes 5 s.
PRELOADED = (
    "tests.helpers.quick_imports",
    "tests.helpers.torchvision_stub",
    "launch.loop.setup",
    "tests.helpers.packed_runs",
    "tests.helpers.tiny_checkpoints",
    "transformers.models.qwen2_vl.modeling_qwen2_vl",
    "tests.helpers.warm_ranks",
)
multiprocessing.set_forkserver_preload(list(PRELOADED))


class RankError(AssertionError):
    """Ranks failed; the message holds the traceback of each."""


def run_ranks(world_size: int, folder: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` on `world_size` gloo ranks. Returns what each rank returned.

    `folder` carries the results, which must be picklable.

    Raises:
        RankError: a rank failed; it names all that did, as the first to end may have lost others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _run(world_size, folder, function, args)
    except RankError as error:
        if "_new_process_group_helper" not in str(error):
            raise
        # Seen once in hundreds of runs of all tests, and not explained: try once more.
        warnings.warn(f"a process group was not formed: {error}", stacklevel=2)
        return _run(world_size, folder, function, args)


def _run(
    world_size: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> list[Any]:
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = torch.multiprocessing.start_processes(
        _run_rank,
        (world_size, store.port, folder, dict(os.environ), function, args),
        nprocs=world_size,
        join=False,
        start_method="forkserver",
    )
    try:
        while not ranks.join(grace_period=5):
            pass
    except torch.multiprocessing.ProcessRaisedException:
        tracebacks = [path.read_text() for path in sorted(folder.glob("error_*.txt"))]
        raise RankError("\n".join(tracebacks)) from None
    return [
        torch.load(folder / f"result_{rank}.pt", weights_only=False) for rank in range(world_size)
    ]


def _run_rank(
    rank: int,
    world_size: int,
    port: int,
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
    os.environ.update(GLOO_SOCKET_IFNAME="lo")  # not whatever the machine's name resolves to
    failed = folder / f"error_{rank}.txt"
    failed.unlink(missing_ok=True)
    store = distributed.TCPStore("localhost", port, is_master=False)
    try:
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        torch.save(function(*args), folder / f"result_{rank}.pt")
    except BaseException:
        failed.write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


#: Below those that the kernel gives to whoever asks for any port: nobody takes one of these between
#: our look and the bind of the process that it is for.
_RANGE = range(10_000, 30_000)


def free_port() -> int:
    """Draw a port at which nobody listens."""
    while True:
        port = random.SystemRandom().choice(_RANGE)
        with socket.socket() as tried:
            try:
                tried.bind(("", port))
            except OSError:
                continue
        return port

"""Answers CUDA calls on a CPU, and counts them, so that a script with Megatron-LM's `pretrain()`
runs there. It shows that a script's calls fit together, not what a GPU computes.

    torchrun --nproc-per-node 2 tests/peers/megatron_cpu_shim.py SCRIPT ARGUMENTS

The first rank writes what was answered to $SHIM_CALLS: call, file, line and count.
"""

import atexit
import collections
import contextlib
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
CALLS: collections.Counter[tuple[str, str, int]] = collections.Counter()


def count(call: str) -> None:
    """Count a call by its place in the code, which is two frames up."""
    frame = sys._getframe(2)
    file = frame.f_code.co_filename
    if file == __file__:  # an answer to an answer
        return
    for root in ("site-packages/", "Megatron-LM/", f"{os.getcwd()}/"):
        file = file.split(root)[-1]
    CALLS[call, file, frame.f_lineno] += 1


def answer(place: Any, name: str, value: Any, call: str | None = None) -> None:
    """Put a function that returns `value`, or what it returns, in the place of another."""

    def answered(*args: Any, **kwargs: Any) -> Any:
        count(call or f"{place.__name__}.{name}")
        return value(*args, **kwargs) if callable(value) else value

    setattr(place, name, answered)


class Stream:
    """Everything is done when a call returns: there is nothing to wait for."""

    def __init__(self) -> None:
        count("torch.cuda.Stream")

    def wait_stream(self, other: "Stream") -> None:
        """Nothing."""


def on_cpu(value: Any) -> Any:
    """The CPU in the place of a CUDA device."""
    is_cuda = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return CPU if is_cuda else value


class CudaIsCpu(TorchFunctionMode):
    """Tensors that are to be on a CUDA device are on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        name = getattr(function, "__name__", "")
        placed = tuple(on_cpu(value) for value in args) if name == "to" else args
        if given != (kwargs or {}) or placed != args:
            count(f"device of torch.{name}")
        return function(*placed, **given)


def on_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes groups, with gloo in the place of NCCL."""

    def called(*args: Any, **kwargs: Any) -> Any:
        for name in ("device_id", "pg_options"):
            kwargs.pop(name, None)
        return function(*args, **kwargs | {"backend": "gloo"})

    return called


def answer_cuda() -> None:
    """Answer torch's functions."""
    device = SimpleNamespace(total_memory=1 << 34, multi_processor_count=1, name="CPU", major=8)
    stream = object.__new__(Stream)
    zeros = "max_memory_allocated max_memory_reserved memory_allocated memory_reserved"
    nothing = "empty_cache manual_seed manual_seed_all set_device synchronize"
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": (8, 0),
        "current_device": CPU,
        "get_device_properties": lambda *_: device,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "current_stream": lambda *_: stream,
        "stream": lambda *_: contextlib.nullcontext(),
        **dict.fromkeys(zeros.split(), 0),
        **dict.fromkeys(nothing.split()),
    }
    for name, value in answers.items():
        answer(torch.cuda, name, value)
    for kind in ("Float", "Half", "BFloat16", "Int", "Long", "Byte", "Double", "Bool"):
        setattr(torch.cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    torch.cuda.Stream = Stream  # type: ignore[misc, assignment]
    answer(torch.nn.Module, "cuda", lambda itself, *_: itself)
    answer(torch.Tensor, "pin_memory", lambda itself, *_: itself)
    kind_of = torch.Tensor.type

    def type_of(tensor: torch.Tensor, *given: Any) -> Any:
        found = kind_of(tensor, *given)
        is_name = isinstance(found, str) and ".cuda." not in found  # FloatTensor names itself so
        return found.replace("torch.", "torch.cuda.") if is_name else found

    answer(torch.Tensor, "type", type_of)
    answer(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", None)
    start, group = distributed.init_process_group, distributed.new_group
    answer(distributed, "init_process_group", on_gloo(start))
    answer(distributed, "new_group", on_gloo(group))


def answer_megatron() -> None:
    """Answer functions of Megatron-LM itself, which is imported here."""
    from megatron.core.datasets import utils as datasets
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random

    answer(datasets, "compile_helpers", None)
    answer(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
    answer(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    state_dict = DistributedOptimizer.state_dict

    def with_steps(itself: Any) -> Any:
        """Torch's AdamW has no step before its first; the fused one's is in its groups."""
        if not itself.optimizer.state:
            itself._init_optimizer_states_with_dummy_values()
        for state in itself.optimizer.state.values():
            state.setdefault("step", torch.tensor(0.0))
        return state_dict(itself)

    answer(DistributedOptimizer, "state_dict", with_steps)
    load = DistributedOptimizer.load_state_dict  # of float32 weights it writes to leaves of a graph
    answer(DistributedOptimizer, "load_state_dict", torch.no_grad()(load))


def write_calls() -> None:
    """Write what was answered, a line each."""
    if os.environ["RANK"] == "0":
        rows = sorted((*call, times) for call, times in CALLS.items())
        lines = ("\t".join(map(str, row)) + "\n" for row in rows)
        Path(os.environ["SHIM_CALLS"]).write_text("".join(lines))


if __name__ == "__main__":
    answer_cuda()
    atexit.register(write_calls)
    with CudaIsCpu():
        answer_megatron()
        sys.argv = sys.argv[1:]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")

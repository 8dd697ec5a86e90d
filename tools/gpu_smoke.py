"""First minute on a GPU: what would stop everything else. `python -m tools.gpu_smoke`

Each check prints one line, and ends no other. Without a CUDA device it stops before the first check
that needs one.
"""

import importlib
import itertools
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from task_encoders.versions import VERSION

_PACKAGES = "torch triton transformers numpy megatron-core megatron-energon pydantic".split()
_LENGTHS = (700, 1, 2048, 5443)
_STARTED = time.time()


def check(name: str, find: Callable[[], Any]) -> bool:
    """Print what a check found, or its error; return whether it passed."""
    began = time.time()
    try:
        passed, found = True, find()
    except Exception as error:  # noqa: BLE001 - whatever it is, the next check runs
        traceback.print_exc(limit=4)
        passed, found = False, f"FAILED {type(error).__name__}: {str(error)[:300]}"
    now = time.time()
    print(f"[{now - _STARTED:6.1f}s] {name}: {found} ({now - began:.1f} s)", flush=True)
    return passed


def versions() -> str:
    """Return the versions of all that is measured."""
    found = [f"offline-packing {VERSION}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def imports() -> str:
    """Import what the other parts run."""
    for module in ("launch.train_transformers", "offline_packing.cli.main", "megatron.energon"):
        importlib.import_module(module)
    return "ok"


def compare_groups(heads: int, groups: int, size: int, window: tuple[int, int]) -> str:
    """Compare grouped keys with repeated ones in torch's varlen attention, forward and backward."""
    from launch.model.packed_attention import KERNELS

    bounds = [0, *itertools.accumulate(_LENGTHS)]
    ends = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    query, key, value = (
        torch.randn(bounds[-1], n, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (heads, groups, groups)
    )

    def run(repeats: int) -> list[torch.Tensor]:
        keys = [one.repeat_interleave(repeats, 1) if repeats > 1 else one for one in (key, value)]
        lengths = (ends, ends, max(_LENGTHS), max(_LENGTHS))
        out = KERNELS["torch_varlen"](query, *keys, lengths, size**-0.5, window)
        return [out, *torch.autograd.grad(out.float().square().sum(), (query, key, value))]

    def milliseconds(repeats: int) -> float:
        for _ in range(3):
            run(repeats)
        torch.cuda.synchronize()
        began = time.time()
        for _ in range(10):
            run(repeats)
        torch.cuda.synchronize()
        return (time.time() - began) * 100

    pairs = zip(run(1), run(heads // groups), strict=True)
    worst = max(float((a - b).float().norm() / b.float().norm()) for a, b in pairs)
    if not worst <= 1e-2:
        raise ValueError(f"grouped keys differ from repeated ones by {worst:.1e} > 1e-2")
    speeds = f"{milliseconds(1):.2f} ms grouped, {milliseconds(heads // groups):.2f} ms repeated"
    return f"grouped keys = repeated to {worst:.1e}; {speeds}"


def process_group() -> str:
    """Start a group of one rank, and let it wait for itself."""
    from launch.loop.parallel import initialize_parallel, on_all_ranks

    device = initialize_parallel()
    torch.distributed.barrier()
    return f"{device}, {on_all_ranks('x')}"


def compile_fusions() -> str:
    """Run megatron-core's compiled kernels at several lengths, and return the seconds of each."""
    from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    said = []
    for length in (100, 130, 131, 160):
        began = time.time()
        row, residual = (
            torch.randn(length, 1, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2)
        )
        bias_swiglu_impl(row, None).float().sum().backward()
        bias_dropout_add_fused_train((row, None), residual, 0.0).float().sum().backward()
        torch.cuda.synchronize()
        said.append(f"{length}: {time.time() - began:.1f} s")
    return ", ".join(said)


def main() -> None:
    passed = [check("versions", versions), check("imports", imports)]
    if torch.cuda.is_available():
        print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}", flush=True)
        for heads, groups, size, window in (
            (12, 2, 128, (-1, 0)),
            (28, 4, 128, (1024, 0)),
            (16, 16, 80, (-1, -1)),
        ):
            name = f"torch_varlen, heads {heads} on {groups} of {size}, window {window}"
            find = lambda case=(heads, groups, size, window): compare_groups(*case)  # noqa: E731
            passed.append(check(name, find))
        passed.append(check("process group", process_group))
        passed.append(check("megatron-core's fusions compile", compile_fusions))
    else:
        print("no CUDA device: stopped before torch's varlen attention")
    raise SystemExit(not all(passed))


if __name__ == "__main__":
    main()

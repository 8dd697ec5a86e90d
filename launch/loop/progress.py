"""Time and operations of a step, and the line that it writes to the log."""

import time
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from launch.model.vision_tower import frames_of, share_frames
from task_encoders.energon_samples import PackedBatch
from task_encoders.families.base.cost import ModelCost
from task_encoders.packs.tokenized import IGNORE_INDEX

#: Dense bfloat16 FLOP/s of a GPU, by a part of its name (NVIDIA's data sheets).
PEAK_FLOPS: Final = {
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Peak rate of this rank's GPU; None on a CPU and for GPUs that are not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def row_flops(cost: ModelCost, row: PackedBatch) -> torch.Tensor:
    """(3,) float64, on the row's device: operations that the vision tower and the language model
    need, forward, for its real tokens and the logits of its labels; and the language model with the
    logits of all tokens, as plans count it."""

    def counts(mask: torch.Tensor) -> torch.Tensor:
        until = torch.nn.functional.pad(mask.flatten().cumsum(0), (1, 0))
        return until[row.cu_lengths.flatten().long()].diff().double()  # of each segment

    tokens = counts(~row.attn_mask)
    language = cost.language_flops(tokens, counts(row.labels != IGNORE_INDEX)).sum()
    steps, height, width = torch.cat([row.image_grid_thw, row.video_grid_thw]).double().T
    tower = (steps * cost.tower_flops(height * width)).sum()
    return torch.stack([tower, language, cost.language_flops(tokens).sum()])


def tower_shares(cost: ModelCost, row: PackedBatch, ranks: int) -> npt.NDArray[np.float64]:
    """(ranks,) operations of the vision tower, forward, on each rank that shares the row."""
    frames = frames_of(torch.cat([row.image_grid_thw, row.video_grid_thw]))
    flops = cost.tower_flops(frames[:, 0])
    return np.diff(np.append(0.0, flops.cumsum())[share_frames(flops, ranks)])


def memory_gib(device: torch.device) -> float:
    """The peak memory of this process: on the GPU, or in the machine's memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Stopwatch:
    """Seconds of work on a device: by events on CUDA, which do not make the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._started = 0.0

    def __enter__(self) -> None:
        if self._is_cuda:
            self._events.append(
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            )
            self._events[-1][0].record()
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._is_cuda:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._started

    def seconds(self) -> float:
        """Seconds of all work so far. On CUDA this waits for the last to end."""
        if self._events:
            self._events[-1][1].synchronize()
        return self._seconds + sum(start.elapsed_time(end) / 1e3 for start, end in self._events)


class Eta:
    """Seconds to the last step, from the mean over this process's steps except the first."""

    def __init__(self, iteration: int, iterations: int) -> None:
        self._iterations = iterations
        self._first = iteration + 1
        self._started = time.perf_counter()

    def seconds(self, iteration: int) -> float | None:
        """After step `iteration`; None if only one step was done."""
        if iteration == self._first:
            self._started = time.perf_counter()  # the first warms up
        if iteration <= self._first:
            return None
        per_step = (time.perf_counter() - self._started) / (iteration - self._first)
        return per_step * (self._iterations - iteration)


def format_line(
    iteration: int, iterations: int, metrics: Mapping[str, float], eta: float | None
) -> str:
    """`step 20/500: loss 1.2345, lr 1.00e-05, grad norm 0.98, ...`"""
    parts = [
        f"loss {metrics['loss']:.4f}",
        f"lr {metrics['learning_rate']:.2e}",
        f"grad norm {metrics['grad_norm']:.3g}",
        f"{metrics['tokens_per_second']:,.0f} tokens/s",
        f"{metrics['samples_per_second']:.1f} samples/s",
        f"fill {metrics['fill']:.1%}",
        f"data wait {metrics['data_wait']:.1%}",
        f"memory {metrics['memory_gib']:.1f} GiB",
    ]
    if "idle_share" in metrics:
        both, tower, language = (
            f"{metrics[f'{name}_idle_share']:.1%}" for name in ("two_phase", "tower", "language")
        )
        parts.append(
            f"idle {metrics['idle_share']:.1%} (waiting after the tower too {both}: tower {tower}, "
            f"language {language})"
        )
    if "tower_idle" in metrics:
        names = [name for name in metrics if name.removeprefix("tower_").isdecimal()]
        shares = "/".join(f"{metrics[name]:.0%}" for name in names)
        parts.append(f"tower {shares} (idle {metrics['tower_idle']:.0%})")
    if "mfu" in metrics:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    if eta is not None:
        hours, seconds = divmod(round(eta), 3600)
        parts.append(f"ETA {hours}:{seconds // 60:02d}:{seconds % 60:02d}")
    return f"step {iteration}/{iterations}: {', '.join(parts)}"

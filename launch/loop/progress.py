"""The line that a step writes to the log, and how much of the GPUs it used."""

import time
from collections.abc import Mapping
from typing import Any, Final

import torch

from launch.loop.metrics import StepTotals

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


class StepFlops:
    """Model FLOPs of training steps: 6 per weight and token, and causal attention within segments.

    The convention of PaLM (appendix B, https://arxiv.org/abs/2204.02311): forward and backward,
    without recomputation, frozen or not. Embeddings are looked up, not multiplied.
    """

    def __init__(self, model: Any) -> None:
        text = model.hf_config.text_config
        width, inner = text.hidden_size, text.intermediate_size
        key_width = width // text.num_attention_heads * text.num_key_value_heads
        layer = 2 * width * width + 2 * width * key_width + 3 * width * inner
        self._per_token = 6 * (text.num_hidden_layers * layer + width * text.vocab_size)
        self._per_square = 6 * text.num_hidden_layers * width
        # The tower, merger included, as if every patch went through all of it.
        self._per_patch = 6 * sum(p.numel() for p in model.visual.parameters())

    def of(self, totals: StepTotals) -> float:
        """FLOPs of one step over all ranks."""
        return (
            self._per_token * totals.tokens
            + self._per_square * totals.squares
            + self._per_patch * totals.patches
        )


def memory_gib(device: torch.device) -> float:
    """The peak memory of this process: on the GPU, or in the machine's memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


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
    if "mfu" in metrics:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    if eta is not None:
        hours, seconds = divmod(round(eta), 3600)
        parts.append(f"ETA {hours}:{seconds // 60:02d}:{seconds % 60:02d}")
    return f"step {iteration}/{iterations}: {', '.join(parts)}"

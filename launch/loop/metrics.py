"""Metrics of a step: sums over its micro batches, on one rank and on all, its line in the log, and
metrics.jsonl, whose values trackers get as well.

metrics.jsonl holds one line per step, and one per validation. A resumed run first removes the lines
of steps that it will repeat, so that the file has every step once.
"""

import importlib
import json
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from megatron.core import parallel_state
from torch import distributed

from launch.config import MetricsConfig
from launch.loop.loss import sum_segments
from offline_packing.storage.files import hash_bytes, write_atomically
from task_encoders.energon_samples import PackedBatch
from task_encoders.families.base.cost import ModelCost
from task_encoders.samples import IGNORE_INDEX


class StepCounts:
    """Sums of one rank over the micro batches of a step.

    Losses stay on the device until `reduce`, so that no micro batch waits for the previous one.
    """

    def __init__(self, device: torch.device) -> None:
        #: loss, denominator, and forward operations
        self._on_device = torch.zeros(3, dtype=torch.float64, device=device)
        self._tokens = self._samples = self._packs = 0
        #: waits for the loader
        self.data_seconds = 0.0

    def add(
        self,
        row: PackedBatch,
        *,
        loss: torch.Tensor,
        denominator: torch.Tensor,
        cost: ModelCost,
        group: distributed.ProcessGroup | None,
    ) -> None:
        """Count a micro batch.

        Args:
            loss: the sum of its losses, or of this rank's part of it.
            denominator: of the whole row.
            cost: of the model.
            group: the ranks that share the row; the first counts all but the losses.
        """
        self._on_device[0] += loss.detach().double()
        if group is not None and distributed.get_rank(group):
            return
        self._on_device[1:] += torch.stack([denominator.double(), row_flops(cost, row)])
        self._tokens += row.num_tokens
        self._samples += len(row.sub_sample_keys)
        self._packs += len(row.__key__)

    def reduce(self, *, stop: int = 0) -> "StepTotals":
        """Add up over all ranks, of tensor parallel ranks the first. A collective.

        Args:
            stop: the signal that asked this rank to stop, or 0; one is enough for all.
        """
        own = self._on_device.new_tensor([self._tokens, self._samples, self._packs])
        is_first = parallel_state.get_tensor_model_parallel_rank() == 0
        sums = torch.cat([self._on_device, own]) * is_first
        worst = sums.new_tensor([self.data_seconds, float(stop)])
        distributed.all_reduce(sums)
        distributed.all_reduce(worst, op=distributed.ReduceOp.MAX)
        loss, denominator, flops, *counted = sums.tolist()
        data_seconds, stopped = worst.tolist()
        tokens, samples, packs = map(round, counted)
        # Where nothing is labelled at all, the gradient should be zero, not NaN.
        denominator = denominator or 1.0
        added = loss / denominator, denominator, flops, tokens, samples, packs
        return StepTotals(*added, data_seconds, int(stopped))


class StepTotals(NamedTuple):
    """A step over all ranks."""

    loss: float
    denominator: float
    #: operations of the forward pass
    flops: float
    tokens: int
    samples: int
    packs: int
    #: the longest that any rank waited for its loader
    data_seconds: float
    #: the signal that asked any rank to stop, or 0
    stop: int


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
    """Return the peak rate of this rank's GPU; None on a CPU, and for GPUs that the table lacks."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def row_flops(cost: ModelCost, row: PackedBatch) -> torch.Tensor:
    """Return () float64, on the row's device: operations that the vision tower and the language
    model need, forward, for the row's real tokens and the logits of its labels. A branch costs what
    it adds to its trunk."""
    tokens = sum_segments(~row.attn_mask, row.cu_lengths)
    labels = sum_segments(row.labels != IGNORE_INDEX, row.cu_lengths)
    shared = torch.zeros_like(tokens)
    if row.parents.numel():
        parents = row.parents.flatten().long()
        shared = tokens[parents.clamp(min=0)] * (parents >= 0)
    language = cost.language_flops(shared + tokens, labels) - cost.language_flops(shared, 0)
    steps, height, width = torch.cat([row.image_grid_thw, row.video_grid_thw]).double().T
    return (steps * cost.tower_flops(height * width)).sum() + language.sum()


def memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process: on the GPU, or in the machine's memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Eta:
    """Seconds to the last step, from the mean over this process's steps except the first."""

    def __init__(self) -> None:
        #: the first step and its end; the first step warms up
        self._first: tuple[int, float] | None = None

    def seconds(self, iteration: int, iterations: int) -> float | None:
        """Estimate the time left after step `iteration`; None if only one step was done."""
        now = time.perf_counter()
        if self._first is None:
            self._first = iteration, now
            return None
        first, started = self._first
        return (now - started) / (iteration - first) * (iterations - iteration)


def format_line(
    iteration: int, iterations: int, metrics: Mapping[str, float], eta: float | None
) -> str:
    """Format a step's figures: `step 20/500: loss 1.2345, lr 1.00e-05, grad norm 0.98, ...`."""
    seconds = metrics["step_seconds"]
    parts = [
        f"loss {metrics['loss']:.4f}",
        f"lr {metrics['learning_rate']:.2e}",
        f"grad norm {metrics['grad_norm']:.3g}",
        f"{metrics['tokens'] / seconds:,.0f} tokens/s",
        f"{metrics['sub_samples'] / seconds:.1f} samples/s",
        f"fill {metrics['fill']:.1%}",
        f"data wait {metrics['data_wait']:.1%}",
        f"memory {metrics['memory_gib']:.1f} GiB",
    ]
    if "mfu" in metrics:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    if eta is not None:
        hours, rest = divmod(round(eta), 3600)
        parts.append(f"ETA {hours}:{rest // 60:02d}:{rest % 60:02d}")
    return f"step {iteration}/{iterations}: {', '.join(parts)}"


class MetricsLog:
    """metrics.jsonl, and the trackers that are asked for. Only rank 0 has one."""

    def __init__(self, folder: Path, config: MetricsConfig, *, iteration: int) -> None:
        """Open the log to continue after step `iteration` (0: a new run). Raises ValueError if a
        tracker is asked for but not installed."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        self._trackers = [
            open_tracker(package, folder, str(project), iteration)
            for package in ("tensorboard", "wandb", "swanlab")
            if (project := getattr(config, package))
        ]
        if self._path.exists():
            kept = [line for line in read_metrics(self._path) if line["iteration"] <= iteration]
            lines = "".join(json.dumps(line) + "\n" for line in kept)
            write_atomically(self._path, lines.encode())

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Add one line."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"iteration": iteration, **metrics}) + "\n")
        for log, _ in self._trackers:
            log(metrics, iteration)

    def close(self) -> None:
        """Write the trackers' pending figures."""
        for _, finish in self._trackers:
            finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics.jsonl, without a last line that a kill truncated."""
    lines = path.read_text("utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def open_tracker(
    package: str, folder: Path, project: str, iteration: int
) -> tuple[Callable[[Mapping[str, float], int], object], Callable[[], object]]:
    """Begin a run in TensorBoard, Weights & Biases or SwanLab, or continue it under the same name
    after step `iteration`. WANDB_MODE=offline and SWANLAB_MODE=offline keep it in the folder.
    Returns the functions that log a step's values, and that write what is pending at the end.
    Raises ValueError without the package."""
    is_board = package == "tensorboard"
    try:
        module = importlib.import_module("torch.utils.tensorboard" if is_board else package)
    except ImportError as error:
        raise ValueError(
            f"metrics.{package} needs the {package} package: pip install {package}, or set "
            f"metrics.{package}={'false' if is_board else 'null'}"
        ) from error
    if is_board:
        board = module.SummaryWriter(str(folder / package), purge_step=iteration + 1)

        def log(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                board.add_scalar(name, value, step)

        return log, board.close
    place = {"log_dir": str(folder / "swanlog")} if package == "swanlab" else {"dir": folder}
    run_id = hash_bytes(str(folder.resolve()).encode())[:16]
    run = module.init(project=project, id=run_id, name=folder.name, resume="allow", **place)
    return lambda values, step: run.log(dict(values), step=step), run.finish

"""Metrics of a step: sums over its micro batches, on one rank and on all, its line in the log, and
metrics.jsonl, whose values trackers get as well.

metrics.jsonl holds one line per step, and one per validation. A resumed run first removes the lines
of steps that it will repeat, so that the file has every step once.
"""

import importlib
import json
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import distributed

from launch.config import MetricsConfig
from offline_packing.storage.files import hash_bytes, write_atomically
from task_encoders.energon_samples import PackedBatch
from task_encoders.families.base.cost import ModelCost
from task_encoders.samples import IGNORE_INDEX


class StepCounts:
    """Sums of one rank over the micro batches of a step.

    Losses stay on the device until `reduce`, so that no micro batch waits for the previous one.
    """

    def __init__(self, device: torch.device) -> None:
        #: loss, denominator, labelled tokens, and forward operations
        self._on_device = torch.zeros(4, dtype=torch.float64, device=device)
        self._tokens = self._samples = self._packs = 0
        self._data_seconds = 0.0

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
            group: the ranks that share the row; all but the losses is counted by the first.
        """
        self._on_device[0] += loss.detach().double()
        if group is not None and distributed.get_rank(group):
            return
        loss_tokens = (row.labels != IGNORE_INDEX).sum()
        counted = torch.stack([denominator, loss_tokens]).double()
        self._on_device[1:] += torch.cat([counted, row_flops(cost, row).sum()[None]])
        self._tokens += row.num_tokens
        self._samples += len(row.sub_sample_keys)
        self._packs += len(row.__key__)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the wait for the loader."""
        started = time.perf_counter()
        yield
        self._data_seconds += time.perf_counter() - started

    def reduce(self, *, counts: bool, stop: int) -> "StepTotals":
        """Add up over all ranks. A collective.

        Args:
            counts: whether what this rank added counts (one rank's per tensor parallel group).
            stop: the signal that asked this rank to stop, or 0; one is enough for all.
        """
        own = self._on_device.new_tensor([self._tokens, self._samples, self._packs])
        sums = torch.cat([self._on_device, own]) * counts
        worst = sums.new_tensor([self._data_seconds, float(stop)])
        distributed.all_reduce(sums)
        distributed.all_reduce(worst, op=distributed.ReduceOp.MAX)
        loss, denominator, loss_tokens, flops, tokens, samples, packs = sums.tolist()
        data_seconds, stopped = worst.tolist()
        # Where nothing is labelled at all, the gradient should be zero, not NaN.
        denominator = denominator or 1.0
        return StepTotals(
            loss=loss / denominator,
            denominator=denominator,
            loss_tokens=round(loss_tokens),
            tokens=round(tokens),
            samples=round(samples),
            packs=round(packs),
            flops=flops,
            data_seconds=data_seconds,
            stop=round(stopped),
        )


class StepTotals(NamedTuple):
    """A step over all ranks."""

    loss: float
    denominator: float
    loss_tokens: int
    tokens: int
    samples: int
    packs: int
    #: operations of the forward pass
    flops: float
    #: the longest that any rank waited for its loader
    data_seconds: float
    #: the signal that asked any rank to stop, or 0
    stop: int

    def metrics(self, seconds: float, seq_length: int) -> dict[str, float]:
        """Return the step's line. `fill`: real tokens as a share of the room in the packs."""
        return {
            "loss": self.loss,
            "tokens_per_second": self.tokens / seconds,
            "samples_per_second": self.samples / seconds,
            "fill": self.tokens / (self.packs * seq_length),
            "packs": self.packs,
            "sub_samples": self.samples,
            "tokens": self.tokens,
            "loss_tokens": self.loss_tokens,
            "step_seconds": seconds,
            "data_wait": self.data_seconds / seconds,
        }


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
    """Return (2,) float64, on the row's device: operations that the vision tower and the language
    model need, forward, for the row's real tokens and the logits of its labels. A branch costs what
    it adds to its trunk."""

    def counts(mask: torch.Tensor) -> torch.Tensor:
        until = torch.nn.functional.pad(mask.flatten().cumsum(0), (1, 0))
        return until[row.cu_lengths.flatten().long()].diff().double()  # of each segment

    tokens, labels = counts(~row.attn_mask), counts(row.labels != IGNORE_INDEX)
    shared = torch.zeros_like(tokens)
    if row.parents.numel():
        parents = row.parents.flatten().long()
        shared = tokens[parents.clamp(min=0)] * (parents >= 0)
    language = cost.language_flops(shared + tokens, labels) - cost.language_flops(shared, 0)
    steps, height, width = torch.cat([row.image_grid_thw, row.video_grid_thw]).double().T
    tower = (steps * cost.tower_flops(height * width)).sum()
    return torch.stack([tower, language.sum()])


def memory_gib(device: torch.device) -> float:
    """The peak memory of this process: on the GPU, or in the machine's memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
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


class MetricsLog:
    """metrics.jsonl, and the trackers that are asked for. Only rank 0 has one."""

    def __init__(self, folder: Path, config: MetricsConfig, *, iteration: int) -> None:
        """Open the log to continue after step `iteration` (0: a new run).

        Raises:
            ValueError: a tracker is asked for but not installed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        asked = {"tensorboard": config.tensorboard and "here", "wandb": config.wandb}
        asked["swanlab"] = config.swanlab
        self._trackers = [
            Tracker(package, folder, project, iteration)
            for package, project in asked.items()
            if project
        ]
        self._samples_seen = 0
        if self._path.exists():
            kept = [line for line in read_metrics(self._path) if line["iteration"] <= iteration]
            lines = "".join(json.dumps(line) + "\n" for line in kept)
            write_atomically(self._path, lines.encode())
            self._samples_seen = sum(line.get("sub_samples", 0) for line in kept)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Add one line. A step's gets `samples_seen`, the samples since the first step."""
        if "sub_samples" in metrics:
            self._samples_seen += int(metrics["sub_samples"])
            metrics = {**metrics, "samples_seen": self._samples_seen}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"iteration": iteration, **metrics}) + "\n")
        for tracker in self._trackers:
            tracker.log(metrics, iteration)

    def close(self) -> None:
        """Let trackers write pending figures."""
        for tracker in self._trackers:
            tracker.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl. A last line truncated by a kill is left out."""
    lines = path.read_text("utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Tracker:
    """A run in TensorBoard, Weights & Biases or SwanLab, begun or continued under the same name.
    WANDB_MODE=offline and SWANLAB_MODE=offline keep it in the folder."""

    def __init__(self, package: str, folder: Path, project: str, iteration: int) -> None:
        """Open it to continue after step `iteration`. Raises ValueError without the package."""
        is_board = package == "tensorboard"
        try:
            module = importlib.import_module("torch.utils.tensorboard" if is_board else package)
        except ImportError as error:
            raise ValueError(
                f"metrics.{package} needs the {package} package: pip install {package}, or set "
                f"metrics.{package}={'false' if is_board else 'null'}"
            ) from error
        self._board: Any = None
        if is_board:
            self._board = module.SummaryWriter(str(folder / package), purge_step=iteration + 1)
            return
        place = {"log_dir": str(folder / "swanlog")} if package == "swanlab" else {"dir": folder}
        run_id = hash_bytes(str(folder.resolve()).encode())[:16]
        self._run = module.init(
            project=project, id=run_id, name=folder.name, resume="allow", **place
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add the values of a step."""
        if self._board is None:
            self._run.log(dict(values), step=step)
            return
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def finish(self) -> None:
        """Write what is pending."""
        if self._board is None:
            self._run.finish()
        else:
            self._board.close()

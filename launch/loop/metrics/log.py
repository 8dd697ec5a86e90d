"""metrics.jsonl, and the trackers that get the same values.

metrics.jsonl holds one line per step, and one per validation. A resumed run first removes the lines
of steps that it will repeat, so that the file has every step once.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from launch.config import MetricsConfig
from offline_packing.storage.files import hash_bytes, write_atomically


class Tracker(Protocol):
    """A run shown somewhere else, as Weights & Biases and SwanLab have it."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Add the values of a step."""

    def finish(self) -> None:
        """Write what is pending."""


class MetricsLog:
    """metrics.jsonl, and the trackers that are asked for. Only rank 0 has one."""

    def __init__(self, folder: Path, config: MetricsConfig, *, iteration: int) -> None:
        """Open the log to continue after step `iteration` (0: a new run).

        Raises:
            ValueError: a tracker is asked for but not installed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        self._trackers: list[Tracker] = []
        if config.tensorboard:
            self._trackers.append(TensorBoard(folder, iteration))
        if config.wandb:
            self._trackers.append(wandb_run(folder, config.wandb))
        if config.swanlab:
            self._trackers.append(swanlab_run(folder, config.swanlab))
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
            tracker.log(dict(metrics), step=iteration)

    def close(self) -> None:
        """Let trackers write what is pending."""
        for tracker in self._trackers:
            tracker.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl. A last line truncated by a kill is left out."""
    lines = path.read_text("utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


class TensorBoard:
    """Event files in the folder's `tensorboard`."""

    def __init__(self, folder: Path, iteration: int) -> None:
        """Open it. Raises ValueError without the package."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard", "false") from error
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=iteration + 1)

    def log(self, values: dict[str, float], step: int) -> None:
        """Add the values of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Write what is pending."""
        self._writer.close()


def wandb_run(folder: Path, project: str) -> Tracker:
    """The folder's run in Weights & Biases, begun or continued; WANDB_MODE=offline keeps it there.
    Raises ValueError without the package."""
    try:
        import wandb
    except ImportError as error:
        raise _missing("wandb", "null") from error
    run_id = _run_id(folder)
    run: Any = wandb.init(project=project, dir=folder, id=run_id, name=folder.name, resume="allow")
    return run


def swanlab_run(folder: Path, project: str) -> Tracker:
    """The same in SwanLab; SWANLAB_MODE=offline keeps it in the folder's `swanlog`."""
    try:
        import swanlab
    except ImportError as error:
        raise _missing("swanlab", "null") from error
    run_id, log_dir = _run_id(folder), str(folder / "swanlog")
    run: Any = swanlab.init(
        project=project, log_dir=log_dir, id=run_id, name=folder.name, resume="allow"
    )
    return run


def _run_id(folder: Path) -> str:
    """The name of a folder's run: a resumed one goes on under it."""
    return hash_bytes(str(folder.resolve()).encode())[:16]


def _missing(package: str, off: str) -> ValueError:
    return ValueError(
        f"metrics.{package} needs the {package} package: pip install {package}, or set "
        f"metrics.{package}={off}"
    )

"""Runs of packing_learning.py as tables and curves."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Result = Mapping[str, Any]

COLORS: Final = {
    "packed": "#2f6db5",
    "padded, equal samples": "#e8a33d",
    "padded, equal tokens": "#4a9c6d",
    "packed at random": "#b0559b",
    "packed, as many rows": "#a0a0a0",
}
LABELS: Final = ("samples seen", "thousands of positions computed, padding too")
#: Answers of at most so many labels are short, the others long.
SHORT: Final = 8


def _groups(results: Sequence[Result]) -> Iterator[tuple[str, str, list[Result]]]:
    """Normalization, mode, and the runs of all seeds."""
    for normalization in ("token", "sample"):
        for mode in COLORS:
            runs = [r for r in results if (r["normalization"], r["mode"]) == (normalization, mode)]
            if runs:
                yield normalization, mode, sorted(runs, key=lambda run: run["seed"])


def _training(run: Result) -> list[Mapping[str, float]]:
    return [line for line in run["steps"] if "loss" in line]


def held_out(run: Result) -> dict[str, float]:
    """Loss over the held-out samples by token, by sample, and of short and long answers."""
    column = {name: np.array([a[name] for a in run["answers"]]) for name in ("labels", "loss")}
    labels, loss = column["labels"], column["loss"]
    samples = np.unique([answer["sample"] for answer in run["answers"]], return_inverse=True)[1]
    of_sample = np.bincount(samples, loss) / np.bincount(samples, labels)
    short = labels <= SHORT
    return {
        "by token": loss.sum() / labels.sum(),
        "by sample": of_sample.mean(),
        "short": loss[short].sum() / labels[short].sum(),
        "long": loss[~short].sum() / labels[~short].sum(),
    }


def _with_range(values: Sequence[float]) -> str:
    return f"{np.mean(values):.2f} ± {np.ptp(values) / 2:.2f}"


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):,.0f} to {max(values):,.0f} ({np.mean(values):,.1f})"


def render_runs(results: Sequence[Result]) -> str:
    """Steps, and what is in one, per mode."""
    lines = [
        "| mode | rows per step | steps | samples per step | labelled tokens per step | "
        "positions, in all | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for normalization, mode, runs in _groups(results):
        if normalization == "token":
            steps = _training(runs[0])
            cells = [
                _spread([step[name] for step in steps]) for name in ("sub_samples", "loss_tokens")
            ]
            lines.append(
                f"| {mode} | {runs[0]['rows_per_step']} | {len(steps)} | {cells[0]} | {cells[1]} | "
                f"{runs[0]['positions']:,} | {np.mean([r['cpu_seconds'] for r in runs]):.0f} |"
            )
    return "\n".join(lines) + "\n"


def render_answers(results: Sequence[Result]) -> str:
    """Held-out loss: the mean over the seeds, and half the distance between the extremes; and how
    far each seed's is from its packed run's."""
    names = ["by token", "by sample", "short", "long"]
    head = ["trained by", "mode", *names, "above packed, per seed"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    found = {
        (normalization, mode): {run["seed"]: held_out(run) for run in runs}
        for normalization, mode, runs in _groups(results)
    }
    for (normalization, mode), runs in found.items():
        cells = [_with_range([run[name] for run in runs.values()]) for name in names]
        own = f"by {normalization}"
        base = found.get((normalization, "packed"), {})
        above = [f"{run[own] - base[seed][own]:+.2f}" for seed, run in runs.items() if seed in base]
        cells.append(" ".join(above) if mode != "packed" else "")
        lines.append(f"| {normalization} | {mode} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _curve(run: Result, over: str) -> tuple[np.ndarray, np.ndarray]:
    """Samples seen, or thousands of positions, and the held-out loss, at each validation."""
    seen: dict[int, float] = {}
    total = 0.0
    for line in _training(run):
        total += line["sub_samples"]
        seen[int(line["iteration"])] = total
    points = [(seen[int(p["iteration"])], p["validation_loss"]) for p in _validations(run)]
    at, losses = np.array(points).T
    return (at if over == "samples" else at / total * run["positions"] / 1000), losses


def _validations(run: Result) -> list[Mapping[str, float]]:
    return [line for line in run["steps"] if "validation_loss" in line]


def draw(results: Sequence[Result], path: Path) -> None:
    """Held-out loss over samples and over positions: a thin line per seed, a thick one of means."""
    figure, grid = plt.subplots(2, 2, figsize=(10, 6.4), sharey="row", layout="constrained")
    for normalization, mode, runs in _groups(results):
        row = grid[("token", "sample").index(normalization)]
        for axes, over in zip(row, ("samples", "positions"), strict=True):
            _draw_mode(axes, mode, [_curve(run, over) for run in runs])
    for row, normalization in zip(grid, ("token", "sample"), strict=True):
        row[0].set_ylabel(f"held-out loss by {normalization}")
        for axes, label in zip(row, LABELS, strict=True):
            axes.set_xlabel(label)
            axes.grid(color="#e4e4e4")
            axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor="white", metadata={"Software": None})
    plt.close(figure)


def _draw_mode(axes: Axes, mode: str, curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for at, losses in curves:
        axes.plot(at, losses, color=COLORS[mode], linewidth=0.7, alpha=0.5)
    shortest = min(len(at) for at, _ in curves)
    at, losses = (np.mean([curve[i][:shortest] for curve in curves], axis=0) for i in (0, 1))
    axes.plot(at, losses, color=COLORS[mode], linewidth=2, label=mode)

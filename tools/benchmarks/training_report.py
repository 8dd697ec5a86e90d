"""Figures of a training benchmark as a table and a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLORS = {"padded": "#b0b0b0", "online": "#e8a33d", "offline": "#2f6db5", "indexed": "#4a9c6d"}

#: Figures of NeMo's documentation for NeVA: Vicuna-1.5 13B, 8 GPUs, samples/s padded and packed.
NEVA = {"NeVA, TP 8": (63.745, 89.155), "NeVA, TP 4, PP 2": (63.745, 93.840)}


def summarize(steps: Sequence[Mapping[str, float]], peak_flops: float | None) -> dict[str, float]:
    """Totals of a run. `steps`: seconds, wait, samples, tokens, positions, flops per step."""
    column = {name: np.array([step[name] for step in steps]) for name in steps[0]}
    seconds = column["seconds"]
    total = float(seconds.sum())
    p50, p95 = np.percentile(seconds, [50, 95])
    summary = {
        "steps": float(len(steps)),
        "samples": float(column["samples"].sum()),
        "samples_per_second": float(column["samples"].sum()) / total,
        "tokens_per_second": float(column["tokens"].sum()) / total,
        "padding": 1 - float(column["tokens"].sum() / column["positions"].sum()),
        "positions_per_sample": float(column["positions"].sum() / column["samples"].sum()),
        "step_p50": float(p50),
        "step_spread": float(p95 / p50),
        "data_wait": float(column["wait"].sum()) / total,
    }
    if peak_flops is not None:
        summary["mfu"] = float(column["flops"].sum()) / total / peak_flops
    return summary


def gains(summaries: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Samples per second of each mode as a multiple of the padded run's, and the multiple that the
    saved padding alone would give."""
    base = summaries["padded"]
    return {
        mode: (
            figures["samples_per_second"] / base["samples_per_second"],
            base["positions_per_sample"] / figures["positions_per_sample"],
        )
        for mode, figures in summaries.items()
    }


def render_table(summaries: Mapping[str, Mapping[str, float]]) -> str:
    """A Markdown table, one row per mode; speeds also as a multiple of the padded run's. Last,
    what NeVA's documentation reports."""
    found = gains(summaries)
    lines = [
        "| run | samples/s | × padded | predicted | tokens/s | padding | step p50 | p95/p50 | "
        "data wait | memory | MFU |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mode, figures in summaries.items():
        gain, predicted = found[mode]
        mfu = f"{figures['mfu']:.1%}" if "mfu" in figures else "–"
        lines.append(
            f"| {mode} | {figures['samples_per_second']:.2f} | {gain:.2f} | {predicted:.2f} | "
            f"{figures['tokens_per_second']:,.0f} | {figures['padding']:.1%} | "
            f"{figures['step_p50']:.3f} s | {figures['step_spread']:.2f} | "
            f"{figures['data_wait']:.1%} | {figures['memory_gib']:.2f} GiB | {mfu} |"
        )
    for name, (padded, packed) in NEVA.items():
        lines.append(f"| {name} | {packed:.2f} | {packed / padded:.2f} |{' – |' * 8}")
    return "\n".join(lines) + "\n"


def draw(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Step times over time, and below them, on a GPU, power and utilisation."""
    with_gpu = any(result["gpu"] for result in results.values())
    rows = 3 if with_gpu else 1
    figure, grid = plt.subplots(
        rows, len(results), figsize=(4 * len(results), 2.6 * rows), sharey="row", squeeze=False
    )
    for (mode, result), column in zip(results.items(), grid.T, strict=True):
        seconds = np.array([step["seconds"] for step in result["steps"]])
        column[0].bar(np.arange(len(seconds)), seconds, width=1.0, color=COLORS[mode])
        speed = result["summary"]["samples_per_second"]
        column[0].set_title(f"{mode}: {speed:.1f} samples/s")
        column[0].set_xlabel("step")
        if result["gpu"]:
            elapsed, power, busy = np.array(result["gpu"]).T
            column[1].plot(elapsed, power, color=COLORS[mode])
            column[2].plot(elapsed, busy, color=COLORS[mode])
            column[2].set_xlabel("seconds")
    for axis, label in zip(grid[:, 0], ("step, s", "power, W", "GPU busy, %"), strict=False):
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)

"""Pictures of the planner's benchmark: gap and CPU seconds per method and distribution."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from planner_peers import OWN, PEERS

_OWN_COLORS = ("#08306b", "#2f7fbf", "#9ecae1")
#: In the order of PEERS; what a project does has a darker shade of its method's colour.
_PEER_COLORS = (
    *("#7f2704", "#d94801", "#fdae6b", "#bf812d"),
    *("#666666", "#c9a227", "#b07aa1", "#6a3d7c"),
)
_LEAST_GAP = 0.001  # per cent; smaller gaps are drawn here


def _bars(axes: Axes, rows: Sequence[dict[str, Any]], column: str, least: float) -> None:
    """Grouped bars on a log scale, one group per distribution; own methods in blue."""
    distributions = list(dict.fromkeys(row["distribution"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    colors = dict(zip([*OWN, *PEERS], [*_OWN_COLORS, *_PEER_COLORS], strict=True))
    found = {(row["distribution"], row["method"]): row[column] for row in rows}
    width = 0.86 / len(methods)
    for place, method in enumerate(methods):
        at = np.arange(len(distributions)) + (place - (len(methods) - 1) / 2) * width
        heights = np.array(
            [found.get((distribution, method), np.nan) for distribution in distributions]
        )
        axes.bar(at, np.maximum(heights, least), 0.92 * width, label=method, color=colors[method])
        for x, height in zip(at, heights, strict=True):
            if height < least:
                axes.annotate("0", (x, least), ha="center", va="bottom", color=colors[method])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(
        np.arange(len(distributions)), [Path(distribution).name for distribution in distributions]
    )
    axes.grid(axis="y", color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _save(
    rows: Sequence[dict[str, Any]], column: str, least: float, label: str, path: Path
) -> None:
    figure, axes = plt.subplots(figsize=(10, 4.2), layout="constrained")
    _bars(axes, rows, column, least)
    axes.set_ylabel(label)
    axes.set_ylim(bottom=least)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_gap(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Packs above the lower bound, in per cent."""
    _save(rows, "gap %", _LEAST_GAP, "packs above the lower bound, %", path)


def draw_seconds(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """CPU seconds, without the start of the process."""
    least = 0.5 * min(row["CPU seconds"] for row in rows)
    _save(rows, "CPU seconds", max(least, 1e-4), "CPU seconds", path)

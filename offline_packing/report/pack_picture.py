"""The same samples padded and packed: which of them are shown, and as a picture."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offline_packing.planner.pack_plan import PackPlan

_PADDING = "0.85"


def draw_packs(
    lengths: npt.NDArray[np.integer],
    plan: PackPlan,
    path: Path,
    *,
    padded_batch_size: int = 8,
    num_rows: int = 40,
    seed: int = 0,
) -> Path:
    """Draw rows of batches padded to their longest sample beside rows of packs.

    Args:
        lengths: (num_samples,) tokens of every sample of the index.
        plan: a plan over that index.
        path: the PNG to write.
        padded_batch_size: samples in a padded batch, drawn in random order.
        num_rows: rows drawn of each.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seq_length = plan.info.seq_length
    drawn = padded_rows(lengths[plan.sample_ids], padded_batch_size, num_rows, seed)
    padded = [(np.array([length]), width) for length, width in drawn]
    chosen = choose_packs(plan.num_packs, num_rows).tolist()
    packed = [(lengths[plan.pack(number)], seq_length) for number in chosen]
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 6), sharex=True)
    titles = (f"padded to the longest of {padded_batch_size}", f"packed to {seq_length:,} tokens")
    for axis, rows, title in zip(axes, (padded, packed), titles, strict=True):
        real = sum(int(np.sum(row)) for row, _ in rows)
        total = sum(width for _, width in rows)
        _draw_rows(axis, rows)
        axis.set_title(f"{title}\n{1 - real / total:.1%} padding (grey)")
        axis.set(xlabel="tokens", ylabel="row" if axis is axes[0] else "")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _draw_rows(axis: Any, rows: list[tuple[npt.NDArray[np.integer], int]]) -> None:
    """One bar per sub-sample in alternating colours, grey up to the row's width."""
    from matplotlib import colormaps

    # tab20 without its two greys, which would look like padding
    colours = [colormaps["tab20"](i) for i in range(20) if i not in (14, 15)]
    axis.barh(range(len(rows)), [width for _, width in rows], color=_PADDING, height=0.9)
    for row, (segments, _) in enumerate(rows):
        starts = np.concatenate([[0], np.cumsum(segments)[:-1]])
        shades = [colours[(7 * row + i) % len(colours)] for i in range(len(segments))]
        axis.barh([row] * len(segments), segments, left=starts, color=shades, height=0.9)
    axis.set_ylim(len(rows), -1)


def choose_packs(num_packs: int, count: int) -> npt.NDArray[np.int64]:
    """Numbers of at most `count` packs, evenly over all."""
    return np.unique(np.linspace(0, num_packs - 1, min(count, num_packs)).astype(np.int64))


def padded_rows(
    lengths: npt.NDArray[np.integer], batch_size: int, num_rows: int, seed: int
) -> list[tuple[int, int]]:
    """(tokens, padded to) of samples in random batches: whole batches, about `num_rows` rows.

    Args:
        lengths: (num_packed,) tokens of the samples, at least one.
    """
    wanted = min(len(lengths), -(-num_rows // batch_size) * batch_size)
    chosen = np.random.default_rng(seed).choice(len(lengths), wanted, replace=False)
    rows = []
    for start in range(0, wanted, batch_size):
        batch = lengths[chosen[start : start + batch_size]].tolist()
        rows += [(length, max(batch)) for length in batch]
    return rows

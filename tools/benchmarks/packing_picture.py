"""Draw the README's picture: the same samples padded, packed while training, and packed before.

    python tools/benchmarks/packing_picture.py [docs/images/packing.png]

Shows the first sequences of each mode; the figures count all.
"""

import itertools
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from length_distributions import draw_sft

from offline_packing import plan_packs

SEQ_LENGTH = 8192
NUM_SAMPLES = 20_000
#: samples that packing while training sees at once
BUFFER = 64
#: sequences of each mode that are drawn
SHOWN = 36
#: samples of a padded batch
BATCH = 4


def padded(lengths: np.ndarray) -> np.ndarray:
    """Tokens computed for each sample: the longest of its batch."""
    longest: np.ndarray = lengths.reshape(-1, BATCH).max(axis=1)
    return np.repeat(longest, BATCH)


def packed(lengths: np.ndarray, strategy: str) -> list[np.ndarray]:
    """Lengths in each pack."""
    return [lengths[pack] for pack in plan_packs(lengths, SEQ_LENGTH, strategy=strategy)]


def packed_online(lengths: np.ndarray) -> list[np.ndarray]:
    """Each buffer by itself, with the greedy knapsack."""
    buffers = lengths.reshape(-1, BUFFER)
    return list(itertools.chain(*(packed(one, "first_fit_decreasing") for one in buffers)))


def draw(axis: plt.Axes, title: str, rows: list[np.ndarray], room: np.ndarray) -> None:
    """Bars of samples in the room that is computed for them."""
    top = np.arange(SHOWN, dtype=float)
    axis.barh(top, room[:SHOWN], 0.82, color="#d5d9de")
    for y, row in zip(top, rows, strict=False):
        colours = ["#1f6fb2" if i % 2 == 0 else "#5aa3d9" for i in range(len(row))]
        axis.barh(y, row, 0.82, left=np.cumsum(row) - row, color=colours)
    axis.set_title(title, fontsize=11, loc="left", linespacing=1.4)
    axis.set_ylim(SHOWN - 0.3, -0.7)
    axis.set_xlim(0, SEQ_LENGTH)
    axis.axis("off")


def main() -> None:
    """Draw, save, and print the figures."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images/packing.png")
    lengths = draw_sft(NUM_SAMPLES // BUFFER * BUFFER)[0]
    room = padded(lengths)
    modes = [
        ("Padded", [np.array([n]) for n in lengths], room),
        *(
            (name, packs, np.full(len(packs), SEQ_LENGTH))
            for name, packs in (
                (f"Packed while training, {BUFFER} at a time", packed_online(lengths)),
                ("Packed before training", packed(lengths, "auto")),
            )
        ),
    ]
    figure, axes = plt.subplots(1, 3, figsize=(11, 4.6))
    for axis, (name, rows, computed) in zip(axes, modes, strict=True):
        full = lengths.sum() / computed.sum()
        figures = f"{full:.2%} full, {len(rows):,} sequences"
        draw(axis, f"{name}\n{figures}", rows, computed)
        print(
            f"{name}: {full:.2%} full, {len(rows):,} sequences, {computed.sum():,} tokens computed"
        )
    figure.subplots_adjust(left=0.01, right=0.99, top=0.87, bottom=0.01, wspace=0.06)
    figure.savefig(path, dpi=110, facecolor="white", metadata={"Software": None})


if __name__ == "__main__":
    main()

"""Drawn lengths, limits of packs and options of windows, sums over packs, and packs as lists."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from offline_packing.planner.strategies.composition import Composition
from offline_packing.planner.strategies.strategy import Packs
from offline_packing.planner.windows import WindowOptions


@st.composite
def limited_sizes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Sizes (n, 1 to 3 limits), tokens first, and the limits."""
    limits = np.array(draw(st.lists(st.integers(1, 60), min_size=1, max_size=3)))
    row = st.tuples(*(st.integers(0, limit) for limit in limits))
    sizes = np.array(draw(st.lists(row, max_size=60)), np.int64).reshape(-1, len(limits))
    sizes[:, 0] = np.maximum(sizes[:, 0], 1)
    return sizes, limits


@st.composite
def length_counts(draw: st.DrawFn) -> np.ndarray:
    """Histograms of up to 200 lengths, (capacity + 1,)."""
    capacity = draw(st.integers(1, 300))
    largest = draw(st.integers(1, capacity))
    smallest = draw(st.integers(1, largest))
    lengths = draw(st.lists(st.integers(smallest, largest), max_size=200))
    return np.bincount(np.array(lengths, np.int64), minlength=capacity + 1)


def as_lists(packs: Packs) -> list[list[int]]:
    """Sample numbers of each pack."""
    parts = np.split(packs.sample_ids, packs.pack_offsets[1:-1])
    return [ids.tolist() for ids in parts if len(ids)]


def contents(composition: Composition) -> list[list[int]]:
    """Lengths in every pack, in order."""
    packs = []
    for j, count in enumerate(composition.multiplicity):
        entries = slice(composition.offsets[j], composition.offsets[j + 1])
        content = np.repeat(composition.lengths[entries], composition.times[entries]).tolist()
        packs += [content] * int(count)
    return packs


def window_options(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[WindowOptions]:
    """Options of small windows, with further fields."""
    return st.builds(
        WindowOptions,
        seq_length=st.integers(60, 200),
        window=st.integers(1, 40),
        max_age=st.integers(0, 4),
        max_carried=st.integers(0, 10),
        full_at=st.sampled_from([0.9, 1.0]),
        **more,
    )

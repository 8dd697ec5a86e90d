"""Packs as lists, for comparisons with loops over samples."""

import numpy as np

from offline_packing.planner.strategies.strategy import Packs


def as_lists(packs: Packs) -> list[list[int]]:
    """Sample numbers of each pack."""
    parts = np.split(packs.sample_ids, packs.pack_offsets[1:-1])
    return [ids.tolist() for ids in parts if len(ids)]

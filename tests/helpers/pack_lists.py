"""Packs as lists, for comparisons with loops over samples."""

import numpy as np

from offline_packing.planner.strategies.composition import Composition
from offline_packing.planner.strategies.strategy import Packs


def as_lists(packs: Packs) -> list[list[int]]:
    """Sample numbers of each pack."""
    parts = np.split(packs.sample_ids, packs.pack_offsets[1:-1])
    return [ids.tolist() for ids in parts if len(ids)]


def contents(composition: Composition) -> list[list[int]]:
    """Lengths in every pack, in order."""
    packs = []
    for j, count in enumerate(composition.multiplicity):
        entries = slice(composition.offsets[j], composition.offsets[j + 1])
        content = np.repeat(composition.lengths[entries], composition.repeats[entries]).tolist()
        packs += [content] * int(count)
    return packs

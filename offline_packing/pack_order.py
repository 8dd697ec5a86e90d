"""In which order the packs are written, and so trained on."""

import numpy as np
from numba import njit

from offline_packing.strategies.packs import Packs


def shuffled_order(num_packs: int, seed: int) -> np.ndarray:
    """A seeded permutation of the packs: int64 (num_packs,)."""
    return np.random.default_rng(seed).permutation(num_packs)


@njit(cache=True)
def _gather_packs(
    sample_ids: np.ndarray,
    pack_offsets: np.ndarray,
    order: np.ndarray,
    out_ids: np.ndarray,
    out_offsets: np.ndarray,
) -> None:
    end = 0
    for place in range(order.shape[0]):
        pack = order[place]
        for source in range(pack_offsets[pack], pack_offsets[pack + 1]):
            out_ids[end] = sample_ids[source]
            end += 1
        out_offsets[place + 1] = end


def reorder_packs(packs: Packs, order: np.ndarray) -> Packs:
    """The packs in the given order: place i gets pack ``order[i]``; order is a permutation."""
    out_ids = np.empty_like(packs.sample_ids)
    out_offsets = np.zeros_like(packs.pack_offsets)
    _gather_packs(packs.sample_ids, packs.pack_offsets, order, out_ids, out_offsets)
    return Packs(out_ids, out_offsets)

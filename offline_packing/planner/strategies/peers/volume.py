"""``to_constant_volume`` of the PyPI package binpacking 1.5, which ms-swift packs with."""

import numpy as np
from numba import njit

from offline_packing.planner.strategies.by_sample import (
    check_lengths,
    decreasing_order,
    group_into_packs,
)
from offline_packing.planner.strategies.kernels import bitset_add, bitset_at_least, bitset_remove
from offline_packing.planner.strategies.packs import Packs
from offline_packing.planner.strategies.peers.heaps import heap_pop, heap_push


@njit(cache=True)
def _fullest_fit(lengths: np.ndarray, seq_length: int) -> tuple[np.ndarray, int]:
    """Pack of every sample, int64 (num_samples,), and the number of packs.

    ``oldest[r]`` is the queue of packs with residual r by age; ``residuals`` the set of r in use.
    """
    oldest = np.full(seq_length + 1, -1, np.int32)
    residuals = np.zeros((seq_length >> 6) + 1, np.uint64)
    # All packs of a queue are equally full, so that it is ordered by the index alone.
    equal = np.zeros(lengths.shape[0], np.uint8)
    children = np.full((lengths.shape[0], 2), -1, np.int32)
    pack_of = np.empty(lengths.shape[0], np.int64)
    num_packs = 0
    for sample in range(lengths.shape[0]):
        residual = bitset_at_least(residuals, lengths[sample])
        if residual < 0:
            residual = seq_length
            pack = num_packs
            num_packs += 1
        else:
            pack = oldest[residual]
            oldest[residual] = heap_pop(equal, children, pack)
            if oldest[residual] < 0:
                bitset_remove(residuals, residual)
        pack_of[sample] = pack
        residual -= lengths[sample]
        if residual > 0:
            oldest[residual] = heap_push(equal, children, oldest[residual], pack)
            bitset_add(residuals, residual)
    return pack_of, num_packs


def to_constant_volume(num_tokens: np.ndarray, seq_length: int, *, seed: int = 0) -> Packs:
    """Longest sample first, each into the fullest pack with room, the oldest of equally full ones.

    Packs, their order and the order of their samples equal ``binpacking.to_constant_volume(lengths,
    seq_length)`` of binpacking 1.5, which scans all packs for every sample. Version 2 of that
    package fills the emptiest pack instead, and needs more packs. O(n log n); ``seed`` is unused.

    ``num_tokens`` integers (num_samples,) in 1..seq_length, else ValueError.
    """
    lengths = check_lengths(num_tokens, seq_length)
    order = decreasing_order(lengths, seq_length)
    pack_of, num_packs = _fullest_fit(lengths[order], seq_length)
    return group_into_packs(order, pack_of, num_packs)

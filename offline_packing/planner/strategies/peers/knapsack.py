"""Packers that choose among all open packs: the fullest with room, or the lightest."""

from functools import partial
from heapq import heappop, heappush

import numpy as np
from numba import njit
from pydantic import Field

from offline_packing.planner.strategies.kernels import (
    bitset_add,
    bitset_at_least,
    bitset_remove,
    list_of,
)
from offline_packing.planner.strategies.strategy import (
    Packs,
    Strategy,
    StrategyOptions,
    group_into_packs,
)


@njit(cache=True)
def _fullest_fit(lengths: np.ndarray, seq_length: int) -> np.ndarray:
    """Pack of every sample, int64 (num_samples,). ``packs[r]`` is the queue of packs with residual
    r by age; ``residuals`` the set of r in use."""
    packs = [list_of(0) for _ in range(seq_length + 1)]  # heaps
    residuals = np.zeros((seq_length >> 6) + 1, np.uint64)
    pack_of = np.empty(lengths.shape[0], np.int64)
    num_packs = 0
    for sample in range(lengths.shape[0]):
        residual = bitset_at_least(residuals, lengths[sample])
        if residual < 0:
            residual = seq_length
            pack = num_packs
            num_packs += 1
        else:
            pack = heappop(packs[residual])
            if len(packs[residual]) == 0:
                bitset_remove(residuals, residual)
        pack_of[sample] = pack
        residual -= lengths[sample]
        if residual > 0:
            heappush(packs[residual], pack)
            bitset_add(residuals, residual)
    return pack_of


@Strategy
def to_constant_volume(lengths: np.ndarray, seq_length: int, *, seed: int = 0) -> Packs:
    """Longest sample first, each into the fullest pack with room, the oldest of equally full ones.

    Packs, their order and the order of their samples equal ``binpacking.to_constant_volume(lengths,
    seq_length)`` of binpacking 1.5 (PyPI), which ms-swift packs with, and which scans all packs for
    every sample. Version 2 of that package fills the emptiest pack instead, and needs more packs.
    O(n log n); ``seed`` is unused.
    """
    order = np.argsort(-lengths, kind="stable")
    pack_of = _fullest_fit(lengths[order], seq_length)
    return group_into_packs(order, pack_of, int(pack_of.max(initial=-1)) + 1)


@njit(cache=True)
def _balance(
    lengths: np.ndarray, num_images: np.ndarray, seq_length: int, max_images: int, num_packs: int
) -> np.ndarray:
    """Pack of every sample, int64 (num_samples,); some of the first ``num_packs`` may have none.
    Packs with the same number of images wait in one queue, the lightest (of equal ones the oldest)
    at its head: load << 32 | pack."""
    packs = [list_of(0) for _ in range(max_images + 1)]  # heaps
    for pack in range(num_packs):
        packs[0].append(pack)
    pack_of = np.empty(lengths.shape[0], np.int64)
    for sample in range(lengths.shape[0]):
        images = -1
        for queue in range(max_images - num_images[sample] + 1):
            if len(packs[queue]) and (images < 0 or packs[queue][0] < packs[images][0]):
                images = queue
        lightest = packs[images][0] if images >= 0 else np.int64(seq_length) << 32
        if (lightest >> 32) + lengths[sample] > seq_length:
            images = 0
            lightest = num_packs
            num_packs += 1
        else:
            heappop(packs[images])
        pack_of[sample] = lightest & 0xFFFFFFFF
        heappush(packs[images + num_images[sample]], lightest + (np.int64(lengths[sample]) << 32))
    return pack_of


def _check_images(
    num_images: np.ndarray | None, max_images: int | None, num_samples: int
) -> tuple[np.ndarray, int]:
    """Images per sample, int64 (num_samples,), and the budget; all 0 where there is none."""
    if (num_images is None) != (max_images is None):
        raise ValueError("num_images and max_images make one budget; give both or neither")
    if num_images is None or max_images is None:
        return np.zeros(num_samples, np.int64), 0
    images = np.asarray(num_images, np.int64)
    if images.shape != (num_samples,):
        raise ValueError(f"num_images has shape {images.shape}, num_tokens ({num_samples},)")
    bad = (images < 0) | (images > max_images)
    if bad.any():
        sample = int(bad.argmax())
        raise ValueError(
            f"sample {sample} has {images[sample]} images, not in 0..max_images {max_images}; "
            "set such samples aside before packing"
        )
    return images, max_images


class KnapsackOptions(StrategyOptions):
    """How many packs it starts with, and a budget of images."""

    num_images: np.ndarray | None = Field(None, exclude=True, description="images of each sample")
    max_images: int | None = Field(None, exclude=True, description="images of a pack at most")
    num_packs: int | None = Field(
        None, ge=0, description="packs to begin with; by default as few as the tokens need"
    )
    extra_packs: int = Field(0, ge=0, description="packs beyond these: less full, and more even")


@partial(Strategy, options=KnapsackOptions)
def knapsack(lengths: np.ndarray, seq_length: int, *, options: KnapsackOptions, seed: int) -> Packs:
    """Longest sample first, each into the lightest pack with room for its tokens and images.

    The balanced greedy knapsack of nanoVLM's loader: it starts with ``num_packs`` empty packs
    (default: as few as the tokens need) plus ``extra_packs``, fills them evenly, opens a further
    one where no pack has room, drops those that stay empty, and returns the packs in a seeded
    random order. nanoVLM's loader sets ``extra_packs=5``: more packs, less full, and more even.

    ``num_images`` are in 0..max_images, else ValueError. O(n (log n + max_images)) instead of a
    sort of all packs per sample.
    """
    images, budget = _check_images(options.num_images, options.max_images, len(lengths))
    num_packs = options.num_packs
    if num_packs is None:
        num_packs = -(-int(lengths.sum(dtype=np.int64)) // seq_length)
    order = np.argsort(-lengths, kind="stable")
    num_packs += options.extra_packs
    pack_of = _balance(lengths[order], images[order], seq_length, budget, num_packs)
    used, pack_of = np.unique(pack_of, return_inverse=True)  # packs that stayed empty drop out
    shuffled = np.random.default_rng(seed).permutation(len(used))
    return group_into_packs(order, shuffled[pack_of], len(used))

"""Balanced greedy knapsack: tokens spread evenly over k packs, images within a budget."""

from typing import ClassVar

import numpy as np
from numba import njit
from pydantic import Field

from offline_packing.planner.strategies.by_sample import (
    check_lengths,
    decreasing_order,
    group_into_packs,
)
from offline_packing.planner.strategies.packs import Packs
from offline_packing.planner.strategies.peers.heaps import heap_pop, heap_push, lighter
from offline_packing.planner.strategies.strategy import Strategy, StrategyOptions


@njit(cache=True)
def _update_lightest(lightest: np.ndarray, load: np.ndarray, leaf: int, pack: int) -> None:
    """Put ``pack`` (or -1) on a leaf of the tournament tree and replay the games above it."""
    lightest[leaf] = pack
    while leaf > 1:
        leaf //= 2
        a, b = lightest[2 * leaf], lightest[2 * leaf + 1]
        lightest[leaf] = a if b < 0 or (a >= 0 and lighter(load, a, b)) else b


@njit(cache=True)
def _lightest_up_to(lightest: np.ndarray, load: np.ndarray, last_leaf: int) -> int:
    """The lightest pack on the leaves up to ``last_leaf``, or -1."""
    best = lightest[last_leaf]
    node = last_leaf
    while node > 1:
        if node % 2 == 1 and lightest[node - 1] >= 0:
            other = lightest[node - 1]
            best = other if best < 0 or lighter(load, other, best) else best
        node //= 2
    return best


@njit(cache=True)
def _balance(
    lengths: np.ndarray, num_images: np.ndarray, seq_length: int, max_images: int, num_packs: int
) -> tuple[np.ndarray, int]:
    """Pack of every sample, int64 (num_samples,), and the number of packs, empty ones included.

    Packs with the same number of images wait in one queue, the lightest at its head; a tournament
    tree over the queues finds the lightest pack among those with room for a sample's images.
    """
    load = np.zeros(num_packs + lengths.shape[0], np.int64)
    images = np.zeros(load.shape[0], np.int64)
    children = np.full((load.shape[0], 2), -1, np.int32)
    heads = np.full(max_images + 1, -1, np.int64)
    num_leaves = 1
    while num_leaves <= max_images:
        num_leaves *= 2
    lightest = np.full(2 * num_leaves, -1, np.int64)
    for pack in range(num_packs):
        heads[0] = heap_push(load, children, heads[0], pack)
    _update_lightest(lightest, load, num_leaves, heads[0])
    pack_of = np.empty(lengths.shape[0], np.int64)
    for sample in range(lengths.shape[0]):
        room = num_leaves + max_images - num_images[sample]
        pack = _lightest_up_to(lightest, load, room)
        if pack < 0 or load[pack] + lengths[sample] > seq_length:
            pack = num_packs
            num_packs += 1
        else:
            queue = images[pack]
            heads[queue] = heap_pop(load, children, pack)
            _update_lightest(lightest, load, num_leaves + queue, heads[queue])
        pack_of[sample] = pack
        load[pack] += lengths[sample]
        images[pack] += num_images[sample]
        queue = images[pack]
        heads[queue] = heap_push(load, children, heads[queue], pack)
        _update_lightest(lightest, load, num_leaves + queue, heads[queue])
    return pack_of, num_packs


def _check_images(
    num_images: np.ndarray | None, max_images: int | None, num_samples: int
) -> tuple[np.ndarray, int]:
    """Images per sample, int64 (num_samples,), and the budget; all 0 where there is none."""
    if num_images is None or max_images is None:
        if num_images is not None or max_images is not None:
            raise ValueError("num_images and max_images make one budget; give both or neither")
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

    PER_SAMPLE: ClassVar[frozenset[str]] = frozenset({"num_images", "max_images"})

    num_images: np.ndarray | None = Field(None, description="images of each sample")
    max_images: int | None = Field(None, description="images that a pack holds at most")
    num_packs: int | None = Field(
        None, ge=0, description="packs to begin with; by default as few as the tokens need"
    )
    extra_packs: int = Field(0, ge=0, description="packs beyond these: less full, and more even")


def _knapsack(
    num_tokens: np.ndarray, seq_length: int, *, options: KnapsackOptions, seed: int = 0
) -> Packs:
    """Longest sample first, each into the lightest pack with room for its tokens and images.

    The balanced greedy knapsack of nanoVLM's loader: it starts with ``num_packs`` empty packs
    (default: as few as the tokens need) plus ``extra_packs``, fills them evenly, opens a further
    one where no pack has room, drops those that stay empty, and returns the packs in a seeded
    random order. nanoVLM's loader sets ``extra_packs=5``: more packs, less full, and more even.

    ``num_tokens`` integers (num_samples,) in 1..seq_length and ``num_images`` in 0..max_images,
    else ValueError. O(n log n) instead of a sort of all packs per sample.
    """
    lengths = check_lengths(num_tokens, seq_length)
    images, budget = _check_images(options.num_images, options.max_images, len(lengths))
    num_packs = options.num_packs
    if num_packs is None:
        num_packs = -(-int(lengths.sum(dtype=np.int64)) // seq_length)
    order = decreasing_order(lengths, seq_length)
    pack_of, _ = _balance(
        lengths[order], images[order], seq_length, budget, num_packs + options.extra_packs
    )
    used, pack_of = np.unique(pack_of, return_inverse=True)  # packs that stayed empty drop out
    shuffled = np.random.default_rng(seed).permutation(len(used))
    return group_into_packs(order, shuffled[pack_of], len(used))


knapsack = Strategy(_knapsack, KnapsackOptions)

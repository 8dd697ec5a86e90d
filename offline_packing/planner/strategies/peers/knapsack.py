"""Packers that choose among all open packs: the fullest with room, or the lightest."""

from functools import partial

import numpy as np
from pydantic import Field

from offline_packing.planner.strategies.peers.placing import (
    FULLEST,
    LIGHTEST,
    place_in_order,
    place_samples,
)
from offline_packing.planner.strategies.strategy import (
    Packs,
    StrategyOptions,
    group_into_packs,
    under_limits,
)


@under_limits
def to_constant_volume(sizes: np.ndarray, limits: np.ndarray, *, seed: int) -> Packs:
    """Longest sample first, each into the fullest pack with room, the oldest of equally full ones.

    Without budgets, packs, their order and the order of their samples equal
    ``binpacking.to_constant_volume(lengths, seq_length)`` of binpacking 1.5 (PyPI), which ms-swift
    packs with, and which scans all packs for every sample. Version 2 of that package fills the
    emptiest pack instead, and needs more packs. ``seed`` is unused.
    """
    return place_in_order(sizes, limits, np.argsort(-sizes[:, 0], kind="stable"), FULLEST)


class KnapsackOptions(StrategyOptions):
    """Number of packs to start with."""

    num_packs: int | None = Field(
        None, ge=0, description="packs to begin with; by default as few as the tokens need"
    )
    extra_packs: int = Field(0, ge=0, description="packs beyond these: less full, and more even")


@partial(under_limits, options=KnapsackOptions)
def knapsack(
    sizes: np.ndarray, limits: np.ndarray, *, options: KnapsackOptions, seed: int
) -> Packs:
    """Longest sample first, each into the lightest pack with room for it, within every budget.

    The balanced greedy knapsack of nanoVLM's loader: it starts with ``num_packs`` empty packs
    (default: as few as the tokens need) plus ``extra_packs``, fills them evenly, opens a further
    one where no pack has room, drops those that stay empty, and returns the packs in a seeded
    random order. nanoVLM's loader sets ``extra_packs=5``, its ``delta``, and a budget of 18 images.
    """
    num_packs = options.num_packs
    if num_packs is None:
        num_packs = -(-int(sizes[:, 0].sum()) // int(limits[0]))
    order = np.argsort(-sizes[:, 0], kind="stable")
    pack_of = place_samples(sizes[order], limits, LIGHTEST, num_packs + options.extra_packs)
    used, pack_of = np.unique(pack_of, return_inverse=True)  # packs that stayed empty drop out
    # Not the stream of `seed` alone: a caller who shuffles the packs with it would sort them again.
    shuffled = np.random.default_rng([seed, 1]).permutation(len(used))
    return group_into_packs(order, shuffled[pack_of], len(used))

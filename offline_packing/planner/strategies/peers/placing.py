"""Packers that place samples one after the other, each into an open pack with room for it under
all limits: the first of them, the fullest, or the lightest.

First-fit-decreasing, first fit shuffled in chunks and shuffle-and-pack are the three algorithms of
NeMo's sequence packing for NeVA, whose first fit scans all open packs for every sample. Here packs
are the leaves of a tree. A node holds, for each limit, the least that a pack below it uses, and the
lowest score of these packs; so a search skips nodes without room, or no better than the best so
far. It looks at about log n nodes per sample; at more where a second limit is scarce, and at most
at twice the nodes of a scan of all packs.
"""

from functools import partial
from typing import Final

import numpy as np
from pydantic import Field

from offline_packing.planner.strategies.composition import by_histogram
from offline_packing.planner.strategies.kernels import Kernel
from offline_packing.planner.strategies.longest_first import greedy_knapsack
from offline_packing.planner.strategies.strategy import (
    Packs,
    Strategy,
    StrategyOptions,
    group_into_packs,
    join_packs,
)
from task_encoders.threads import in_threads

#: Choice among the packs with room; of equally full ones the oldest.
FIRST: Final = 0
LIGHTEST: Final = 1
FULLEST: Final = -1

_NOT_OPEN = (1 << 63) - 1  # score of a pack that is taken only if no open one has room


@Kernel
def _has_room(used: np.ndarray, size: np.ndarray, limits: np.ndarray) -> bool:
    for limit in range(limits.shape[0]):  # noqa: SIM110 (numba compiles no generators)
        if used[limit] + size[limit] > limits[limit]:
            return False
    return True


@Kernel
def _best_leaf(tree: np.ndarray, size: np.ndarray, limits: np.ndarray, stack: np.ndarray) -> int:
    """Find the leaf of lowest score among the leaves with room; there must be one. ``stack`` has
    space for a node of each level."""
    score = limits.shape[0]
    best = 0
    least = _NOT_OPEN
    stack[0] = 1
    height = 1
    while height > 0:
        height -= 1
        node = stack[height]
        if (best > 0 and tree[node, score] >= least) or not _has_room(tree[node], size, limits):
            continue
        if 2 * node >= tree.shape[0]:
            best = node
            least = tree[node, score]
            continue
        first = 2 * node + (tree[2 * node + 1, score] < tree[2 * node, score])
        stack[height] = first ^ 1
        stack[height + 1] = first
        height += 2
    return best


@Kernel
def place_samples(sizes: np.ndarray, limits: np.ndarray, choice: int, num_open: int) -> np.ndarray:
    """Place every sample; return its pack, int64 (num_samples,), counted in the order of opening.

    ``sizes`` int64 (num_samples, num_limits), tokens first, in the order of placing, each within
    ``limits``, int64 (num_limits,). ``choice`` is FIRST, LIGHTEST or FULLEST by tokens. The first
    ``num_open`` packs are open from the beginning and may stay empty.
    """
    num_samples, score = sizes.shape
    # A pack is opened when no other has room, so that any two together are over some limit: their
    # number is at most twice the sum of the shares of all limits.
    most_packs = num_open + min(num_samples, 2 + int(2 * (sizes.sum(axis=0) / limits).sum()))
    num_leaves = 1
    height = 3
    while num_leaves < most_packs:
        num_leaves *= 2
        height += 1
    stack = np.empty(height, np.int64)
    tree = np.zeros((2 * num_leaves, score + 1), np.int64)  # leaves: num_leaves + pack
    tree[:, score] = _NOT_OPEN
    tree[num_leaves : num_leaves + num_open, score] = np.arange(num_open)
    for node in range(num_leaves - 1, 0, -1):
        tree[node, score] = min(tree[2 * node, score], tree[2 * node + 1, score])
    pack_of = np.empty(num_samples, np.int64)
    for sample in range(num_samples):
        node = _best_leaf(tree, sizes[sample], limits, stack)
        pack_of[sample] = pack = node - num_leaves
        for limit in range(score):
            tree[node, limit] += sizes[sample, limit]
        tree[node, score] = choice * (tree[node, 0] << 32) + pack
        while node > 1:
            node //= 2
            for column in range(score + 1):
                tree[node, column] = min(tree[2 * node, column], tree[2 * node + 1, column])
    return pack_of


def place_in_order(sizes: np.ndarray, limits: np.ndarray, order: np.ndarray, choice: int) -> Packs:
    """Pack the samples ``order``, int64 (k,), placed in that order by :func:`place_samples`."""
    pack_of = place_samples(sizes[order], limits, choice, 0)  # a default would be compiled apart
    return group_into_packs(order, pack_of)


def _longest_first(sizes: np.ndarray, limits: np.ndarray, *, seed: int, choice: int) -> Packs:
    return place_in_order(sizes, limits, np.argsort(-sizes[:, 0], kind="stable"), choice)


#: Longest sample first, each into the first pack with room for it. The first pack ends up with what
#: a greedy knapsack would choose for it: the longest sample that still fits, again and again; then
#: the second pack, and so on. So the packs, their order and their samples are the same, found with
#: multiplicity where there are no budgets; ``seed`` is unused.
first_fit_decreasing = by_histogram(greedy_knapsack, partial(_longest_first, choice=FIRST))

#: Longest sample first, each into the fullest pack with room, the oldest of equally full ones.
#: Without budgets, packs, their order and the order of their samples equal
#: ``binpacking.to_constant_volume(lengths, seq_length)`` of binpacking 1.5 (PyPI), which ms-swift
#: packs with, and which scans all packs for every sample. Version 2 of that package fills the
#: emptiest pack instead, and needs more packs. ``seed`` is unused.
to_constant_volume = Strategy(partial(_longest_first, choice=FULLEST))


class FirstFitShuffleOptions(StrategyOptions):
    """Division of the samples."""

    chunk_size: int = Field(20_000, ge=1, description="samples that are packed independently")
    num_threads: int = Field(1, ge=1, description="threads that pack them; changes no pack")


@partial(Strategy, options=FirstFitShuffleOptions)
def first_fit_shuffle(
    sizes: np.ndarray, limits: np.ndarray, *, options: FirstFitShuffleOptions, seed: int
) -> Packs:
    """Put samples, in a seeded random order, into the first pack of their chunk with room. Chunks
    of ``chunk_size`` samples are packed independently, on ``num_threads`` threads; the packs follow
    in the order of the chunks, so that the plan does not depend on the number of threads."""
    order = np.random.default_rng(seed).permutation(len(sizes))
    chunks = np.split(order, range(options.chunk_size, len(order), options.chunk_size))
    place = partial(place_in_order, sizes, limits, choice=FIRST)
    if len(chunks) == 1:  # perhaps a small plan, whose choice of kernels threads do not see
        return place(chunks[0])
    return join_packs(list(in_threads(place, chunks, options.num_threads)))


@Kernel
def _next_fit(sizes: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Close a pack when the next sample does not fit; return the offsets, int64 (num_packs +
    1,)."""
    num_samples = len(sizes)
    offsets = np.zeros(num_samples + 1, np.int64)
    num_packs = 0
    used = limits.copy()  # of the open pack: there is none yet
    for sample in range(num_samples):
        if not _has_room(used, sizes[sample], limits):
            offsets[num_packs] = sample
            num_packs += 1
            used[:] = 0
        used += sizes[sample]
    offsets[num_packs] = num_samples
    return offsets[: num_packs + 1].copy()


@Strategy
def shuffle_and_pack(sizes: np.ndarray, limits: np.ndarray, *, seed: int) -> Packs:
    """Add samples in a seeded random order, and start a new pack whenever the next one does not
    fit. O(n)."""
    order = np.random.default_rng(seed).permutation(len(sizes))
    return Packs(order, _next_fit(sizes[order], limits))


class SequentialOptions(StrategyOptions):
    """Limits beside tokens."""

    max_samples: int | None = Field(None, ge=1, description="samples that a pack holds at most")


@partial(Strategy, options=SequentialOptions)
def sequential(
    sizes: np.ndarray, limits: np.ndarray, *, options: SequentialOptions, seed: int
) -> Packs:
    """Add samples in their order until the next one does not fit, then start a new pack. O(n).

    The greedy packing of nanoVLM's data pipeline, and with ``max_samples`` the two batch modes of
    VeOmni: a token budget (``dyn_bsz``) or a fixed number of samples. ``seed`` is unused: this is
    the strategy that keeps the order of the samples.
    """
    if options.max_samples is not None:
        sizes = np.column_stack([sizes, np.ones(len(sizes), np.int64)])
        limits = np.append(limits, options.max_samples)
    return Packs(np.arange(len(sizes)), _next_fit(sizes, limits))


class KnapsackOptions(StrategyOptions):
    """Number of packs to start with."""

    num_packs: int | None = Field(
        None, ge=0, description="packs to begin with; by default as few as the tokens need"
    )
    extra_packs: int = Field(0, ge=0, description="packs beyond these: less full, and more even")


@partial(Strategy, options=KnapsackOptions)
def knapsack(
    sizes: np.ndarray, limits: np.ndarray, *, options: KnapsackOptions, seed: int
) -> Packs:
    """Put each sample, the longest first, into the lightest pack with room for it, within every
    budget.

    The balanced greedy knapsack of nanoVLM's loader: it starts with ``num_packs`` empty packs
    (default: the fewest that the tokens need) plus ``extra_packs``, fills them evenly, opens a
    further one if no pack has room, drops empty ones, and returns the packs in a seeded random
    order. nanoVLM's loader sets ``extra_packs=5``, its ``delta``, and a budget of 18 images.
    """
    num_packs = options.num_packs
    if num_packs is None:
        num_packs = -(-int(sizes[:, 0].sum()) // int(limits[0]))
    order = np.argsort(-sizes[:, 0], kind="stable")
    pack_of = place_samples(sizes[order], limits, LIGHTEST, num_packs + options.extra_packs)
    used, pack_of = np.unique(pack_of, return_inverse=True)  # packs that stayed empty drop out
    # Not the stream of `seed` alone: a caller who shuffles the packs with it would sort them again.
    shuffled = np.random.default_rng([seed, 1]).permutation(len(used))
    return group_into_packs(order, shuffled[pack_of])

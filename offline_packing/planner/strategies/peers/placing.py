"""Placing samples one after the other, each into an open pack with room for it under all limits.

Packs are the leaves of a tree. A node holds, for each limit, the least that a pack below it uses,
and the lowest score of these packs; so a search passes by whatever has no room, or is no better
than what it has found. It looks at about log n nodes per sample; at more where a second limit is
scarce, and never at more than a scan of all packs does twice.
"""

from typing import Final

import numpy as np
from numba import njit

from offline_packing.planner.strategies.strategy import Packs, group_into_packs

#: Choice among the packs with room; of equally full ones the oldest.
FIRST: Final = 0
LIGHTEST: Final = 1
FULLEST: Final = -1

_NOT_OPEN = (1 << 63) - 1  # score of a pack that is taken only if no open one has room


@njit(cache=True, nogil=True)
def _has_room(used: np.ndarray, size: np.ndarray, limits: np.ndarray) -> bool:
    for limit in range(limits.shape[0]):  # noqa: SIM110 (numba compiles no generators)
        if used[limit] + size[limit] > limits[limit]:
            return False
    return True


@njit(cache=True, nogil=True)
def _best_leaf(tree: np.ndarray, size: np.ndarray, limits: np.ndarray, stack: np.ndarray) -> int:
    """The leaf of lowest score among those with room, of which there must be one. ``stack`` has
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


@njit(cache=True, nogil=True)
def place_samples(
    sizes: np.ndarray, limits: np.ndarray, choice: int, num_open: int = 0
) -> np.ndarray:
    """Pack of every sample, int64 (num_samples,), counted in the order of opening.

    ``sizes`` int64 (num_samples, num_limits), tokens first, in the order of placing, each within
    ``limits``, int64 (num_limits,). ``choice`` is FIRST, LIGHTEST or FULLEST by tokens. The first
    ``num_open`` packs are open from the beginning and may stay empty.
    """
    num_samples, score = sizes.shape
    # A pack is opened when no other has room, so that any two together are over some limit: there
    # are at most twice as many as the shares of all limits add up to.
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
    """Packs of the samples ``order``, int64 (k,), placed in that order by :func:`place_samples`."""
    pack_of = place_samples(sizes[order], limits, choice)
    return group_into_packs(order, pack_of, int(pack_of.max(initial=-1)) + 1)

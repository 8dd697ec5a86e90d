"""Many small priority queues over one set of packs, compiled.

Skew heaps (Sleator and Tarjan, 1986): a queue is the index of its root pack or -1, all queues share
the two child arrays, and every pack is in at most one queue. All operations are O(log n) amortised.
"""

import numpy as np
from numba import njit


@njit(cache=True)
def lighter(load: np.ndarray, a: int, b: int) -> bool:
    """Lighter pack first, equal ones by index."""
    return load[a] < load[b] or (load[a] == load[b] and a < b)


@njit(cache=True)
def heap_merge(load: np.ndarray, children: np.ndarray, a: int, b: int) -> int:
    """Root of the union of the queues with roots ``a`` and ``b``.

    ``load`` integers (num_packs,), ``children`` int32 (num_packs, 2), -1 where there is none.
    """
    if a < 0 or b < 0:
        return max(a, b)
    if lighter(load, b, a):
        a, b = b, a
    root = a
    while True:  # merge b into the right child of a, and swap the children of a
        right = children[a, 1]
        children[a, 1] = children[a, 0]
        if right < 0:
            children[a, 0] = b
            return root
        if lighter(load, b, right):
            right, b = b, right
        children[a, 0] = right
        a = right


@njit(cache=True)
def heap_push(load: np.ndarray, children: np.ndarray, root: int, pack: int) -> int:
    """New root after adding ``pack``, which is in no queue."""
    children[pack, 0] = -1
    children[pack, 1] = -1
    return heap_merge(load, children, root, pack)


@njit(cache=True)
def heap_pop(load: np.ndarray, children: np.ndarray, root: int) -> int:
    """New root after removing ``root``; its load must not have changed since it was added."""
    return heap_merge(load, children, children[root, 0], children[root, 1])

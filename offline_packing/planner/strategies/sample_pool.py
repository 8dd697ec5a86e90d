"""Samples left to pack, with random draws and look-up by size in two dimensions."""

from typing import NamedTuple

import numpy as np
from numba import njit

_GRID = 128  # cells in each of the two dimensions


class SamplePool(NamedTuple):
    """Two sets with removal in O(1): one list to draw from, and one list per cell of a grid.

    Sizes are shares of the limits, float64 (num_samples, num_limits); the grid covers the first
    two limits.
    """

    sizes: np.ndarray
    #: int64 (num_samples,): the first num_alive[0] entries are the samples left
    alive: np.ndarray
    #: int64 (num_samples,): where each sample stands in ``alive``
    place: np.ndarray
    #: int64 (1,)
    num_alive: np.ndarray
    #: int64 (num_samples,): cell of each sample
    cell: np.ndarray
    #: int64 (cells + 1,): the samples left in cell c are
    #: members[cell_start[c]:cell_start[c] + cell_size[c]]
    cell_start: np.ndarray
    cell_size: np.ndarray
    members: np.ndarray
    member_place: np.ndarray


def make_pool(sizes: np.ndarray) -> SamplePool:
    """All samples; ``sizes`` float64 (num_samples, at least 2), each in 0..1."""
    num_samples = len(sizes)
    step = np.minimum((sizes[:, :2] * _GRID).astype(np.int64), _GRID - 1)
    cell = step[:, 0] * _GRID + step[:, 1]
    cell_size = np.bincount(cell, minlength=_GRID * _GRID)
    cell_start = np.concatenate([[0], np.cumsum(cell_size)])
    members = np.argsort(cell, kind="stable")
    member_place = np.empty(num_samples, np.int64)
    member_place[members] = np.arange(num_samples)
    return SamplePool(
        np.ascontiguousarray(sizes),
        np.arange(num_samples),
        np.arange(num_samples),
        np.array([num_samples]),
        cell,
        cell_start,
        cell_size,
        members,
        member_place,
    )


@njit(cache=True)
def is_left(pool: SamplePool, sample: int) -> bool:
    """Whether the sample is still in the pool."""
    return pool.place[sample] < pool.num_alive[0]


@njit(cache=True)
def take_out(pool: SamplePool, sample: int) -> None:
    """Remove a sample: the last one of its list takes its place."""
    pool.num_alive[0] -= 1
    end = pool.num_alive[0]
    last = pool.alive[end]
    pool.alive[pool.place[sample]] = last
    pool.alive[end] = sample
    pool.place[last] = pool.place[sample]
    pool.place[sample] = end
    cell = pool.cell[sample]
    pool.cell_size[cell] -= 1
    end = pool.cell_start[cell] + pool.cell_size[cell]
    last = pool.members[end]
    pool.members[pool.member_place[sample]] = last
    pool.member_place[last] = pool.member_place[sample]


@njit(cache=True)
def cell_step(share: float) -> int:
    """Row or column of the grid for a share of a limit."""
    return min(_GRID - 1, int(share * _GRID))


@njit(cache=True)
def cell_index(row: int, column: int) -> int:
    """Cell of the grid."""
    return row * _GRID + column

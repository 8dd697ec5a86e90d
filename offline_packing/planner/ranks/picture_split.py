"""Samples ordered so that the pictures of each pack divide evenly among its context-parallel ranks.

Megatron-Bridge's `vision_dp_when_cp` gives every rank equally many pictures, in their order in the
pack: of seven, three ranks take 3, 2 and 2; each step of a video's grid counts. But pictures differ
in size, and all ranks wait for the slowest tower:

    operations of pictures, longest first   [9 8 2|1 1 1]   19 and 3
    the same pictures, evened out           [9 1 1|8 2 1]   11 and 11

A hill climb: two samples of a pack change places while that evens the shares.
"""

from typing import Final, NamedTuple

import numpy as np

from offline_packing.planner.strategies.kernels import Kernel
from offline_packing.planner.strategies.strategy import Packs

_EVEN: Final = 0.002  # a largest share so little above the mean is left as it is
_RESCANS: Final = 200  # exchanges after which all shares are counted anew


class SplitFigures(NamedTuple):
    """Figures of packs whose pictures are split by number."""

    #: share of the vision tower's time that ranks wait for the slowest of their pack
    idle: float
    #: packs in which one picture is larger than an even share
    num_unequal: int


def split_figures(packs: Packs, units: np.ndarray, tower: np.ndarray, size: int) -> SplitFigures:
    """Figures of packs in their present order, each over ``size`` ranks. ``units``: integers
    (num_samples,), images and steps of videos; ``tower`` (num_samples,): operations of each
    sample's, which are taken to be alike within it."""
    spent, taken, num_unequal = _measure(packs, _Pictures.of(units, tower, size))
    return SplitFigures(1 - spent / taken if taken else 0.0, num_unequal)


def even_samples(packs: Packs, units: np.ndarray, tower: np.ndarray, size: int) -> Packs:
    """The same packs; the samples with pictures in another order, which evens the shares. Arguments
    as of `split_figures`."""
    made = Packs(packs.sample_ids.copy(), packs.pack_offsets)
    _even_all(made, _Pictures.of(units, tower, size))
    return made


class _Pictures(NamedTuple):
    """Pictures of all samples, and the ranks of a pack that share them out."""

    #: int64 (num_samples,): images, and steps of videos
    units: np.ndarray
    #: float64 (num_samples,): the vision tower's operations, alike for all pictures of a sample
    tower: np.ndarray
    size: int

    @classmethod
    def of(cls, units: np.ndarray, tower: np.ndarray, size: int) -> "_Pictures":
        """Of arrays of any type."""
        units, tower = np.ascontiguousarray(units, np.int64), np.ascontiguousarray(tower, float)
        return cls(units, tower, size)


@Kernel
def _total(values: np.ndarray) -> float:
    """Sum in order, also in Python, where NumPy's adds in pairs."""
    total = 0.0
    for value in values:
        total += value
    return total


@Kernel
def _measure(packs: Packs, pictures: _Pictures) -> tuple[float, float, int]:
    """Operations; the slowest ranks' times the number of ranks; packs with a picture larger than an
    even share."""
    ids, ends, shares = packs.sample_ids, packs.pack_offsets, np.zeros(pictures.size)
    spent, taken, num_unequal = 0.0, 0.0, 0
    for pack in range(ends.shape[0] - 1):
        own = ids[ends[pack] : ends[pack + 1]]
        _count_shares(own, pictures, np.empty(len(own), np.int64), shares)
        spent += _total(shares)
        taken += shares.max() * len(shares)
        each = pictures.tower[own] / np.maximum(pictures.units[own], 1)
        num_unequal += each.max() > _total(shares) / len(shares) * (1 + 1e-9)
    return spent, taken, num_unequal


@Kernel
def _count_shares(
    own: np.ndarray, pictures: _Pictures, rank: np.ndarray, shares: np.ndarray
) -> None:
    """Fill in the operations of each rank, (size,), for the samples ``own`` of a pack in their
    order; and the rank of each sample, -1 if several have a part of it."""
    units, size, total = pictures.units, shares.shape[0], 0
    for sample in own:
        total += units[sample]
    shares[:] = 0
    turn, done = 0, 0
    end = total // size + (1 if total % size else 0)
    for i in range(own.shape[0]):
        left, first = units[own[i]], -1
        each = pictures.tower[own[i]] / max(left, 1)
        while left > 0:
            while done >= end:
                turn += 1
                end += total // size + (1 if turn < total % size else 0)
            first = turn if first < 0 else first
            taken = min(left, end - done)
            shares[turn] += taken * each
            done += taken
            left -= taken
        rank[i] = first if first == turn else -1


@Kernel
def _swap_alike(own: np.ndarray, pictures: _Pictures, rank: np.ndarray, shares: np.ndarray) -> bool:
    """Exchange the two samples of equally many pictures, one of the largest share, that even the
    shares most; False: none do."""
    units, tower = pictures.units, pictures.tower
    worst, mean = shares.argmax(), _total(shares) / len(shares)
    most = 1e-6 * (mean * mean)
    best = (-1, -1)
    for i in range(own.shape[0]):
        if rank[i] != worst:
            continue
        for j in range(own.shape[0]):
            if rank[j] < 0 or rank[j] == worst or units[own[i]] != units[own[j]]:
                continue
            moved = tower[own[i]] - tower[own[j]]
            gain = moved * (shares[worst] - shares[rank[j]] - moved)
            if gain > most:
                most, best = gain, (i, j)
    if best[0] >= 0:
        own[best[0]], own[best[1]] = own[best[1]], own[best[0]]
    return best[0] >= 0


@Kernel
def _swap_any(
    own: np.ndarray, pictures: _Pictures, rank: np.ndarray, shares: np.ndarray, rescans: int
) -> int:
    """Exchange the first two of the other samples that even the shares. Returns how often shares
    may still be counted anew; -1: none was found."""
    mean = _total(shares) / len(shares)
    wanted = _total(shares * shares) - 1e-6 * (mean * mean)
    new_rank, new_shares = np.empty_like(rank), np.empty_like(shares)
    for i in range(own.shape[0]):
        for j in range(i + 1, own.shape[0]):
            is_alike = pictures.units[own[i]] == pictures.units[own[j]]
            if is_alike and rank[i] >= 0 and rank[j] >= 0:
                continue
            if rescans <= 0:
                return -1
            rescans -= 1
            own[i], own[j] = own[j], own[i]
            _count_shares(own, pictures, new_rank, new_shares)
            if _total(new_shares * new_shares) < wanted:
                return rescans
            own[i], own[j] = own[j], own[i]
    return -1


@Kernel
def _even_all(packs: Packs, pictures: _Pictures) -> None:
    """Put the samples with pictures of each pack in an order that evens the shares, in place."""
    ids, ends, shares = packs.sample_ids, packs.pack_offsets, np.zeros(pictures.size)
    for pack in range(ends.shape[0] - 1):
        own = ids[ends[pack] : ends[pack + 1]]
        places = np.flatnonzero(pictures.units[own] > 0)
        some = own[places]
        rank = np.empty(len(some), np.int64)
        rescans = np.int64(_RESCANS)  # a literal would be compiled apart
        _count_shares(some, pictures, rank, shares)
        while rescans >= 0 and shares.max() > _total(shares) / len(shares) * (1 + _EVEN):
            if not _swap_alike(some, pictures, rank, shares):
                rescans = _swap_any(some, pictures, rank, shares, rescans)
            _count_shares(some, pictures, rank, shares)
        own[places] = some

"""Packing under several limits at once: tokens and vision patches, images, samples and videos.

With two sizes per sample hardly two samples are alike, so packs are made of samples rather than of
counts. A pack starts with the largest sample left, takes random ones while more than about two more
are needed, and ends with the pair that fills every scarce budget best, found through a grid over
the two scarcest; then with another pair, as long as that helps. The best of several tries per pack
is kept. Random choice leaves the mix of the remaining samples as it was, so that the last packs are
nearly as full as the first.
"""

from typing import NamedTuple

import numpy as np

from offline_packing.planner.strategies.composition import dual_feasible_bound, lower_bound, room_of
from offline_packing.planner.strategies.kernels import Kernel, random_below, random_state
from offline_packing.planner.strategies.strategy import Packs

_MAX_HISTOGRAM = 1 << 24  # limits up to which the sharper bound is worth its memory
_GRID = 128  # cells in each of the two dimensions
_TRIES = 24  # tries for one pack
_PAIRS = 40  # first samples of a closing pair in one try
_REACH = 6  # rings of cells searched around the ideal partner
_PARTNERS = 12  # partners compared for one first sample
_MISFITS = 6  # random samples in a row that do not fit before the pack is closed
_GOOD_ENOUGH = 3e-4  # share of a pack lost at which no further try is made
_FIT_TOGETHER = 1 - 1e-6  # share of a pack in which all that is left fits, rounding included
_EVENNESS = 0.1  # weight of keeping the mix of the remaining samples, against filling this pack
_UNEVEN_ANYWAY = 0.2  # share by which a pack may differ from the mix at no cost


class _Pool(NamedTuple):
    """Samples left to pack: two sets with removal in O(1), one list to draw from, and one list per
    cell of a grid over the sizes in the first two limits."""

    #: float64 (num_samples, num_limits): shares of the limits
    sizes: np.ndarray
    #: float64 (num_limits,): how many packs' worth of each is left
    need: np.ndarray
    #: bool (num_samples,): samples in the pack that is tried
    chosen: np.ndarray
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


@Kernel
def _exchange_last(samples: np.ndarray, place: np.ndarray, sample: int, end: int) -> None:
    """Exchange a sample with the one at ``end``, the last of its list."""
    last = samples[end]
    samples[place[sample]] = last
    samples[end] = sample
    place[last] = place[sample]
    place[sample] = end


@Kernel
def _take_out(pool: _Pool, sample: int) -> None:
    """Remove a sample from the pool."""
    pool.num_alive[0] -= 1
    _exchange_last(pool.alive, pool.place, sample, pool.num_alive[0])
    cell = pool.cell[sample]
    pool.cell_size[cell] -= 1
    end = pool.cell_start[cell] + pool.cell_size[cell]
    _exchange_last(pool.members, pool.member_place, sample, end)


@Kernel
def _fits(sizes: np.ndarray, sample: int, room: np.ndarray) -> bool:
    for limit in range(room.shape[0]):  # noqa: SIM110 (numba compiles no generators)
        if sizes[sample, limit] > room[limit]:
            return False
    return True


@Kernel
def _loss(room: np.ndarray, sizes: np.ndarray, sample: int, need: np.ndarray) -> float:
    """Return the cost of closing a pack, in packs, if ``sample`` (or -1 for none) still joins it.
    ``need`` is how many packs' worth of each budget is left; the scarcest decides how many packs
    follow. The smaller term keeps the other budgets in proportion for the packs to come."""
    scarcest = need.max()
    follow = 0.0
    uneven = 0.0
    for limit in range(room.shape[0]):
        load = 1.0 - room[limit]
        if sample >= 0:
            load += sizes[sample, limit]
        follow = max(follow, need[limit] - load)
        uneven += max(0.0, abs(load - need[limit] / scarcest) - _UNEVEN_ANYWAY)
    return follow - (scarcest - 1.0) + _EVENNESS * uneven


@Kernel
def _join(pool: _Pool, sample: int, room: np.ndarray, pack: np.ndarray, size: int) -> int:
    """Put a sample into the pack of ``size`` samples; new size."""
    pack[size] = sample
    pool.chosen[sample] = True
    room -= pool.sizes[sample]
    return size + 1


@Kernel
def _draw_middle(
    pool: _Pool, room: np.ndarray, pack: np.ndarray, size: int, state: np.ndarray
) -> int:
    """Add random samples while the room is worth more than about two and a half; return the new
    pack size."""
    num_alive = pool.num_alive[0]
    misfits = 0
    while misfits < _MISFITS:
        more = np.inf  # mean samples that the room still takes
        for limit in range(room.shape[0]):
            if pool.need[limit] > 0:
                more = min(more, room[limit] * num_alive / pool.need[limit])
        if more < 2.6:
            break
        sample = pool.alive[random_below(state, num_alive)]
        if pool.chosen[sample] or not _fits(pool.sizes, sample, room):
            misfits += 1
            continue
        size = _join(pool, sample, room, pack, size)
    return size


@Kernel
def _best_partner(pool: _Pool, room: np.ndarray, best: float) -> tuple[int, float]:
    """Find the sample that fills ``room`` with less loss than ``best``, or -1; return it and the
    loss. Cells are searched from the one that would fill the room exactly towards smaller sizes."""
    # Taking arrays out of the tuple costs a reference count, so not in the loop.
    sizes, members, chosen, need = pool.sizes, pool.members, pool.chosen, pool.need
    cell_start, cell_size = pool.cell_start, pool.cell_size
    partner = -1
    compared = 0
    row = min(_GRID - 1, int(room[0] * _GRID))
    column = min(_GRID - 1, int(room[1] * _GRID))
    for ring in range(_REACH):
        if ring > 2 and compared > 0:
            break
        for down in range(ring + 1):
            if row < down or column < ring - down:
                continue
            cell = (row - down) * _GRID + column - (ring - down)
            start = cell_start[cell]
            for member in range(start, start + cell_size[cell]):
                sample = members[member]
                if chosen[sample] or not _fits(sizes, sample, room):
                    continue
                loss = _loss(room, sizes, sample, need)
                if loss < best:
                    best = loss
                    partner = sample
                compared += 1
                if compared > _PARTNERS:
                    return partner, best
    return partner, best


@Kernel
def _close(
    pool: _Pool, room: np.ndarray, pack: np.ndarray, size: int, state: np.ndarray
) -> tuple[int, float]:
    """Add none, one or two samples, whichever loses least; returns the pack size and the loss."""
    sizes, chosen = pool.sizes, pool.chosen
    best = _loss(room, sizes, -1, pool.need)
    first = -1
    second, best = _best_partner(pool, room, best)
    after = np.empty_like(room)
    for _ in range(_PAIRS):
        if best < _GOOD_ENOUGH:
            break
        sample = pool.alive[random_below(state, pool.num_alive[0])]
        if chosen[sample] or not _fits(sizes, sample, room):
            continue
        loss = _loss(room, sizes, sample, pool.need)
        if loss < best:
            first, second, best = sample, -1, loss
        np.subtract(room, sizes[sample], after)
        chosen[sample] = True
        partner, loss = _best_partner(pool, after, best)
        chosen[sample] = False
        if partner >= 0:
            first, second, best = sample, partner, loss
    for sample in (first, second):
        if sample >= 0:
            size = _join(pool, sample, room, pack, size)
    return size, best


@Kernel
def _pack_pool(pool: _Pool, seeds: np.ndarray, state: np.ndarray) -> Packs:
    """Empty the pool pack by pack, each from the first of the ``seeds`` that is left."""
    num_samples, num_limits = pool.sizes.shape
    pool.need[:] = pool.sizes.sum(axis=0)
    sample_ids = np.empty(num_samples, np.int64)
    pack_offsets = np.zeros(num_samples + 1, np.int64)
    pack = np.empty(num_samples, np.int64)
    num_packs = 0
    end = 0
    for seed in seeds:
        if pool.place[seed] >= pool.num_alive[0]:
            continue  # taken by an earlier pack
        least = np.inf
        best_size = 0
        for _ in range(_TRIES):
            room = np.ones(num_limits)
            size = _join(pool, seed, room, pack, 0)
            size = _draw_middle(pool, room, pack, size, state)
            before, loss = -1, np.inf
            while loss >= _GOOD_ENOUGH and size != before:  # a limit that is not scarce hides pairs
                before = size
                size, loss = _close(pool, room, pack, size, state)
            pool.chosen[pack[:size]] = False
            if loss < least:
                least = loss
                best_size = size
                sample_ids[end : end + size] = pack[:size]
            if least < _GOOD_ENOUGH:
                break
        left = pool.num_alive[0]
        if best_size < left and pool.need.max() < _FIT_TOGETHER:  # random ones leave out a few
            best_size = left
            sample_ids[end : end + left] = pool.alive[:left]
        for sample in sample_ids[end : end + best_size]:
            _take_out(pool, sample)
            pool.need[:] -= pool.sizes[sample]
        end += best_size
        num_packs += 1
        pack_offsets[num_packs] = end
    return Packs(sample_ids, pack_offsets[: num_packs + 1])


def size_lower_bound(sizes: np.ndarray, limit: int) -> int:
    """Bound the packs that one budget needs from below; ``sizes`` integers (num_samples,) in
    0..limit."""
    room = room_of(sizes, limit)
    if room > _MAX_HISTOGRAM:
        return -(-int(sizes.sum(dtype=np.int64)) // limit)
    counts = np.bincount(sizes, minlength=room + 1).astype(np.int64)
    counts[0] = 0
    return max(lower_bound(counts), dual_feasible_bound(counts)[0], int(len(sizes) > 0))


def pack_budgets(sizes: np.ndarray, limits: np.ndarray, *, seed: int = 0) -> Packs:
    """Pack samples under several limits. ``sizes`` integers (num_samples, num_limits), ``limits``
    integers (num_limits > 1,), every sample within every limit. Takes about 0.1 ms per pack."""
    shares = sizes / limits
    scarcest_first = np.argsort(-shares.sum(axis=0), kind="stable")
    shares = shares[:, scarcest_first]
    every, step = np.arange(len(shares)), (shares[:, :2] * _GRID).astype(np.int64)
    cell = np.minimum(step, _GRID - 1) @ [_GRID, 1]
    cell_size = np.bincount(cell, minlength=_GRID * _GRID)
    members = np.argsort(cell, kind="stable")
    pool = _Pool(
        sizes=np.ascontiguousarray(shares),
        need=np.empty(shares.shape[1]),
        chosen=np.zeros(len(shares), bool),
        alive=every,
        place=every.copy(),
        num_alive=np.array([len(shares)]),
        cell=cell,
        cell_start=np.append(0, np.cumsum(cell_size)),
        cell_size=cell_size,
        members=members,
        member_place=np.argsort(members),
    )
    seeds = np.argsort(-shares.max(axis=1), kind="stable")
    return _pack_pool(pool, seeds, random_state(seed))

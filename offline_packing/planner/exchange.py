"""Exchange samples between packs, which stay equally full, so that no pack holds two copies of one.

Packs are composed as if copies were samples of their own. Then each copy that met another is
exchanged for a sample of another pack, or together with a second sample for two. Exchanges are as
numerous as different lengths. A copy without one goes where there is room, or into a new pack.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from offline_packing.planner.strategies.kernels import Kernel, random_below, random_state
from offline_packing.planner.strategies.strategy import Packs, group_into_packs

_PARTNERS = 256  # packs that are tried for one copy
_DRAWS = 512  # exchanges of two for two that are tried with each
_ROOMS = 4096  # packs that are searched for room


@Kernel
def rounds_of_copies(copy_of: np.ndarray) -> np.ndarray:
    """Number of earlier copies of the same sample: [7, 3, 7, 7] -> [0, 0, 1, 2], int32."""
    seen = np.zeros(copy_of.max() + 1 if len(copy_of) else 0, np.int32)
    rounds = np.empty(len(copy_of), np.int32)
    for sample in range(len(copy_of)):
        rounds[sample] = seen[copy_of[sample]]
        seen[copy_of[sample]] += 1
    return rounds


def deal_out_copies(copy_of: np.ndarray, num_parts: int, seed: int = 0) -> np.ndarray:
    """Spread copies evenly over parts; return the part of each sample, int32 (num_samples,). A part
    holds two copies of a sample only if there are more copies than parts, and all parts have about
    the same samples."""
    counts = np.bincount(copy_of)
    offsets = np.random.default_rng(seed).random(len(counts))
    parts = (rounds_of_copies(copy_of) + offsets[copy_of]) * num_parts / counts[copy_of]
    return np.minimum(parts.astype(np.int32), num_parts - 1)


def separate_copies(
    packs: Packs,
    sizes: np.ndarray,
    limits: np.ndarray,
    copy_of: np.ndarray,
    reach: int | None = None,
    seed: int = 0,
) -> Packs:
    """Exchange samples between packs until no pack holds two copies of one sample.

    Args:
        sizes: int64 (num_samples, num_limits): tokens and whatever else a pack is limited in.
        limits: int64 (num_limits,).
        copy_of: integers (num_samples,) from 0; samples with the same number are copies.
        reach: exchange only with packs at most this far away, as far as that is possible.
    """
    doubled = _doubled_places(packs, copy_of)
    if len(doubled) == 0:
        return packs
    packs = Packs(packs.sample_ids.astype(np.int64), packs.pack_offsets)
    bins = _Bins(packs, packs.sums(sizes), sizes, limits, copy_of)
    _exchange_all(bins, doubled, reach or packs.num_packs, random_state(seed))
    left = _doubled_places(packs, copy_of)
    return _move_out(bins, left) if len(left) else packs


class _Bins(NamedTuple):
    """Packs between which samples are exchanged: their sample_ids and totals are changed."""

    packs: Packs
    #: int64 (num_packs, num_limits): amounts in each pack
    totals: np.ndarray
    sizes: np.ndarray
    limits: np.ndarray
    copy_of: np.ndarray


@Kernel
def _doubled_places(packs: Packs, copy_of: np.ndarray) -> np.ndarray:
    """Find the places in ``sample_ids`` that hold a further copy of a sample of the same pack."""
    sample_ids, pack_offsets = packs
    last_pack = np.full(copy_of.max() + 1 if len(copy_of) else 0, -1, np.int64)
    is_doubled = np.zeros(len(sample_ids), np.bool_)
    for pack in range(len(pack_offsets) - 1):
        for place in range(pack_offsets[pack], pack_offsets[pack + 1]):
            origin = copy_of[sample_ids[place]]
            is_doubled[place] = last_pack[origin] == pack
            last_pack[origin] = pack
    return np.flatnonzero(is_doubled)


@Kernel
def _holds(bins: _Bins, pack: int, sample: int, but: int = -1) -> bool:
    """Tell whether a pack holds a copy of a sample, apart from place ``but``."""
    sample_ids, offsets = bins.packs
    found = False
    for place in range(offsets[pack], offsets[pack + 1]):
        found |= place != but and bins.copy_of[sample_ids[place]] == bins.copy_of[sample]
    return found


@Kernel
def _allowed(
    bins: _Bins, pack: int, other: int, out: tuple[int, int], into: tuple[int, int]
) -> bool:
    """Tell whether limits and copies allow that ``pack`` gives the samples ``out`` to ``other`` for
    ``into``; -1 means none."""
    for k in range(len(bins.limits)):
        more = np.int64(0)
        for i in range(2):
            if out[i] >= 0:
                more += bins.sizes[into[i], k] - bins.sizes[out[i], k]
        limit = bins.limits[k]
        if bins.totals[pack, k] + more > limit or bins.totals[other, k] - more > limit:
            return False
    for i in range(2):
        if out[i] >= 0 and (_holds(bins, other, out[i]) or _holds(bins, pack, into[i])):
            return False
    copy_of = bins.copy_of
    return out[1] < 0 or (
        copy_of[out[0]] != copy_of[out[1]] and copy_of[into[0]] != copy_of[into[1]]
    )


@Kernel
def _swap(bins: _Bins, pack: int, other: int, place: int, partner: int) -> None:
    sample_ids = bins.packs.sample_ids
    mine, theirs = sample_ids[place], sample_ids[partner]
    bins.totals[pack] += bins.sizes[theirs] - bins.sizes[mine]
    bins.totals[other] += bins.sizes[mine] - bins.sizes[theirs]
    sample_ids[place], sample_ids[partner] = theirs, mine


@Kernel
def _exchange(bins: _Bins, pack: int, place: int, other: int, state: np.ndarray) -> bool:
    """Exchange the copy at ``place`` for ``other``, or with a second sample for two drawn ones."""
    ids, offsets = bins.packs
    start, end = offsets[pack], offsets[pack + 1]
    first, last = offsets[other], offsets[other + 1]
    mine = ids[place]
    if _holds(bins, other, mine):
        return False
    for partner in range(first, last):
        if _allowed(bins, pack, other, (mine, -1), (ids[partner], -1)):
            _swap(bins, pack, other, place, partner)
            return True
    for _ in range(_DRAWS if end - start > 1 and last - first > 1 else 0):
        second = start + random_below(state, end - start)
        partner = first + random_below(state, last - first)
        another = first + random_below(state, last - first)
        if _allowed(bins, pack, other, (mine, ids[second]), (ids[partner], ids[another])):
            _swap(bins, pack, other, place, partner)
            _swap(bins, pack, other, second, another)
            return True
    return False


@njit(cache=True)  # costly for few samples, too
def _exchange_all(bins: _Bins, places: np.ndarray, reach: int, state: np.ndarray) -> None:
    """Exchange the copies at ``places`` with random packs of at most ``reach`` away."""
    for place in places:
        pack = np.searchsorted(bins.packs.pack_offsets, place, side="right") - 1
        if not _holds(bins, pack, bins.packs.sample_ids[place], place):
            continue  # the other copy has gone
        lowest = max(0, pack - reach)
        width = min(len(bins.totals), pack + reach + 1) - lowest
        for _ in range(_PARTNERS):
            other = lowest + random_below(state, width)
            if other != pack and _exchange(bins, pack, place, other, state):
                break


def _move_out(bins: _Bins, places: np.ndarray) -> Packs:
    """Move the copies at ``places`` to packs with room for them, new ones at the end if need be."""
    packs, _, sizes, _, _ = bins
    moved = packs.sample_ids[places]
    moved = moved[np.argsort(-sizes[moved, 0], kind="stable")]
    kept = np.delete(packs.sample_ids, places)
    pack_of = np.delete(packs.pack_of_slot(), places)
    rest = group_into_packs(kept, pack_of)
    rest_bins = bins._replace(packs=rest, totals=rest.sums(sizes))
    pack_of = np.append(pack_of, _find_room(rest_bins, moved))
    return group_into_packs(np.append(kept, moved), pack_of)


@Kernel
def _find_room(bins: _Bins, moved: np.ndarray) -> np.ndarray:
    """Choose a pack for each of the ``moved`` samples: int64 (num_moved,), new packs numbered on.
    Each further copy of a sample starts its search after the pack the last one took."""
    _, totals, sizes, limits, copy_of = bins
    old = np.argsort(totals[:, 0], kind="mergesort")[:_ROOMS]
    packs = np.concatenate((old, np.arange(len(totals), len(totals) + len(moved))))
    rooms = np.zeros((len(packs), len(limits)), np.int64)
    rooms[: len(old)] = totals[old]
    next_of = np.zeros(copy_of.max() + 1, np.int64)
    pack_of = np.empty(len(moved), np.int64)
    for i in range(len(moved)):
        sample, origin = moved[i], copy_of[moved[i]]
        for choice in range(next_of[origin], len(packs)):
            fits = (rooms[choice] + sizes[sample] <= limits).all()
            if fits and not (choice < len(old) and _holds(bins, packs[choice], sample)):
                break
        pack_of[i] = packs[choice]
        rooms[choice] += sizes[sample]
        next_of[origin] = choice + 1
    return pack_of

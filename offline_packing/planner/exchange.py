"""Exchange of samples between packs, which stay equally full.

*Balance* evens out another quantity: samples, or twos and threes, of equal tokens change places.

*Copies* of a sample that is used several times do not share a pack: packs are composed as if copies
were samples of their own, then each copy that met another is exchanged for a sample of another
pack, or together with a second sample for two. Exchanges are about as numerous as different
lengths. A copy without one goes where there is room, or into a new pack.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from numba import njit

from offline_packing.planner.strategies.kernels import Kernel, random_below, random_state
from offline_packing.planner.strategies.strategy import Packs, group_into_packs

_SWEEPS = 40  # offers to swap per sample; later ones gain next to nothing
_GROUP_ROUNDS = 6  # times that new groups are drawn, at most
_GROUP_SWEEPS = 4  # offers per group, and per sample after them
_WORTH = 0.99  # a round that leaves a larger share of the variation is the last
_PARTNERS = 256  # packs that are tried for one copy
_DRAWS = 512  # exchanges of two for two that are tried with each
_ROOMS = 4096  # packs that are searched for room


@partial(Kernel, weight=3)
def _exchange_alike(
    sample_ids: np.ndarray,
    pack_of_slot: np.ndarray,
    members: np.ndarray,
    class_starts: np.ndarray,
    lengths: np.ndarray,
    quantity: np.ndarray,
    totals: np.ndarray,
    state: np.ndarray,
) -> None:
    """Offer every group of slots a random partner of its class; swap if that evens their packs out.
    ``members`` int64 (num_groups, size) holds slots of one pack each, ``class_starts`` where the
    groups of equal token sums start. A sum that an earlier swap changed is not a partner."""
    for number in range(class_starts.shape[0] - 1):
        start = class_starts[number]
        size = class_starts[number + 1] - start
        if size < 2:
            continue
        for place in range(start, start + size):
            partner = start + random_below(state, size)
            more = 0.0
            longer = 0
            for i in range(members.shape[1]):
                mine, other = sample_ids[members[place, i]], sample_ids[members[partner, i]]
                more += quantity[mine] - quantity[other]
                longer += lengths[mine] - lengths[other]
            pack = pack_of_slot[members[place, 0]]
            other_pack = pack_of_slot[members[partner, 0]]
            apart = totals[pack] - totals[other_pack]
            # The sum of squares falls if the amount moved has the sign of the difference and is
            # smaller.
            if longer == 0 and more * (apart - more) > 0:
                for i in range(members.shape[1]):
                    slot, other = members[place, i], members[partner, i]
                    sample_ids[slot], sample_ids[other] = sample_ids[other], sample_ids[slot]
                totals[pack] -= more
                totals[other_pack] += more


def balance_packs(
    packs: Packs,
    lengths: np.ndarray,
    quantity: np.ndarray,
    window_packs: int | None = None,
    seed: int = 0,
) -> Packs:
    """Even out ``quantity`` (one number per sample) over the packs, at the same tokens in each.

    Random samples of equal length swap places, then random twos and threes of a pack with those of
    equal sum of another, where that brings the sums of their packs closer. With ``window_packs``
    only packs of the same run of that many packs exchange samples, which keeps locality.
    """
    if packs.num_packs < 2:
        return packs
    sample_ids = packs.sample_ids.copy()
    pack_of_slot = packs.pack_of_slot()
    window = pack_of_slot // window_packs if window_packs else np.zeros_like(pack_of_slot)
    amounts = quantity.astype(np.float64)
    totals = np.bincount(pack_of_slot, amounts[sample_ids], minlength=packs.num_packs)
    state = random_state(seed)

    def exchange(members: np.ndarray, sweeps: int) -> None:
        # slots int64 (num_groups, size), by tokens and window, and where these change
        tokens, own = lengths[sample_ids][members].sum(axis=1), window[members[:, 0]]
        order = np.lexsort((own, tokens))
        new = (np.diff(tokens[order]) != 0) | (np.diff(own[order]) != 0)
        starts = np.concatenate([[0], np.flatnonzero(new) + 1, [len(order)]])
        members = members[order]
        arrays = (sample_ids, pack_of_slot, members, starts, lengths, amounts, totals, state)
        for _ in range(sweeps):
            _exchange_alike(*arrays)

    slots = np.arange(len(sample_ids))[:, None]
    exchange(slots, _SWEEPS)
    rng = np.random.default_rng(seed)
    pack_starts = packs.pack_offsets[pack_of_slot][:, None]
    pack_sizes = np.diff(packs.pack_offsets)[pack_of_slot][:, None]
    for _ in range(_GROUP_ROUNDS):
        before = totals.std()
        for size in (2, 3):
            # each slot and random others of its pack, where all differ
            drawn = (rng.random((len(slots), size - 1)) * pack_sizes).astype(np.int64)
            groups = np.concatenate([slots, pack_starts + drawn], axis=1)
            different = (np.diff(np.sort(groups, axis=1), axis=1) > 0).all(axis=1)
            exchange(groups[different], _GROUP_SWEEPS)
        exchange(slots, _GROUP_SWEEPS)
        if totals.std() > _WORTH * before:
            break
    return Packs(sample_ids, packs.pack_offsets)


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
    """The part of each sample, int32 (num_samples,): copies are spread evenly over the parts. A
    part holds more than one copy of a sample only where there are more copies than parts, and all
    parts have about the same samples."""
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
    """The packs, changed so that none holds two copies of one sample.

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
    """Places in ``sample_ids`` that hold a further copy of a sample of the same pack."""
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
    """Whether a pack holds a copy of a sample, place ``but`` left aside."""
    sample_ids, offsets = bins.packs
    found = False
    for place in range(offsets[pack], offsets[pack + 1]):
        found |= place != but and bins.copy_of[sample_ids[place]] == bins.copy_of[sample]
    return found


@Kernel
def _allowed(
    bins: _Bins, pack: int, other: int, out: tuple[int, int], into: tuple[int, int]
) -> bool:
    """Whether limits and copies allow that ``pack`` gives the samples ``out`` to ``other`` for
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
    rest = group_into_packs(kept, pack_of, packs.num_packs)
    rest_bins = bins._replace(packs=rest, totals=rest.sums(sizes))
    pack_of = np.append(pack_of, _find_room(rest_bins, moved))
    return group_into_packs(np.append(kept, moved), pack_of, int(pack_of.max()) + 1)


@Kernel
def _find_room(bins: _Bins, moved: np.ndarray) -> np.ndarray:
    """The pack of each of the ``moved`` samples: int64 (num_moved,), new ones numbered on. Copies
    of one sample are given packs further and further down one list."""
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

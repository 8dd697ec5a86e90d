"""Composition of packs, by strategy, budgets, windows, groups and copies, and the assignment of
samples to them: *locality* packs the samples window by window as they stand in the source, with the
unfilled rest of a window carried into the next; *balance* exchanges samples, or a few, of equal
tokens, so it changes nothing about the fill.
"""

import numpy as np
from numba import njit

from offline_packing.planner.copies import deal_out_copies, rounds_of_copies, separate_copies
from offline_packing.planner.order import reorder_packs
from offline_packing.planner.request import PlanRequest
from offline_packing.planner.strategies import COMPOSERS, STRATEGIES
from offline_packing.planner.strategies.auto import mixed
from offline_packing.planner.strategies.budgets import size_lower_bound
from offline_packing.planner.strategies.composition import expand_composition
from offline_packing.planner.strategies.histogram import count_lengths, lower_bound
from offline_packing.planner.strategies.kernels import random_below, random_state
from offline_packing.planner.strategies.over_ranks import pack_over_ranks
from offline_packing.planner.strategies.strategy import Packs, join_packs
from offline_packing.planner.windows import pack_window

_SPARE = 0.005  # packs' worth of samples that a window has beyond those it gives out
_MIN_SPARE_PACKS = 4
_FULL = 0.999  # share of seq_length at which a window does not hold a pack back
_SWEEPS = 40  # offers to swap per sample; later ones gain next to nothing
_GROUP_ROUNDS = 6  # times that new groups are drawn, at most
_GROUP_SWEEPS = 4  # offers per group, and per sample after them
_WORTH = 0.99  # a round that leaves a larger share of the variation is the last


def pack_in_order(
    lengths: np.ndarray, seq_length: int, order: np.ndarray, *, window_packs: int, seed: int = 0
) -> Packs:
    """Pack the samples in the given order, exactly ``window_packs`` packs at a time.

    A window composes packs of slightly more samples than it needs and leaves those of the emptiest
    packs to the next window, which must use them: so each run of ``window_packs`` packs, which may
    be one output shard, reads one stretch of ``order`` and a few samples before it. Inside a
    window the packs are shuffled.
    """
    ends = np.cumsum(lengths[order], dtype=np.int64)  # tokens up to and with each sample
    wanted = seq_length * (window_packs + max(_MIN_SPARE_PACKS, round(_SPARE * window_packs)))
    parts: list[Packs] = []
    carried = np.zeros(0, np.int64)
    start = 0
    while start < len(order) or len(carried):
        before = ends[start - 1] if start else 0
        missing = wanted - int(lengths[carried].sum(dtype=np.int64))
        end = min(len(order), int(np.searchsorted(ends, before + missing)) + 1)
        window_seed = seed + len(parts)
        pool = np.concatenate([carried, order[start:end]])
        packs = pack_window(lengths[pool], seq_length, seed=window_seed)
        chosen = np.arange(packs.num_packs)
        if end < len(order):
            chosen = _ready_first(packs, lengths[pool], seq_length, len(carried))[:window_packs]
        ready = reorder_packs(packs, np.random.default_rng(window_seed).permutation(chosen))
        parts.append(ready.of(pool))
        carried = np.delete(pool, ready.sample_ids)
        start = end
    return join_packs(parts)


def _ready_first(packs: Packs, lengths: np.ndarray, seq_length: int, carried: int) -> np.ndarray:
    """Packs in the order in which a window gives them out: int64 (num_packs,). First those with
    carried samples (the first ones of the pool), then full ones, many samples before few so that
    few have to be read again, and last the others from fullest to emptiest."""
    starts = packs.pack_offsets[:-1]
    tokens = packs.sums(lengths)
    carries = np.minimum.reduceat(packs.sample_ids, starts) < carried
    full = tokens >= _FULL * seq_length
    rank = np.where(full, -np.diff(packs.pack_offsets), seq_length - tokens)
    return np.lexsort((rank, ~full, ~carries))


@njit(cache=True)
def _exchange(
    sample_ids: np.ndarray,
    pack_of_slot: np.ndarray,
    members: np.ndarray,
    class_starts: np.ndarray,
    lengths: np.ndarray,
    quantity: np.ndarray,
    totals: np.ndarray,
    state: np.ndarray,
) -> None:
    """Offer every group of slots a random partner of its class; swap if it evens their packs out.
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
            # The sum of squares falls if what moves has the sign of the difference and is smaller.
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
        members, starts = _classes(members, lengths[sample_ids], window)
        for _ in range(sweeps):
            _exchange(sample_ids, pack_of_slot, members, starts, lengths, amounts, totals, state)

    slots = np.arange(len(sample_ids))[:, None]
    exchange(slots, _SWEEPS)
    rng = np.random.default_rng(seed)
    for _ in range(_GROUP_ROUNDS):
        before = totals.std()
        for size in (2, 3):
            exchange(_random_groups(packs, size, rng), _GROUP_SWEEPS)
        exchange(slots, _GROUP_SWEEPS)
        if totals.std() > _WORTH * before:
            break
    return Packs(sample_ids, packs.pack_offsets)


def _random_groups(packs: Packs, size: int, rng: np.random.Generator) -> np.ndarray:
    """Groups of each slot and ``size - 1`` random others of its pack: int64 (num_groups, size)."""
    slots = np.arange(len(packs.sample_ids))[:, None]
    pack_of_slot = packs.pack_of_slot()[:, None]
    pack_sizes = np.diff(packs.pack_offsets)[pack_of_slot]
    drawn = (rng.random((len(slots), size - 1)) * pack_sizes).astype(np.int64)
    groups = np.concatenate([slots, packs.pack_offsets[pack_of_slot] + drawn], axis=1)
    different = (np.diff(np.sort(groups, axis=1), axis=1) > 0).all(axis=1)
    return groups[different]


def _classes(
    members: np.ndarray, length_of_slot: np.ndarray, window_of_slot: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """``members``, slots int64 (num_groups, size), by tokens and window, and where these change."""
    tokens = length_of_slot[members].sum(axis=1)
    window = window_of_slot[members[:, 0]]
    order = np.lexsort((window, tokens))
    new = (np.diff(tokens[order]) != 0) | (np.diff(window[order]) != 0)
    return members[order], np.concatenate([[0], np.flatnonzero(new) + 1, [len(order)]])


_PART_PACKS = 200  # packs that a part has at least when copies are dealt out
_FULL = 0.995  # load of a pack, of its scarcest limit, that stays as its part composed it
_MOST_POOR = 0.1  # share of packs that are composed again; where it is larger, none are full


def pack_request(request: PlanRequest) -> tuple[Packs, int]:
    """Packs of all samples and their lower bound; group by group if packs shall be homogeneous."""
    if not request.options.homogeneous:
        return _pack(request)
    assert request.groups is not None
    parts, bound = [], 0
    for group in np.unique(request.groups):
        members = np.flatnonzero(request.groups == group)
        packs, part_bound = _pack(request.subset(members))
        parts.append(packs.of(members))
        bound += part_bound
    return join_packs(parts), bound


def _pack(request: PlanRequest) -> tuple[Packs, int]:
    """Packs of all samples and a lower bound of their number."""
    if request.context_parallel is not None:
        return _pack_over_ranks(request), 0
    if request.copy_of is None:
        return _compose(request)
    most_copies = int(np.bincount(request.copy_of).max(initial=0))  # of one sample
    bound = max(packs_bound(request), most_copies)
    if request.options.has_locality:
        packs, _ = _compose(request)
    else:
        packs = _compose_apart(request, min(most_copies, bound // _PART_PACKS))
    reach = request.window_packs if request.options.has_locality else None
    sizes, limits = limited(request)
    seed = request.options.seed
    return separate_copies(packs, sizes, limits, request.copy_of, reach, seed), bound


def _pack_over_ranks(request: PlanRequest) -> Packs:
    """Packs over 1, 2, 4 … ranks; all first uses of samples, then all second ones, and so on."""
    assert request.context_parallel is not None
    capacities = request.context_parallel.capacities(request.options.seq_length) // request.unit
    copy_of, parts = request.copy_of, []
    rounds = np.zeros(len(request.lengths), int) if copy_of is None else rounds_of_copies(copy_of)
    for number in range(int(rounds.max(initial=-1)) + 1):
        ids = np.flatnonzero(rounds == number)
        seed = request.options.seed + number if "shuffle" in request.options.assignment else None
        lengths = (request.lengths[ids] // request.unit).astype(np.int32)
        ranks = request.context_parallel.ranks
        parts.append(pack_over_ranks(lengths, capacities, ranks=ranks, seed=seed).of(ids))
    return join_packs(parts)


def _compose_apart(request: PlanRequest, num_parts: int) -> Packs:
    """Packs of parts between which copies are dealt out, and of what fills no pack in its part.
    Composers put equal lengths, and so copies, into the same packs; exchanging these afterwards
    costs packs where a length is rare. A part holds no copies unless there are more of a sample
    than parts."""
    if num_parts < 2:
        return _compose(request)[0]
    assert request.copy_of is not None
    part_of = deal_out_copies(request.copy_of, num_parts, request.options.seed)
    packs = join_packs([_compose_some(request, part_of == part) for part in range(num_parts)])
    sizes, limits = limited(request)
    poor = (packs.sums(sizes) / limits).max(axis=1) < _FULL
    if not 0 < poor.sum() <= _MOST_POOR * packs.num_packs:
        return packs
    left = packs.sample_ids[np.repeat(poor, np.diff(packs.pack_offsets))]
    return join_packs([reorder_packs(packs, np.flatnonzero(~poor)), _compose_some(request, left)])


def _compose_some(request: PlanRequest, chosen: np.ndarray) -> Packs:
    """Pack some of the samples, given as a bool or index array."""
    ids = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
    packs, _ = _compose(request.subset(ids))
    return packs.of(ids)


def limited(request: PlanRequest) -> tuple[np.ndarray, np.ndarray]:
    """Sizes int64 (num_samples, num_limits), tokens first, and the limits of a pack."""
    columns = [request.lengths, *(array for array, _ in request.sizes.values())]
    limits = [request.options.seq_length, *(limit for _, limit in request.sizes.values())]
    return np.stack(columns, axis=1).astype(np.int64), np.array(limits)


def _compose(request: PlanRequest) -> tuple[Packs, int]:
    """Pack like `_pack`, as if copies were different samples."""
    lengths, options = request.lengths, request.options
    seq_length, seed = options.seq_length, options.seed
    strategy, own = STRATEGIES[options.strategy], options.strategy_options
    if request.sizes:
        packs = strategy(lengths, seq_length, seed=seed, budgets=request.sizes, **own)
        return packs, packs_bound(request)
    counts = count_lengths(lengths, seq_length)
    bound = lower_bound(counts)
    window_packs = request.window_packs if options.has_locality else None
    if window_packs is not None:
        order = _source_order(request)
        packs = pack_in_order(lengths, seq_length, order, window_packs=window_packs, seed=seed)
    elif options.strategy in COMPOSERS:
        at_random = request.mixed or (
            options.strategy == "auto" and "balance" in options.assignment
        )
        composer = mixed if at_random else COMPOSERS[options.strategy]
        composition = composer(counts, seed=seed)
        bound = max(bound, composition.lower_bound)
        choice = seed if "shuffle" in options.assignment else None
        packs = expand_composition(composition, lengths, counts, seed=choice)
    else:
        packs = strategy(lengths, seq_length, seed=seed, **own)
    if "balance" in options.assignment:
        assert request.balance_by is not None
        packs = balance_packs(packs, lengths, request.balance_by, window_packs, seed)
    return packs, bound


def _source_order(request: PlanRequest) -> np.ndarray:
    """Samples as they stand in the source; all first uses, then all second ones, and so on."""
    assert request.source_order is not None
    order = np.argsort(request.source_order, kind="stable")
    if request.copy_of is None:
        return order
    return order[np.argsort(rounds_of_copies(request.copy_of)[order], kind="stable")]


def packs_bound(request: PlanRequest) -> int:
    """Lower bound of the number of packs: the scarcest budget's, summed over homogeneous groups."""
    groups, parts = request.groups, [request]
    if request.options.homogeneous:
        assert groups is not None
        parts = [request.subset(groups == group) for group in np.unique(groups)]
    bound = 0
    for part in parts:
        budgets = [(part.lengths, part.options.seq_length), *part.sizes.values()]
        bound += max(size_lower_bound(sizes, limit) for sizes, limit in budgets)
    return bound

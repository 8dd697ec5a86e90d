"""Composition of packs: by strategy, budgets, windows, groups and copies."""

import numpy as np

from offline_packing.planner.assignment import balance_packs, pack_in_order
from offline_packing.planner.copies import deal_out_copies, rounds_of_copies, separate_copies
from offline_packing.planner.order import reorder_packs
from offline_packing.planner.request import PlanRequest
from offline_packing.planner.strategies import COMPOSERS, STRATEGIES
from offline_packing.planner.strategies.auto import mixed
from offline_packing.planner.strategies.budgets import size_lower_bound
from offline_packing.planner.strategies.composition import expand_composition
from offline_packing.planner.strategies.histogram import count_lengths, lower_bound
from offline_packing.planner.strategies.over_ranks import pack_over_ranks
from offline_packing.planner.strategies.strategy import Packs, join_packs

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

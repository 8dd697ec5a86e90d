"""Composition of packs: group by group, and in a group of all samples, of windows, or of parts.

split > group > parts, between which copies are dealt out | windows
"""

from collections.abc import Callable

import numpy as np

from offline_packing.planner.exchange import deal_out_copies, rounds_of_copies, separate_copies
from offline_packing.planner.options import PlanRequest
from offline_packing.planner.samples import Samples
from offline_packing.planner.strategies import COMPOSERS, STRATEGIES
from offline_packing.planner.strategies.budgets import size_lower_bound
from offline_packing.planner.strategies.composition import (
    count_lengths,
    expand_composition,
    lower_bound,
    room_of,
)
from offline_packing.planner.strategies.strategy import Packs, join_packs, reorder_packs
from offline_packing.planner.windows import pack_in_order

_PART_PACKS = 200  # packs that a part has at least when copies are dealt out
_MIXED_PACKS = 500  # packs that a mixture composes at a time, at most
_MIXED_WINDOWS = 32  # times that it composes, at most where packs are few
_FULL = 0.995  # load of a pack, of its scarcest limit, that stays as its part composed it
_MOST_POOR = 0.1  # share of packs that are composed again; where it is larger, none are full

#: Composes packs as if copies were different samples, with a lower bound of their number.
Make = Callable[[Samples, PlanRequest], tuple[Packs, int]]


def by_strategy(samples: Samples, request: PlanRequest) -> tuple[Packs, int]:
    """Compose packs of all samples at once."""
    options, seed = request.options, request.options.seed
    strategy, own = STRATEGIES[options.strategy], options.strategy_options
    if samples.budgets:
        return strategy(*samples.limited(), seed=seed, **own), _lower_bound(samples)
    counts = _count(samples)
    if options.strategy not in COMPOSERS:
        return strategy(*samples.limited(), seed=seed, **own), lower_bound(counts)
    composition = COMPOSERS[options.strategy](counts, seed=seed)
    packs = expand_composition(composition, samples.lengths, counts, seed=seed)
    return packs, max(lower_bound(counts), composition.lower_bound)


def in_windows(samples: Samples, request: PlanRequest) -> tuple[Packs, int]:
    """Compose packs in windows over the source; copies come in rounds, all first uses first."""
    order = np.argsort(samples.columns["source_order"], kind="stable")
    if (copy_of := samples.columns.get("copy_of")) is not None:
        order = order[np.argsort(rounds_of_copies(copy_of)[order], kind="stable")]
    sizes, seed = (samples.lengths, samples.seq_length), request.options.seed
    packs = pack_in_order(*sizes, order, window_packs=request.window_packs, seed=seed)
    return packs, lower_bound(_count(samples))


def along_mixture(samples: Samples, request: PlanRequest) -> tuple[Packs, int]:
    """Compose packs in windows over the places that the mixture gives to samples."""
    lengths, columns, bound = samples.lengths, samples.columns, lower_bound(_count(samples))
    order = request.mixture.order_samples(columns["source"], columns["source_order"], lengths)
    window_packs = min(_MIXED_PACKS, max(1, bound // _MIXED_WINDOWS))
    sizes, seed = (lengths, samples.seq_length), request.options.seed
    return pack_in_order(*sizes, order, window_packs=window_packs, seed=seed), bound


def compose(samples: Samples, request: PlanRequest, make: Make) -> tuple[Packs, int]:
    """Compose packs, group by group if they shall be homogeneous, and bound their number."""
    if not request.options.homogeneous:
        return _compose_group(samples, request, make)
    found, bound, groups = [], 0, samples.columns["groups"]
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        packs, own_bound = _compose_group(samples.subset(members), request, make)
        found.append(packs.of(members))
        bound += own_bound
    return join_packs(found), bound


def _compose_group(samples: Samples, request: PlanRequest, make: Make) -> tuple[Packs, int]:
    """Compose packs of a group, no two copies of one sample in a pack.

    Composers put equal lengths, and so copies, into the same packs; exchanging these afterwards
    costs packs where a length is rare. So copies are dealt out between parts first, which hold no
    two of a sample unless there are more of it than parts."""
    seed, copy_of = request.options.seed, samples.columns.get("copy_of")
    most = 0 if copy_of is None else int(np.bincount(copy_of).max(initial=0))  # of one sample
    bound = max(_lower_bound(samples), most) if copy_of is not None else 0
    num_parts = min(most, bound // _PART_PACKS) if make is by_strategy else 0
    if copy_of is not None and num_parts > 1:
        part_of, parts = deal_out_copies(copy_of, num_parts, seed), []
        for part in range(num_parts):
            ids = np.flatnonzero(part_of == part)
            parts.append(make(samples.subset(ids), request)[0].of(ids))
        packs = join_packs(parts)
    else:
        packs, found = make(samples, request)
        if copy_of is None or make is along_mixture:
            bound = max(found, most)
    if num_parts > 1 or make is along_mixture:
        packs = _compose_poor_again(samples, request, packs)
    if copy_of is not None:
        reach = request.window_packs if make is in_windows else None
        packs = separate_copies(packs, *samples.limited(), copy_of, reach, seed)
    return packs, bound


def _compose_poor_again(samples: Samples, request: PlanRequest, packs: Packs) -> Packs:
    """Recompose the packs that their part or window left unfilled, if these are few, and put the
    new ones in their places."""
    sizes, limits = samples.limited()
    poor = (packs.sums(sizes) / limits).max(axis=1) < _FULL
    if not 0 < poor.sum() <= _MOST_POOR * packs.num_packs:
        return packs
    left = packs.sample_ids[np.repeat(poor, np.diff(packs.pack_offsets))]
    new = by_strategy(samples.subset(left), request)[0].of(left)
    whole = np.flatnonzero(~poor)
    places = np.linspace(0, poor.sum() - 1, new.num_packs).astype(np.int64)
    order = np.argsort(np.append(whole, np.flatnonzero(poor)[places]), kind="stable")
    return reorder_packs(join_packs([reorder_packs(packs, whole), new]), order)


def _count(samples: Samples) -> np.ndarray:
    return count_lengths(samples.lengths, room_of(samples.lengths, samples.seq_length))


def _lower_bound(samples: Samples) -> int:
    """Lower bound of the number of packs: the scarcest limit's."""
    limits = [(samples.lengths, samples.seq_length), *samples.budgets.values()]
    return max(size_lower_bound(sizes, limit) for sizes, limit in limits)

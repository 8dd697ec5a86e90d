"""The functions of the passes over a draft of a plan.

Packs are composed group by group, and in a group of all samples, of windows, or of parts:

split > group > parts, between which copies are dealt out | windows
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from offline_packing.planner.exchange import deal_out_copies, rounds_of_copies, separate_copies
from offline_packing.planner.options import PlanRequest
from offline_packing.planner.ranks.deal import PackCosts, cost_grouped_order
from offline_packing.planner.ranks.uniform import kinds_of, make_uniform
from offline_packing.planner.samples import Samples
from offline_packing.planner.strategies import COMPOSERS, STRATEGIES
from offline_packing.planner.strategies.budgets import size_lower_bound
from offline_packing.planner.strategies.composition import (
    count_lengths,
    expand_composition,
    lower_bound,
    room_of,
)
from offline_packing.planner.strategies.kernels import random_state, shuffle_between
from offline_packing.planner.strategies.strategy import Packs, join_packs, reorder_packs
from offline_packing.planner.windows import pack_in_order

_PART_PACKS = 200  # packs that a part has at least when copies are dealt out
_MIXED_PACKS = 500  # packs that a mixture composes at a time, at most
_MIXED_WINDOWS = 32  # times that it composes, at most where packs are few
_FULL = 0.995  # load of a pack, of its scarcest limit, that stays as its part composed it
_MOST_POOR = 0.1  # share of packs that are composed again; where it is larger, none are full
_SAMPLE_ORDER_STREAM = 1  # random numbers of their own: other choices stay as they are


class Draft(NamedTuple):
    """A plan so far."""

    packs: Packs
    #: no plan for these samples has fewer packs (of the same groups and budgets)
    bound: int
    #: what passes say of their work, for `PlanInfo.settings`
    notes: Mapping[str, Any] = {}

    def of(self, order: np.ndarray) -> "Draft":
        """Return the draft with its packs in this order."""
        return self._replace(packs=reorder_packs(self.packs, order))


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
    """Compose packs in windows over the places that the mixture gives to samples; or over the
    source, where copies come in rounds, all first uses first."""
    lengths, columns, bound = samples.lengths, samples.columns, lower_bound(_count(samples))
    if request.mixture is not None:
        order = request.mixture.order_samples(columns["source"], columns["source_order"], lengths)
        window_packs = min(_MIXED_PACKS, max(1, bound // _MIXED_WINDOWS))
    else:
        order = np.argsort(columns["source_order"], kind="stable")
        if (copy_of := columns.get("copy_of")) is not None:
            order = order[np.argsort(rounds_of_copies(copy_of)[order], kind="stable")]
        window_packs = request.window_packs
    sizes, seed = (lengths, samples.seq_length), request.options.seed
    return pack_in_order(*sizes, order, window_packs=window_packs, seed=seed), bound


def compose(samples: Samples, request: PlanRequest, _: Draft | None) -> Draft:
    """Compose packs, group by group if they shall be homogeneous, and bound their number."""
    if not request.options.homogeneous:
        return Draft(*_compose_group(samples, request))
    found, bound, groups = [], 0, samples.columns["groups"]
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        packs, own_bound = _compose_group(samples.subset(members), request)
        found.append(packs.of(members))
        bound += own_bound
    return Draft(join_packs(found), bound)


def _compose_group(samples: Samples, request: PlanRequest) -> tuple[Packs, int]:
    """Compose packs of a group, no two copies of one sample in a pack.

    Composers put equal lengths, and so copies, into the same packs; exchanging these afterwards
    costs packs where a length is rare. So copies are dealt out between parts first, which hold no
    two of a sample unless there are more of it than parts."""
    seed, copy_of = request.options.seed, samples.columns.get("copy_of")
    is_mixed, has_locality = request.mixture is not None, request.options.assignment == "locality"
    most = 0 if copy_of is None else int(np.bincount(copy_of).max(initial=0))  # of one sample
    bound = num_parts = 0
    if copy_of is not None and not is_mixed:
        bound = max(_lower_bound(samples), most)
        num_parts = 0 if has_locality else min(most, bound // _PART_PACKS)
    if copy_of is not None and num_parts > 1:
        part_of, parts = deal_out_copies(copy_of, num_parts, seed), []
        for part in range(num_parts):
            ids = np.flatnonzero(part_of == part)
            parts.append(by_strategy(samples.subset(ids), request)[0].of(ids))
        packs = join_packs(parts)
    else:
        make = in_windows if is_mixed or has_locality else by_strategy
        packs, found = make(samples, request)
        bound = bound or max(found, most)
    if num_parts > 1 or is_mixed:
        packs = _compose_poor_again(samples, request, packs)
    if copy_of is not None:
        reach = request.window_packs if has_locality else None
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


def _make_uniform(samples: Samples, request: PlanRequest, draft: Draft) -> Draft:
    """Make the number of packs of each kind divide among the ranks."""
    if request.layout is None or not draft.packs.num_packs:
        return draft
    media = samples.columns["media"]
    packs, halved, repeated = make_uniform(draft.packs, media, samples.lengths, request.layout)
    return Draft(packs, draft.bound, {"uniform": {"halved": halved, "repeated": repeated}})


def _order_by_cost(samples: Samples, request: PlanRequest, draft: Draft) -> Draft:
    """Order packs so that the ranks get similar cost at each step."""
    packs, columns = draft.packs, samples.columns
    assert request.layout is not None

    def sums(values: np.ndarray) -> np.ndarray:
        of_uses = values[packs.sample_ids]
        return np.bincount(packs.pack_of_slot(), of_uses, minlength=packs.num_packs)

    features = [array for name, array in columns.items() if name.startswith("features[")]
    costs = PackCosts.of(
        sums(columns["cost"] if "cost" in columns else samples.lengths.astype(np.float64) ** 2),
        sums(columns["tower_cost"]) if "tower_cost" in columns else None,
        kinds_of(columns["media"], packs) if "uniform" in draft.notes else None,
        np.stack([sums(some) for some in (samples.lengths, *features)], axis=1),
    )
    return draft.of(cost_grouped_order(costs, request.layout, request.options.seed))


def _follow_mixture(samples: Samples, request: PlanRequest, draft: Draft) -> Draft:
    """Order packs so that their sources follow the mixture."""
    source, lengths = samples.columns["source"], samples.lengths
    return draft.of(request.mixture.order_packs(draft.packs, source, lengths))


def _shuffle(samples: Samples, request: PlanRequest, draft: Draft) -> Draft:
    """Put the packs into random order."""
    return draft.of(np.random.default_rng(request.options.seed).permutation(draft.packs.num_packs))


def _order_samples(samples: Samples, request: PlanRequest, draft: Draft) -> Draft:
    """Put the samples of each pack into random order, unless the strategy is another packer's."""
    if request.options.strategy not in COMPOSERS:
        return draft
    packs = draft.packs._replace(sample_ids=draft.packs.sample_ids.copy())
    shuffle_between(*packs, random_state([request.options.seed, _SAMPLE_ORDER_STREAM]))
    return draft._replace(packs=packs)


#: Functions of the passes by name; the other passes are what these keep.
PASSES: Final[Mapping[str, Callable[[Samples, PlanRequest, Any], Draft]]] = {
    "compose": compose,
    "uniform": _make_uniform,
    "equal_cost": _order_by_cost,
    "mixture_order": _follow_mixture,
    "shuffle": _shuffle,
    "sample_order": _order_samples,
}

"""The plan: which samples form which pack, in which order, and which are set aside."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from offline_packing.planner.exchange import (
    deal_out_copies,
    rounds_of_copies,
    separate_copies,
)
from offline_packing.planner.mixture import Mixture
from offline_packing.planner.pack_plan import PackPlan, PlanInfo
from offline_packing.planner.passes import PlanOptions, PlanRequest
from offline_packing.planner.ranks.deal import PackCosts, cost_grouped_order
from offline_packing.planner.ranks.layout import RankLayout
from offline_packing.planner.ranks.uniform import kinds_of, make_uniform
from offline_packing.planner.samples import Budgets, Samples, admit_samples
from offline_packing.planner.strategies import COMPOSERS, STRATEGIES
from offline_packing.planner.strategies.budgets import size_lower_bound
from offline_packing.planner.strategies.composition import (
    count_lengths,
    expand_composition,
    lower_bound,
    room_of,
)
from offline_packing.planner.strategies.kernels import kernels_for, random_state, shuffle_between
from offline_packing.planner.strategies.strategy import Packs, join_packs, reorder_packs
from offline_packing.planner.windows import pack_in_order
from task_encoders.field_types import Count, Integer, checked, checked_model

_SAMPLE_ORDER_STREAM = 1  # random numbers of their own: other choices stay as they are
_PART_PACKS = 200  # packs that a part has at least when copies are dealt out
_MIXED_PACKS = 500  # packs that a mixture composes at a time, at most
_MIXED_WINDOWS = 32  # times that it composes, at most where packs are few
_FULL = 0.995  # load of a pack, of its scarcest limit, that stays as its part composed it
_MOST_POOR = 0.1  # share of packs that are composed again; where it is larger, none are full


class Draft(NamedTuple):
    """A plan so far."""

    packs: Packs
    #: no plan for these samples has fewer packs (of the same groups and budgets)
    bound: int
    #: what passes say of their work, for `PlanInfo.settings`
    notes: Mapping[str, Any] = {}


@checked
def plan_packs(
    num_tokens: np.ndarray,
    seq_length: Integer,
    *,
    budgets: Budgets | None = None,
    groups: np.ndarray | None = None,
    cost: np.ndarray | None = None,
    tower_cost: np.ndarray | None = None,
    media: np.ndarray | None = None,
    features: Sequence[np.ndarray] = (),
    source_order: np.ndarray | None = None,
    mixture: Mixture | None = None,
    source: np.ndarray | None = None,
    copy_of: np.ndarray | None = None,
    order: RankLayout | None = None,
    window_packs: Count = 1000,
    **options: Any,
) -> PackPlan:
    """Pack samples into sequences of ``seq_length`` tokens. Samples that fit no pack are set aside,
    with a reason each. Raises ValueError where an argument is out of range, missing, or contradicts
    another.

    Args:
        num_tokens: integer array (num_samples,), tokens of each sample. All further arrays have
            the same shape.
        seq_length: tokens that a pack may hold.
        budgets: further limits per pack, name -> (integer array, limit). Not for strategies that
            decide on the histogram of lengths: ``COMPOSERS`` but auto, and hash_bucket.
        groups: integer array, for example the kind of media of each sample: with ``homogeneous``,
            packs hold samples of one group only.
        cost: of training on each sample (``families.model_cost``); default: its length squared.
            Used by ``order``.
        tower_cost: the vision tower's part of ``cost``; ``order`` then balances both phases.
        media: 1 for samples with images, 2 with videos, 3 with both, 0 with neither; see
            ``order.uniform``.
        features: further quantities, such as tokens with loss, to be balanced over optimizer steps
            of eight micro batches under ``order``.
        source_order: place of each sample in the source, any sortable array; for assignment
            locality.
        mixture: shares of tokens that each source has at the start and the end of the plan, whose
            mean it has in all; needs ``source_order``, by which the samples of a source follow each
            other, copies far apart.
        source: number of each sample's source, for ``mixture``.
        copy_of: integer array from 0; samples with the same number are copies of one. No pack holds
            two, and locality takes first copies first, then all second ones, and so on.
        order: write the packs so that the ranks of this layout get similar cost at each step; with
            ``uniform`` packs of one kind, for which some may be halved or repeated.
        window_packs: packs that locality composes at a time; best the packs of a shard.
        options: further fields of ``PlanOptions``: strategy, strategy_options, seed, pad_multiple,
            assignment, homogeneous, max_samples. The same input and seed give the same plan.
            Samples stand in random order in their packs, unless the strategy is another packer's.
    """
    given = {name: value for name, value in options.items() if value is not None}
    chosen = checked_model(PlanOptions, {"seq_length": seq_length, **given})
    request = PlanRequest(
        chosen,
        budgets or (),
        order,
        window_packs,
        mixture is not None,
    )
    limits = dict(budgets or {})
    if chosen.max_samples is not None:
        limits["samples"] = (np.ones(len(num_tokens), np.int32), chosen.max_samples)
    columns = {
        "groups": groups,
        "cost": cost,
        "tower_cost": tower_cost,
        "media": media,
        "source_order": source_order,
        "source": source,
        "copy_of": copy_of,
        **{f"features[{i}]": array for i, array in enumerate(features)},
    }
    admission = admit_samples(num_tokens, seq_length, chosen.pad_multiple, limits, columns)
    samples, passes = admission.samples, request.passes()
    for one in passes:
        if missing := [name for name in one.needs if name not in samples.columns]:
            raise ValueError(f"{one.title} needs {missing[0]}, an array with one entry per sample")
    with kernels_for(len(samples.lengths), room_of(samples.lengths, seq_length)):
        draft = _compose(samples, request) if mixture is None else _mix(samples, request, mixture)
        for one in passes:
            if one.name in _AFTER:
                draft = _AFTER[one.name](samples, draft, request)
    packs, bound, notes = draft
    info = PlanInfo(
        seq_length=seq_length,
        strategy=chosen.strategy,
        seed=chosen.seed,
        pad_multiple=chosen.pad_multiple,
        num_tokens=int(samples.lengths[packs.sample_ids].sum(dtype=np.int64)),
        lower_bound=bound,
        reason_names=admission.reason_names,
        num_copies=len(packs.sample_ids) - len(samples.lengths),
        settings={
            "homogeneous": chosen.homogeneous,
            "assignment": chosen.assignment,
            "budgets": {name: int(limit) for name, (_, limit) in limits.items()},
            "order": None if order is None else asdict(order),
            **notes,
        },
    )
    if admission.sample_ids is not None:
        packs = packs.of(admission.sample_ids)
    return PackPlan(*packs, admission.set_aside_ids, admission.set_aside_reasons, info)


def _compose(samples: Samples, request: PlanRequest) -> Draft:
    """Packs of all samples; group by group if packs shall be homogeneous."""
    if not request.options.homogeneous:
        return Draft(*_compose_group(samples, request))
    parts, bound, groups = [], 0, samples.columns["groups"]
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        packs, part_bound = _compose_group(samples.subset(members), request)
        parts.append(packs.of(members))
        bound += part_bound
    return Draft(join_packs(parts), bound)


def _compose_group(samples: Samples, request: PlanRequest) -> tuple[Packs, int]:
    """Packs of all samples, no two copies of one in a pack, and a lower bound of their number."""
    options, copy_of = request.options, samples.columns.get("copy_of")
    if copy_of is None:
        return _compose_part(samples, request)
    most_copies = int(np.bincount(copy_of).max(initial=0))  # of one sample
    bound = max(_lower_bound(samples), most_copies)
    num_parts = 0 if options.has_locality else min(most_copies, bound // _PART_PACKS)
    packs = _compose_apart(samples, request, copy_of, num_parts)
    reach = request.window_packs if options.has_locality else None
    return separate_copies(packs, *samples.limited(), copy_of, reach, options.seed), bound


def _compose_apart(
    samples: Samples, request: PlanRequest, copy_of: np.ndarray, num_parts: int
) -> Packs:
    """Packs of parts between which copies are dealt out, and of samples that fill no pack in their
    part. Composers put equal lengths, and so copies, into the same packs; exchanging these
    afterwards costs packs where a length is rare. A part holds no copies unless there are more of a
    sample than parts."""

    def compose(ids: np.ndarray) -> Packs:
        return _compose_part(samples.subset(ids), request)[0].of(ids)

    if num_parts < 2:
        return _compose_part(samples, request)[0]
    part_of = deal_out_copies(copy_of, num_parts, request.options.seed)
    packs = join_packs([compose(np.flatnonzero(part_of == part)) for part in range(num_parts)])
    return _compose_poor_again(samples, request, packs)


def _compose_poor_again(samples: Samples, request: PlanRequest, packs: Packs) -> Packs:
    """The packs, with new ones in the places of those that their part or window left unfilled, if
    these are few."""
    sizes, limits = samples.limited()
    poor = (packs.sums(sizes) / limits).max(axis=1) < _FULL
    if not 0 < poor.sum() <= _MOST_POOR * packs.num_packs:
        return packs
    left = packs.sample_ids[np.repeat(poor, np.diff(packs.pack_offsets))]
    new = _compose_part(samples.subset(left), request)[0].of(left)
    whole = np.flatnonzero(~poor)
    places = np.linspace(0, poor.sum() - 1, new.num_packs).astype(np.int64)
    order = np.argsort(np.append(whole, np.flatnonzero(poor)[places]), kind="stable")
    return reorder_packs(join_packs([reorder_packs(packs, whole), new]), order)


def _mix(samples: Samples, request: PlanRequest, mixture: Mixture) -> Draft:
    """Packs of all samples along a mixture, no two copies of one in a pack."""
    lengths, seq_length, options = samples.lengths, samples.seq_length, request.options
    source, copy_of = samples.columns["source"], samples.columns.get("copy_of")
    bound = lower_bound(count_lengths(lengths, room_of(lengths, seq_length)))
    order = mixture.samples(source, samples.columns["source_order"], lengths)
    window_packs = min(_MIXED_PACKS, max(1, bound // _MIXED_WINDOWS))
    packs = pack_in_order(lengths, seq_length, order, window_packs=window_packs, seed=options.seed)
    packs = _compose_poor_again(samples, request, packs)
    if copy_of is not None:
        bound = max(bound, int(np.bincount(copy_of).max(initial=0)))
        packs = separate_copies(packs, *samples.limited(), copy_of, None, options.seed)
    return Draft(reorder_packs(packs, mixture.order(packs, source, lengths)), bound)


def _compose_part(samples: Samples, request: PlanRequest) -> tuple[Packs, int]:
    """Compose packs as if copies were different samples."""
    lengths, seq_length, options = samples.lengths, samples.seq_length, request.options
    strategy, seed, own = STRATEGIES[options.strategy], options.seed, options.strategy_options
    if samples.budgets:
        return strategy(*samples.limited(), seed=seed, **own), _lower_bound(samples)
    counts = count_lengths(lengths, room_of(lengths, seq_length))
    bound = lower_bound(counts)
    window_packs = request.window_packs if options.has_locality else None
    if window_packs is not None:
        order = np.argsort(samples.columns["source_order"], kind="stable")
        if (copy_of := samples.columns.get("copy_of")) is not None:
            # all first uses, then all second ones, and so on
            order = order[np.argsort(rounds_of_copies(copy_of)[order], kind="stable")]
        packs = pack_in_order(lengths, seq_length, order, window_packs=window_packs, seed=seed)
    elif options.strategy in COMPOSERS:
        composition = COMPOSERS[options.strategy](counts, seed=seed)
        bound = max(bound, composition.lower_bound)
        packs = expand_composition(composition, lengths, counts, seed=seed)
    else:
        packs = strategy(*samples.limited(), seed=seed, **own)
    return packs, bound


def _lower_bound(samples: Samples) -> int:
    """Lower bound of the number of packs: the scarcest limit's."""
    limits = [(samples.lengths, samples.seq_length), *samples.budgets.values()]
    return max(size_lower_bound(sizes, limit) for sizes, limit in limits)


def _make_uniform(samples: Samples, draft: Draft, request: PlanRequest) -> Draft:
    """Make the number of packs of each kind divide among the ranks."""
    if request.order is None or not draft.packs.num_packs:
        return draft
    media = samples.columns["media"]
    packs, halved, repeated = make_uniform(draft.packs, media, samples.lengths, request.order)
    notes = {**draft.notes, "uniform": {"halved": halved, "repeated": repeated}}
    return draft._replace(packs=packs, notes=notes)


def _order_by_cost(samples: Samples, draft: Draft, request: PlanRequest) -> Draft:
    """The packs in order for the ranks of ``request.order``."""
    packs, columns, layout = draft.packs, samples.columns, request.order
    assert layout is not None

    def sums(values: np.ndarray) -> np.ndarray:
        of_uses = values[packs.sample_ids]
        return np.bincount(packs.pack_of_slot(), of_uses, minlength=packs.num_packs)

    features = [array for name, array in columns.items() if name.startswith("features[")]
    costs = PackCosts.of(
        sums(samples.cost),
        sums(columns["tower_cost"]) if "tower_cost" in columns else None,
        kinds_of(columns["media"], packs) if "uniform" in draft.notes else None,
        np.stack([sums(some) for some in (samples.lengths, *features)], axis=1),
    )
    places = cost_grouped_order(costs, layout, request.options.seed)
    return draft._replace(packs=reorder_packs(packs, places))


def _shuffle(samples: Samples, draft: Draft, request: PlanRequest) -> Draft:
    """The packs in random order."""
    order = np.random.default_rng(request.options.seed).permutation(draft.packs.num_packs)
    return draft._replace(packs=reorder_packs(draft.packs, order))


def _order_samples(samples: Samples, draft: Draft, request: PlanRequest) -> Draft:
    """The samples of each pack in random order, unless the strategy is another packer's."""
    if request.options.strategy not in COMPOSERS:
        return draft
    ids, offsets = draft.packs.sample_ids.copy(), draft.packs.pack_offsets
    shuffle_between(ids, offsets, random_state([request.options.seed, _SAMPLE_ORDER_STREAM]))
    return draft._replace(packs=Packs(ids, offsets))


#: passes after the composition, by name
_AFTER: dict[str, Callable[[Samples, Draft, PlanRequest], Draft]] = {
    "uniform": _make_uniform,
    "equal_cost": _order_by_cost,
    "shuffle": _shuffle,
    "sample_order": _order_samples,
}

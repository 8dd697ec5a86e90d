"""The plan: which samples form which pack, in which order, and which are set aside."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from offline_packing.planner.compose import pack_request
from offline_packing.planner.context_parallel import ContextParallel
from offline_packing.planner.options import PlanOptions
from offline_packing.planner.order import (
    RankLayout,
    cost_grouped_order,
    fill_slots,
    kinds_of,
    make_uniform,
    reorder_packs,
    shuffle_samples,
)
from offline_packing.planner.pack_plan import PackPlan, PlanInfo
from offline_packing.planner.ranks.picture_split import even_samples
from offline_packing.planner.request import (
    Admission,
    Budgets,
    PlanRequest,
    admit_samples,
)
from offline_packing.planner.strategies import COMPOSERS
from offline_packing.planner.strategies.histogram import announce_compilation
from offline_packing.planner.strategies.strategy import Packs
from task_encoders.field_types import Count, Integer, checked, checked_model
from task_encoders.packs.pack_format import cut_multiple


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
    balance_by: np.ndarray | None = None,
    copy_of: np.ndarray | None = None,
    order: RankLayout | None = None,
    context_parallel: ContextParallel | None = None,
    picture_ranks: Count | None = None,
    units: np.ndarray | None = None,
    window_packs: Count = 1000,
    mixed: bool = False,
    **options: Any,
) -> PackPlan:
    """Pack samples into sequences of ``seq_length`` tokens. Samples that fit no pack are set aside,
    with a reason each. Raises ValueError where an argument is out of range, missing, or contradicts
    another.

    Args:
        num_tokens: integer array (num_samples,), tokens of each sample. All further arrays have
            the same shape.
        seq_length: tokens that a pack may hold.
        budgets: further limits per pack, name -> (integer array, limit). Any strategy but those
            that decide on the histogram of lengths: ``COMPOSERS`` but auto, and hash_bucket.
        groups: integer array, for example the kind of media of each sample: with ``homogeneous``,
            packs hold samples of one group only.
        cost: what training on each sample costs (``families.model_cost``); default: its length
            squared. Used by ``order`` and ``context_parallel``.
        tower_cost: the vision tower's part of ``cost``; ``order`` then balances both phases, and
            ``picture_ranks`` evens it out.
        media: 1 for samples with images, 2 with videos, 3 with both, 0 with neither; see
            ``order.uniform``.
        features: further quantities, such as tokens with loss, of which optimizer steps of eight
            micro batches are to have nearly the same under ``order``.
        source_order: where each sample stands in the source, any sortable array; for assignment
            locality.
        balance_by: the quantity that assignment balance evens out, for example vision patches.
        copy_of: integer array from 0; samples with the same number are copies of one. No pack holds
            two, and locality takes first copies first, then all second ones, and so on.
        order: write the packs so that the ranks of this layout get similar cost at each step; with
            ``uniform`` packs of one kind, for which some may be halved or repeated.
        context_parallel: packs go over 1, 2, 4 … ranks, in slots of all ranks with nearly equal
            cost; ``seq_length`` is the longest pack. Each sample counts as its length rounded up to
            ``cut_multiple`` of its pack's ranks. The lower bound is one of slots.
        picture_ranks: context-parallel ranks that each pack goes over; its samples stand so that a
            split of its pictures by their number gives these even tower work. Needs ``units`` and
            ``tower_cost``.
        units: images, and steps of videos' grids, of each sample.
        window_packs: packs that locality composes at a time; best the packs of a shard.
        mixed: compose random lengths, so that hardly two samples of a pack share one again under
            another seed: for several epochs. Needs strategy auto.
        options: further fields of ``PlanOptions``: strategy, strategy_options, seed, pad_multiple,
            assignment, homogeneous, max_samples. The same input and seed give the same plan.
            Samples stand in random order in their packs, unless the strategy is another packer's.
    """
    announce_compilation()
    given = {name: value for name, value in options.items() if value is not None}
    chosen = checked_model(PlanOptions, {"seq_length": seq_length, **given})
    limits = dict(budgets or {})
    if chosen.max_samples is not None:
        limits["samples"] = (np.ones(len(num_tokens), np.int32), chosen.max_samples)
    unit = cut_multiple(1, chosen.pad_multiple) if context_parallel else chosen.pad_multiple
    admission = admit_samples(num_tokens, seq_length, unit, limits)
    request = PlanRequest(
        options=chosen,
        window_packs=window_packs,
        lengths=num_tokens,
        sizes=limits,
        groups=groups,
        cost=cost,
        tower_cost=tower_cost,
        media=media,
        features=features,
        source_order=source_order,
        balance_by=balance_by,
        copy_of=copy_of,
        order=order,
        context_parallel=context_parallel,
        picture_ranks=picture_ranks,
        units=units,
        unit=unit,
        mixed=mixed,
    ).admitted(admission)
    request.check()
    return _plan(request, admission)


def _plan(request: PlanRequest, admission: Admission) -> PackPlan:
    """The plan of a request that was checked, in terms of all samples."""
    options, slots, cp_sizes = request.options, request.context_parallel, None
    packs, bound = pack_request(request)
    done: dict[str, Any] = {}
    if request.order is not None:
        packs, done = _order_for_ranks(packs, request)
    elif slots is not None:
        packs, cp_sizes = _fill_slots(packs, request)
    elif "shuffle" in options.assignment and not options.has_locality:
        shuffled = np.random.default_rng(options.seed).permutation(packs.num_packs)
        packs = reorder_packs(packs, shuffled)
    if options.strategy in COMPOSERS:
        packs = shuffle_samples(packs, options.seed)
    if request.picture_ranks is not None and packs.num_packs:
        assert request.units is not None
        assert request.tower_cost is not None
        packs = even_samples(packs, request.units, request.tower_cost, request.picture_ranks)
    kept = request.lengths[packs.sample_ids]
    num_tokens = int(kept.sum(dtype=np.int64))
    if slots is not None and cp_sizes is not None:
        bound = -(-num_tokens // (slots.ranks * slots.tokens_per_rank))
        each = np.repeat(cp_sizes, np.diff(packs.pack_offsets)) * request.unit
        num_tokens = int((-(-kept // each) * each.astype(np.int64)).sum())
    info = PlanInfo(
        seq_length=options.seq_length,
        strategy=options.strategy,
        seed=options.seed,
        pad_multiple=options.pad_multiple,
        num_tokens=num_tokens,
        lower_bound=bound,
        reason_names=admission.reason_names,
        num_copies=len(packs.sample_ids) - len(request.lengths),
        settings=_settings(request) | done,
        context_parallel=slots,
    )
    if admission.sample_ids is not None:
        packs = packs.of(admission.sample_ids)
    return PackPlan(*packs, admission.set_aside_ids, admission.set_aside_reasons, info, cp_sizes)


def _order_for_ranks(packs: Packs, request: PlanRequest) -> tuple[Packs, dict[str, Any]]:
    """The packs in order for the ranks of ``request.order``, and what uniform steps took."""
    order, kinds, done = request.order, None, {}
    assert order is not None
    if order.uniform and packs.num_packs:
        assert request.media is not None
        packs, halved, repeated = make_uniform(packs, request.media, request.lengths, order)
        kinds = kinds_of(request.media, packs)
        done = {"uniform": {"halved": halved, "repeated": repeated}}

    def sums(values: np.ndarray) -> np.ndarray:
        of_slots = values[packs.sample_ids]
        return np.bincount(packs.pack_of_slot(), of_slots, minlength=packs.num_packs)

    places = cost_grouped_order(
        sums(_sample_costs(request)),
        order,
        request.options.seed,
        tower=None if request.tower_cost is None else sums(request.tower_cost),
        kinds=kinds,
        features=np.stack([sums(some) for some in (request.lengths, *request.features)], axis=1),
    )
    return reorder_packs(packs, places), done


def _fill_slots(packs: Packs, request: PlanRequest) -> tuple[Packs, np.ndarray]:
    """The packs in slots of ``request.context_parallel``, and the ranks of each."""
    assert request.context_parallel is not None
    return fill_slots(
        packs,
        request.lengths // request.unit,
        _sample_costs(request),
        request.context_parallel.capacities(request.options.seq_length) // request.unit,
        request.options.seed if "shuffle" in request.options.assignment else None,
    )


def _sample_costs(request: PlanRequest) -> np.ndarray:
    return request.lengths.astype(np.float64) ** 2 if request.cost is None else request.cost


def _settings(request: PlanRequest) -> dict[str, Any]:
    """Requested settings besides the fields of PlanInfo, as JSON values."""
    order, options = request.order, request.options
    return {
        "homogeneous": options.homogeneous,
        "assignment": sorted(set(options.assignment)),
        "budgets": {name: int(limit) for name, (_, limit) in request.sizes.items()},
        "order": None if order is None else asdict(order),
        **({"picture_ranks": request.picture_ranks} if request.picture_ranks else {}),
    }

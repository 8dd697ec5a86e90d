"""The plan: which samples form which pack, in which order, and which are set aside."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from offline_packing.planner.composing import PASSES, Draft
from offline_packing.planner.mixture import Mixture
from offline_packing.planner.options import PlanOptions, PlanRequest
from offline_packing.planner.pack_plan import PackPlan, PlanInfo
from offline_packing.planner.passes import asked_passes
from offline_packing.planner.ranks.layout import RankLayout
from offline_packing.planner.samples import Budgets, Column, Table, admit_samples
from offline_packing.planner.strategies.composition import room_of
from offline_packing.planner.strategies.kernels import kernels_for
from task_encoders.field_types import Count, Integer, checked, checked_model


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
    with a reason each. The same input and seed give the same plan. Raises ValueError where an
    argument is out of range, missing, or contradicts another.

    Arrays have one entry per sample, (num_samples,):

    ============  =====================  =========================================================
    array         of                     meaning
    ============  =====================  =========================================================
    num_tokens    integers               tokens of each sample
    budgets       name: (array, limit)   further limits per pack, for strategies that see more
                                         than the histogram of lengths, as auto does
    groups        integers               packs hold one group only, with ``homogeneous``
    cost          numbers                of training on a sample (default: its length squared),
                                         for ``order``
    tower_cost    numbers                vision tower's part of ``cost``: both phases are balanced
    features      list of arrays         balanced over optimizer steps, such as tokens with loss
    media         0, 1, 2 or 3           neither, images, videos, both; for ``order.uniform``
    source_order  sortable               place in the source; for locality and ``mixture``
    source        integers               number of the source, for ``mixture``
    copy_of       integers               copies of one sample have one number, and share no pack
    ============  =====================  =========================================================

    Options, the fields of ``PlanOptions`` among them:

    ============  =====================  =========================================================
    option        default                meaning
    ============  =====================  =========================================================
    seq_length                           tokens that a pack may hold
    strategy      auto                   how samples are combined; ``strategy_options`` are its own
    seed          0                      of every random choice
    pad_multiple  1                      a sample counts as its length rounded up to this
    max_samples   none                   samples of a pack
    homogeneous   false                  see ``groups``
    assignment    shuffle                or locality: packs follow the source, ``window_packs`` at
                                         a time, best the packs of a shard
    mixture       none                   shares of tokens of each source at the start and the end
    order         none                   ranks that get similar cost at each step, and with
                                         ``uniform`` packs of one kind: some are halved or repeated
    ============  =====================  =========================================================
    """
    given = {name: value for name, value in options.items() if value is not None}
    chosen = checked_model(PlanOptions, {"seq_length": seq_length, **given})
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
    table = Table(
        Column(num_tokens),
        {name: (Column(array), limit) for name, (array, limit) in (budgets or {}).items()},
        {name: Column(array) for name, array in columns.items() if array is not None},
    )
    return plan_table(table, PlanRequest(chosen, table.budgets, order, window_packs, mixture))


def plan_table(table: Table, request: PlanRequest) -> PackPlan:
    """Plan the samples of a table; see `plan_packs`."""
    options = request.options
    limits = {name: (column.values, limit) for name, (column, limit) in table.budgets.items()}
    if options.max_samples is not None:
        limits["samples"] = (np.ones(len(table.num_tokens.values), np.int32), options.max_samples)
    columns = {name: column.values for name, column in table.columns.items()}
    admission = admit_samples(
        table.num_tokens.values, options.seq_length, options.pad_multiple, limits, columns
    )
    samples, passes = admission.samples, asked_passes(request)
    for one in passes:
        if missing := [name for name in one.needs if name not in samples.columns]:
            raise ValueError(f"{one.title} needs {missing[0]}, an array with one entry per sample")
    draft: Draft | None = None
    with kernels_for(len(samples.lengths), room_of(samples.lengths, options.seq_length)):
        for one in passes:
            if one.name in PASSES:
                draft = PASSES[one.name](samples, request, draft)
    assert draft is not None
    packs, bound, notes = draft
    info = PlanInfo(
        seq_length=options.seq_length,
        strategy=options.strategy,
        seed=options.seed,
        pad_multiple=options.pad_multiple,
        num_tokens=int(samples.lengths[packs.sample_ids].sum(dtype=np.int64)),
        lower_bound=bound,
        reason_names=admission.reason_names,
        num_copies=len(packs.sample_ids) - len(samples.lengths),
        settings={
            "homogeneous": options.homogeneous,
            "assignment": options.assignment,
            "budgets": {name: int(limit) for name, (_, limit) in limits.items()},
            "order": None if request.layout is None else asdict(request.layout),
            **notes,
        },
    )
    if admission.sample_ids is not None:
        packs = packs.of(admission.sample_ids)
    return PackPlan(*packs, admission.set_aside_ids, admission.set_aside_reasons, info)

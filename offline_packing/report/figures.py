"""Figures of samples and packs: how long, how full, how unequal, and what padding would cost."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from offline_packing.index.pack_table import split_of_packs
from offline_packing.index.rows import sample_flops
from offline_packing.layouts.shards import splits_of_plan
from offline_packing.planner.context_parallel import idle_in_slots
from offline_packing.planner.cost import saving
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.planner.request import OVER_SEQ_LENGTH
from offline_packing.report.complete_stages import CompleteStages
from task_encoders.families import model_cost

#: Lower ends of the bands that packs are counted in, as shares of seq_length.
_FILL_BANDS: Final = (1.0, 0.999, 0.99, 0.95, 0.9, 0.75, 0.5, 0.0)
#: Factors of seq_length tried for samples that are too long.
_LONGER: Final = (2, 4)
#: Samples whose packing in small buffers is tried, and the sizes of the buffers.
_TRIED_SAMPLES: Final = 50_000
_BUFFERS: Final = (100, 1000)
#: The ranks whose waiting is computed if pack.order names none.
_NUM_RANKS: Final = 8
#: Bins of a logarithmic histogram per doubling, and of one of equal width.
_BINS_PER_DOUBLING: Final = 4
_MAX_BINS: Final = 40
_QUANTILES: Final = {"min": 0, "p5": 5, "p50": 50, "p95": 95, "max": 100}


def length_figures(stages: CompleteStages) -> dict[str, Any] | None:
    """Lengths in tokens of all measured samples; None without any."""
    lengths = stages.columns["num_tokens"]
    if not len(lengths):
        return None
    return {**spread(lengths), **log_histogram(lengths, stages.run.config.pack.seq_length)}


def overlong_figures(stages: CompleteStages) -> dict[str, Any]:
    """Samples with more tokens than a pack holds, and what longer sequences would save."""
    pack, lengths, plan = stages.run.config.pack, stages.columns["num_tokens"], stages.plan

    def longest(factor: int) -> int:
        """Longest sample that such a sequence holds when it is padded to the multiple."""
        return factor * pack.seq_length // pack.padding * pack.padding

    if plan is None:
        lengths = lengths[lengths > longest(1)]
    else:
        codes = [i for i, name in enumerate(plan.info.reason_names) if name == OVER_SEQ_LENGTH]
        lengths = lengths[plan.set_aside_ids[np.isin(plan.set_aside_reasons, codes)]]
    saved = {factor: lengths[lengths <= longest(factor)] for factor in _LONGER}
    return {
        "samples": len(lengths),
        "tokens": int(lengths.sum(dtype=np.int64)),
        "longest": int(lengths.max(initial=0)),
        "saved_by": [
            {
                "seq_length": factor * pack.seq_length,
                "samples": len(some),
                "tokens": int(some.sum(dtype=np.int64)),
            }
            for factor, some in saved.items()
        ],
    }


def pack_figures(stages: CompleteStages, plan: PackPlan) -> dict[str, Any]:
    """Fill, samples and cost per pack. The plan has one pack at least."""
    sums = {name: stages.sum_of_packs(column) for name, column in stages.columns.items()}
    squares = np.square(stages.columns["num_tokens"], dtype=np.float64)
    cost_of = model_cost(stages.run.config.model)
    flops = sample_flops(stages.samples, cost_of)
    costs, tower = stages.sum_of_packs(flops.total), stages.sum_of_packs(flops.tower)
    samples = np.diff(plan.pack_offsets)
    room: Any = plan.info.seq_length
    if plan.cp_sizes is not None and plan.info.context_parallel is not None:
        room = np.minimum(plan.cp_sizes * plan.info.context_parallel.tokens_per_rank, room)
    at_least = [int((sums["num_tokens"] >= np.ceil(share * room)).sum()) for share in _FILL_BANDS]
    bands = zip(_FILL_BANDS, np.diff(at_least, prepend=0).tolist(), strict=True)
    return {
        "fill_bands": [{"at_least": share, "packs": count} for share, count in bands],
        "samples_per_pack": linear_histogram(samples),
        "spread": {
            "tokens": spread(sums["num_tokens"]),
            "attention": spread(stages.sum_of_packs(squares)),
            "vision_patches": spread(sums["num_vision_patches"]),
            "images": spread(sums["num_images"]),
            "samples": spread(samples),
            "operations": spread(costs),
        },
        "cost_of": cost_of.name,
        "waiting": _waiting(stages, plan, costs, tower),
    }


def slot_idle(stages: CompleteStages, plan: PackPlan) -> float | None:
    """Share of time that ranks wait in slots; None where packs fill none."""
    if plan.cp_sizes is None or plan.info.context_parallel is None:
        return None
    flops = sample_flops(stages.samples, model_cost(stages.run.config.model)).total
    ranks = plan.info.context_parallel.ranks
    return idle_in_slots(stages.sum_of_packs(flops), plan.cp_sizes, ranks)


def split_figures(stages: CompleteStages, plan: PackPlan) -> dict[str, Any] | None:
    """Figures of the split of pictures that the plan was made for; None where it was for none."""
    found = split_of_packs(stages.samples, plan, model_cost(stages.run.config.model))
    return None if found is None else found._asdict()


def saving_figures(stages: CompleteStages, plan: PackPlan) -> dict[str, Any]:
    """Packing against padding, and against packing in a small buffer while training."""
    compared = stages.run.config.report
    lengths = stages.packed(stages.columns["num_tokens"])
    found = saving(lengths, plan, compared.padded_batch_size, compared.global_batch_size)
    return {**found, "online": _online(stages, plan)}


def _waiting(
    stages: CompleteStages,
    plan: PackPlan,
    costs: npt.NDArray[np.float64],
    tower: npt.NDArray[np.float64],
) -> dict[str, Any]:
    """Share of time that data parallel ranks wait for the slowest, in the order written; and where
    they wait after the vision tower as well."""
    # compiled: takes time to import
    from offline_packing.planner.order import RankLayout, idle_of_order

    config = stages.run.config
    order = config.pack.order
    layout = RankLayout(order.num_ranks, order.num_workers) if order else RankLayout(_NUM_RANKS)
    first = next(filter(len, splits_of_plan(plan, config.output.split).values()))
    size = plan.info.epochs[0] if plan.info.epochs else len(first)
    own = slice(first.start, first.start + size)
    one, two = idle_of_order(costs[own], tower[own], layout)
    return {
        "num_ranks": layout.num_ranks,
        "num_workers": layout.num_workers,
        "ordered": order is not None,
        "share": one,
        "two_phase_share": two,
    }


def _online(stages: CompleteStages, plan: PackPlan) -> list[dict[str, Any]]:
    """Fill that first-fit-decreasing reaches on buffers of some samples in random order."""
    from offline_packing.planner.strategies.peers.placing import first_fit_decreasing

    pack, ids = stages.run.config.pack, plan.sample_ids
    rng = np.random.default_rng(pack.seed)
    drawn = rng.permutation(rng.choice(len(ids), min(len(ids), _TRIED_SAMPLES), replace=False))
    lengths = stages.columns["num_tokens"][ids[drawn]]
    counted = -(-lengths // pack.padding) * pack.padding
    figures = []
    for size in _BUFFERS:
        buffers = (counted[start : start + size] for start in range(0, len(counted), size))
        plans = [first_fit_decreasing(buffer, pack.seq_length) for buffer in buffers]
        num_packs = sum(len(made.pack_offsets) - 1 for made in plans)
        fill = int(lengths.sum(dtype=np.int64)) / (num_packs * pack.seq_length)
        figures.append({"buffer": size, "samples": len(lengths), "fill": fill})
    return figures


def spread(values: npt.NDArray[Any]) -> dict[str, float | int]:
    """mean, min, p5, p50, p95 and max; quantiles are values that occur. Not for empty arrays."""
    points = np.percentile(values, list(_QUANTILES.values()), method="inverted_cdf")
    quantiles = {name: p.item() for name, p in zip(_QUANTILES, points, strict=True)}
    return {"mean": float(values.mean(dtype=np.float64)), **quantiles}


def linear_histogram(values: npt.NDArray[np.integer]) -> dict[str, list[int]]:
    """edges (n + 1) and counts (n) of at most 40 bins of equal width, from the smallest value on;
    bin i holds edges[i] <= value < edges[i + 1]. Not for empty arrays."""
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // _MAX_BINS)
    counts = np.bincount((values - low) // width)
    return {"edges": (low + width * np.arange(len(counts) + 1)).tolist(), "counts": counts.tolist()}


def log_histogram(values: npt.NDArray[np.integer], limit: int) -> dict[str, list[int]]:
    """edges (n + 1) and counts (n) of positive integers, from the first bin that holds anything to
    the last, in bins that do not depend on the data: edges 0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14,
    16, 20, ..., and `limit`; bin i holds edges[i] < value <= edges[i + 1]. Not for empty arrays."""
    steps = 2.0 ** (np.arange(32 * _BINS_PER_DOUBLING) / _BINS_PER_DOUBLING)
    edges = np.union1d(np.ceil(steps).astype(np.int64), [0, limit])
    counts = np.histogram(values, edges + 1)[0]
    used = np.flatnonzero(counts)
    bins = slice(used[0], used[-1] + 1)
    return {"edges": edges[bins.start : bins.stop + 1].tolist(), "counts": counts[bins].tolist()}

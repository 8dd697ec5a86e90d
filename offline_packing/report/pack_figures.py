"""Figures of the packs: how full they are, how unequal, and what padding would have cost."""

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from offline_packing.config.packing import PackingConfig
from offline_packing.layouts.shard_layout import splits_of_plan
from offline_packing.planner.cost import padded_tokens, sample_cost
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.report.complete_stages import CompleteStages
from offline_packing.report.distributions import linear_histogram, spread

#: Lower ends of the bands that packs are counted in, as shares of seq_length.
FILL_BANDS: Final = (1.0, 0.999, 0.99, 0.95, 0.9, 0.75, 0.5, 0.0)
#: Samples whose packing in small buffers is tried, and the sizes of the buffers.
_TRIED_SAMPLES: Final = 50_000
_BUFFERS: Final = (100, 1000)
#: The ranks whose waiting is computed if pack.order names none.
_NUM_RANKS: Final = 8
_COST_CHUNK: Final = 1 << 20


def pack_figures(stages: CompleteStages, plan: PackPlan) -> dict[str, Any]:
    """Fill, samples and cost per pack. The plan has one pack at least."""
    sums = {name: stages.sum_of_packs(column) for name, column in stages.columns.items()}
    costs, samples = stages.sum_of_packs(_cost(stages)), np.diff(plan.pack_offsets)
    return {
        "fill_bands": _fill_bands(sums["num_tokens"], plan.info.seq_length),
        "samples_per_pack": linear_histogram(samples),
        "spread": {
            "tokens": spread(sums["num_tokens"]),
            "attention": spread(stages.sum_of_packs(_squares(stages.columns["num_tokens"]))),
            "vision_patches": spread(sums["num_vision_patches"]),
            "images": spread(sums["num_images"]),
            "samples": spread(samples),
            "operations": spread(costs),
        },
        "waiting": _waiting(stages.run.config, plan, costs),
    }


def saving_figures(stages: CompleteStages, plan: PackPlan) -> dict[str, Any]:
    """Packing against padding, and against packing in a small buffer while training."""
    config = stages.run.config
    lengths = stages.packed(stages.columns["num_tokens"])
    counts = np.bincount(lengths, minlength=config.pack.seq_length + 1)
    num_samples, real = len(lengths), int(lengths.sum(dtype=np.int64))
    in_packs = plan.info.num_tokens
    in_batches = padded_tokens(counts, config.report.padded_batch_size)
    batch = config.report.global_batch_size
    return {
        "tokens": real,
        "tokens_in_packs": in_packs,
        "padded_batch_size": config.report.padded_batch_size,
        "tokens_in_padded_batches": in_batches,
        "tokens_padded_to_seq_length": num_samples * config.pack.seq_length,
        "padding_before": 1 - real / in_batches,
        "padding_after": 1 - real / in_packs,
        "speedup": in_batches / in_packs,
        "global_batch_size": batch,
        "iterations_before": math.ceil(num_samples / batch),
        "iterations_after": math.ceil(plan.num_packs / batch),
        "equal_batch_size": max(1, round(batch * plan.num_packs / num_samples)),
        "online": _online(stages, plan),
    }


def _squares(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    return np.square(lengths, dtype=np.float64)


def _cost(stages: CompleteStages) -> npt.NDArray[np.float32]:
    """(num_samples,) forward operations of Qwen2-VL-7B; a chunk at a time, for the temporaries."""
    columns = list(stages.columns.values())
    cost = np.empty(len(columns[0]), np.float32)
    for start in range(0, len(cost), _COST_CHUNK):
        some = slice(start, start + _COST_CHUNK)
        cost[some] = sample_cost(*(column[some] for column in columns))
    return cost


def _fill_bands(tokens: npt.NDArray[np.int64], seq_length: int) -> list[dict[str, float | int]]:
    """Packs by their share of seq_length, the full ones first."""
    lowest = [math.ceil(share * seq_length) for share in FILL_BANDS]
    at_least = [int((tokens >= low).sum()) for low in lowest]
    return [
        {"at_least": share, "packs": count - before}
        for share, count, before in zip(FILL_BANDS, at_least, [0, *at_least], strict=False)
    ]


def _waiting(
    config: PackingConfig, plan: PackPlan, costs: npt.NDArray[np.float64]
) -> dict[str, Any]:
    """Share of time that data parallel ranks wait for the slowest, in the order written."""
    from offline_packing.planner.order import (  # compiled: takes time to import
        RankLayout,
        idle_share,
    )

    order = config.pack.order
    layout = RankLayout(order.num_ranks, order.num_workers) if order else RankLayout(_NUM_RANKS)
    first = next(iter(splits_of_plan(plan, config.output.split).values()))
    return {
        "num_ranks": layout.num_ranks,
        "num_workers": layout.num_workers,
        "ordered": order is not None,
        "share": idle_share(costs[first.start : first.stop], layout),
    }


def _online(stages: CompleteStages, plan: PackPlan) -> list[dict[str, Any]]:
    """Fill that first-fit-decreasing reaches on buffers of some samples in random order."""
    from offline_packing.planner.strategies.peers.first_fit import first_fit_decreasing

    pack, ids = stages.run.config.pack, plan.sample_ids
    rng = np.random.default_rng(pack.seed)
    drawn = rng.permutation(rng.choice(len(ids), min(len(ids), _TRIED_SAMPLES), replace=False))
    lengths = stages.columns["num_tokens"][ids[drawn]]
    counted = -(-lengths // pack.pad_multiple) * pack.pad_multiple
    figures = []
    for size in _BUFFERS:
        buffers = [counted[start : start + size] for start in range(0, len(counted), size)]
        num_packs = sum(
            len(first_fit_decreasing(buffer, pack.seq_length).pack_offsets) - 1
            for buffer in buffers
        )
        fill = int(lengths.sum(dtype=np.int64)) / (num_packs * pack.seq_length)
        figures.append({"buffer": size, "samples": len(lengths), "fill": fill})
    return figures

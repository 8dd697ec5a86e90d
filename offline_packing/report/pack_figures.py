"""Figures of the packs: how full they are, how unequal, and what padding would have cost."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from offline_packing.config.packing import PackingConfig
from offline_packing.layouts.shard_layout import split_packs
from offline_packing.planner.cost import padded_tokens, sample_cost
from offline_packing.report.complete_stages import CompleteStages
from offline_packing.report.distributions import linear_histogram, spread

#: Lower ends of the bands that packs are counted in, as shares of seq_length.
FILL_BANDS: Final = (1.0, 0.999, 0.99, 0.95, 0.9, 0.75, 0.5, 0.0)
#: Samples whose packing in small buffers is tried, and the sizes of the buffers.
_TRIED_SAMPLES: Final = 50_000
_BUFFERS: Final = (100, 1000)
#: The ranks whose waiting is computed where pack.order names none.
_NUM_RANKS: Final = 8
_COST_CHUNK: Final = 1 << 20


def pack_figures(generations: Sequence[CompleteStages]) -> dict[str, Any]:
    """Fill, samples and cost per pack. All generations are planned, with one pack at least."""
    seq_length = generations[0].run.config.pack.seq_length
    tokens = _per_pack(generations, "num_tokens")
    samples = np.concatenate([np.diff(_plan(g).pack_offsets) for g in generations])
    costs = [generation.sum_of_packs(_cost(generation)) for generation in generations]
    squares = [g.sum_of_packs(_squares(g.columns["num_tokens"])) for g in generations]
    return {
        "fill_bands": _fill_bands(tokens, seq_length),
        "samples_per_pack": linear_histogram(samples),
        "spread": {
            "tokens": spread(tokens),
            "attention": spread(np.concatenate(squares)),
            "vision_patches": spread(_per_pack(generations, "num_vision_patches")),
            "images": spread(_per_pack(generations, "num_images")),
            "samples": spread(samples),
            "operations": spread(np.concatenate(costs)),
        },
        "waiting": _waiting(generations[0].run.config, costs),
    }


def saving_figures(generations: Sequence[CompleteStages]) -> dict[str, Any]:
    """Packing against padding, and against packing in a small buffer while training."""
    config = generations[0].run.config
    counts = np.zeros(config.pack.seq_length + 1, np.int64)
    for generation in generations:
        lengths = generation.columns["num_tokens"][generation.is_packed]
        counts += np.bincount(lengths, minlength=len(counts))
    num_samples = int(counts.sum())
    num_packs = sum(_plan(generation).num_packs for generation in generations)
    real = int(counts @ np.arange(len(counts)))
    in_packs = sum(_plan(generation).info.num_tokens for generation in generations)
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
        "iterations_after": math.ceil(num_packs / batch),
        "equal_batch_size": max(1, round(batch * num_packs / num_samples)),
        "online": _online(generations, config),
    }


def _plan(generation: CompleteStages) -> Any:
    assert generation.plan is not None
    return generation.plan


def _per_pack(generations: Sequence[CompleteStages], column: str) -> npt.NDArray[np.int64]:
    return np.concatenate([g.sum_of_packs(g.columns[column]) for g in generations])


def _squares(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    return np.square(lengths, dtype=np.float64)


def _cost(generation: CompleteStages) -> npt.NDArray[np.float32]:
    """(num_samples,) forward operations of Qwen2-VL-7B; a chunk at a time, for the temporaries."""
    columns = list(generation.columns.values())
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


def _waiting(config: PackingConfig, costs: Sequence[npt.NDArray[np.float64]]) -> dict[str, Any]:
    """Share of time that data parallel ranks wait for the slowest, in the order written."""
    from offline_packing.planner.order import (  # compiled: takes time to import
        RankLayout,
        idle_share,
    )

    order = config.pack.order
    layout = RankLayout(order.num_ranks, order.num_workers) if order else RankLayout(_NUM_RANKS)
    first = [next(iter(split_packs(len(cost), config.output.split).values())) for cost in costs]
    train = [cost[packs.start : packs.stop] for cost, packs in zip(costs, first, strict=True)]
    return {
        "num_ranks": layout.num_ranks,
        "num_workers": layout.num_workers,
        "ordered": order is not None,
        "share": idle_share(np.concatenate(train), layout),
    }


def _online(generations: Sequence[CompleteStages], config: PackingConfig) -> list[dict[str, Any]]:
    """Fill that first-fit-decreasing reaches on buffers of some samples in random order."""
    from offline_packing.planner.strategies.peers.first_fit import first_fit_decreasing

    pack = config.pack
    rng = np.random.default_rng(pack.seed)
    ids = _plan(generations[0]).sample_ids
    drawn = rng.permutation(rng.choice(len(ids), min(len(ids), _TRIED_SAMPLES), replace=False))
    lengths = generations[0].columns["num_tokens"][ids[drawn]]
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

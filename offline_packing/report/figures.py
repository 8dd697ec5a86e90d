"""Figures that only the report shows: how long, how full, how unequal, and what padding costs."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from offline_packing.config.packing import PackingConfig
from offline_packing.config.sections import PackConfig
from offline_packing.index.table import Index
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.planner.samples import OVER_SEQ_LENGTH
from task_encoders.families import model_cost
from task_encoders.packs.manifest import PackColumns

#: Lower ends of the bands that packs are counted in, as shares of seq_length.
_FILL_BANDS: Final = (1.0, 0.999, 0.99, 0.95, 0.9, 0.75, 0.5, 0.0)
#: Factors of seq_length tried for samples that are too long.
_LONGER: Final = (2, 4)
#: Samples whose packing in small buffers is tried, and the sizes of the buffers.
_TRIED_SAMPLES: Final = 50_000
_BUFFERS: Final = (100, 1000)
#: Bins of a logarithmic histogram per doubling, and of one of equal width.
_BINS_PER_DOUBLING: Final = 4
_MAX_BINS: Final = 40
_QUANTILES: Final = {"min": 0, "p5": 5, "p50": 50, "p95": 95, "max": 100}


def length_figures(pack: PackConfig, samples: Index) -> dict[str, Any] | None:
    """Lengths in tokens of all measured samples; None without any."""
    lengths = samples.array("num_tokens")
    if not len(lengths):
        return None
    return {**spread(lengths), **log_histogram(lengths, pack.seq_length)}


def overlong_figures(pack: PackConfig, samples: Index, plan: PackPlan | None) -> dict[str, Any]:
    """Samples with more tokens than a pack holds, and what longer sequences would save."""
    lengths = samples.array("num_tokens")

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


def pack_figures(
    config: PackingConfig, samples: Index, plan: PackPlan, table: PackColumns
) -> dict[str, Any]:
    """Fill, samples and cost per pack. The plan has one pack at least."""

    def sums(per_sample: npt.NDArray[Any], kind: type = np.int64) -> npt.NDArray[Any]:
        return np.add.reduceat(per_sample[plan.sample_ids], plan.pack_offsets[:-1], dtype=kind)

    lengths, num_samples = samples.array("num_tokens"), np.diff(plan.pack_offsets)
    tokens = sums(lengths)
    room: Any = plan.info.seq_length
    if plan.cp_sizes is not None and plan.info.context_parallel is not None:
        room = np.minimum(plan.cp_sizes * plan.info.context_parallel.tokens_per_rank, room)
    at_least = [int((tokens >= np.ceil(share * room)).sum()) for share in _FILL_BANDS]
    bands = zip(_FILL_BANDS, np.diff(at_least, prepend=0).tolist(), strict=True)
    values = {
        "tokens": tokens,
        "attention": sums(np.square(lengths, dtype=np.float64), np.float64),
        "vision_patches": sums(samples.array("num_vision_patches")),
        "images": sums(samples.array("num_images")),
        "samples": num_samples,
        "operations": table.cost,
    }
    return {
        "fill_bands": [{"at_least": share, "packs": count} for share, count in bands],
        "samples_per_pack": linear_histogram(num_samples),
        "spread": {name: spread(some) for name, some in values.items()},
        "cost_of": model_cost(config.model).name,
    }


def online_figures(pack: PackConfig, samples: Index, plan: PackPlan) -> list[dict[str, Any]]:
    """Fill that first-fit-decreasing reaches on buffers of some samples in random order."""
    from offline_packing.planner.strategies.peers.placing import first_fit_decreasing

    ids = plan.sample_ids
    rng = np.random.default_rng(pack.seed)
    drawn = rng.permutation(rng.choice(len(ids), min(len(ids), _TRIED_SAMPLES), replace=False))
    lengths = samples.array("num_tokens")[ids[drawn]]
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

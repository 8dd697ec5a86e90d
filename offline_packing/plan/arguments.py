"""What a configuration asks of the planner, with the index columns needed for it."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from offline_packing.config.packing import PackConfig, PackingConfig
from offline_packing.index.table import Index

#: Column of the index that each budget of a pack counts.
BUDGET_COLUMNS: Final = {
    "vision_patches": "num_vision_patches",
    "images": "num_images",
    "videos": "num_videos",
}


def plan_arguments(
    config: PackingConfig, samples: Index, kept: npt.NDArray[np.int64]
) -> dict[str, Any]:
    """Keyword arguments of `plan_packs` beside lengths and seq_length.

    Args:
        kept: (num_kept,) rows of the index that are planned, one that is used twice appears
            twice; the arrays returned are theirs.
    """
    pack = config.pack
    return {
        "strategy": pack.strategy,
        "seed": pack.seed,
        "pad_multiple": pack.pad_multiple,
        "strategy_options": pack.strategy_options,
        "assignment": pack.assignment,
        "budgets": {
            name: (samples.array(BUDGET_COLUMNS[name])[kept], limit)
            for name, limit in pack.budgets.items()
        },
        "homogeneous": pack.homogeneous,
        "max_samples": pack.max_samples,
        "min_samples": pack.min_samples,
        "min_fill": pack.min_fill,
        "window_packs": config.output.packs_per_shard,
        "sample_order": pack.sample_order,
        **_composition_arguments(pack, samples, kept),
    }


def _composition_arguments(
    pack: PackConfig, samples: Index, kept: npt.NDArray[np.int64]
) -> dict[str, Any]:
    """What decides which sample of a length goes where, and in which order packs are written."""
    from offline_packing.planner.cost import sample_cost
    from offline_packing.planner.order import RankLayout

    def column(name: str) -> npt.NDArray[Any]:
        return samples.array(name)[kept]

    arguments: dict[str, Any] = {}
    if pack.homogeneous:
        arguments["groups"] = (column("num_images") + column("num_videos") > 0).astype(np.int32)
    if "mix" in pack.assignment:
        arguments["groups"] = column("source_id")  # repeats make their sizes follow the weights
    if "locality" in pack.assignment:
        arguments["source_order"] = kept  # rows of the index are in the order of the source
    if "balance" in pack.assignment:
        arguments["balance_by"] = column("num_vision_patches")
    if pack.order is not None:
        arguments["order"] = RankLayout(pack.order.num_ranks, pack.order.num_workers)
        arguments["cost"] = sample_cost(
            column("num_tokens"), column("num_vision_patches"), _num_pictures(samples)[kept]
        )
    return arguments


def _num_pictures(samples: Index) -> npt.NDArray[np.int64]:
    """(num_samples,) pictures within which patches attend: images, and steps of videos' grids."""
    counts = [np.empty(0, np.int64)]
    for table in samples.parts("grid_thw"):
        grids = table["grid_thw"].combine_chunks()
        steps = np.concatenate([[0], np.cumsum(grids.flatten().to_numpy()[::3], dtype=np.int64)])
        counts.append(np.diff(steps[np.cumsum([0, *grids.value_lengths().to_numpy() // 3])]))
    return np.concatenate(counts)


def set_aside_reason(name: str, num_tokens: int, config: PackingConfig) -> tuple[str, str]:
    """Reason and detail in the set-aside table of a sample that the planner left out.

    Args:
        name: the planner's own name of the reason.
        num_tokens: of the sample.
    """
    pack = config.pack
    if name.startswith("over_budget:"):
        budget = name.partition(":")[2]
        return "over_budget", f"it alone exceeds the limit of {budget} {pack.budgets[budget]}"  # type: ignore[index]
    if name == "below_min_fill":
        return "poor_pack", f"its pack is filled to less than min_fill {pack.min_fill:g}"
    if name == "below_min_samples":
        return "poor_pack", f"its pack has fewer samples than min_samples {pack.min_samples}"
    limit = f"seq_length {pack.seq_length}"
    if pack.pad_multiple > 1:
        limit += f" (in multiples of {pack.pad_multiple})"
    return "overlong", f"{num_tokens} tokens > {limit}"

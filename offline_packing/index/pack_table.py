"""Operations and media of the packs of a plan, from the samples' rows of the index."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from offline_packing.index.rows import sample_flops, sum_over_grids
from offline_packing.index.table import Index
from offline_packing.planner.pack_plan import PackPlan
from task_encoders.families.base.cost import ModelCost
from task_encoders.packs.manifest import PackColumns

if TYPE_CHECKING:
    from offline_packing.planner.ranks.picture_split import SplitFigures


def pack_table(samples: Index, packs: PackPlan, cost: ModelCost) -> PackColumns:
    """The columns of a plan whose ids are those of the index. The plan has one pack at least."""
    flops, media = sample_flops(samples, cost), media_of_samples(samples.array)
    ids, starts = packs.sample_ids, packs.pack_offsets[:-1]
    tower, language = (np.add.reduceat(some[ids], starts, dtype=np.float64) for some in flops)
    return PackColumns(np.bitwise_or.reduceat(media[ids], starts), tower, language)


def media_of_samples(column: Callable[[str], npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    """(num_samples,) as `PackColumns.media`; `column` gives a column of the index."""
    return (column("num_images") > 0).astype(np.uint8) + 2 * (column("num_videos") > 0)


def units_of_samples(samples: Index) -> npt.NDArray[np.integer]:
    """(num_samples,) images, and steps of the grids of videos."""
    return sum_over_grids(samples, lambda grids: grids[:, 0])


def split_of_packs(samples: Index, packs: PackPlan, cost: ModelCost) -> "SplitFigures | None":
    """Figures of the split of pictures that a plan was made for; None: it was made for none."""
    size = packs.info.settings.get("picture_ranks")
    if size is None or packs.num_packs == 0:
        return None
    from offline_packing.planner.ranks.picture_split import split_figures  # compiled
    from offline_packing.planner.strategies.strategy import Packs

    tower, units = sample_flops(samples, cost).tower, units_of_samples(samples)
    own = Packs(np.asarray(packs.sample_ids), np.asarray(packs.pack_offsets))
    return split_figures(own, units, tower, size)

"""Operations and media of each pack of a plan, from the samples' rows of the index."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from offline_packing.index.rows import sample_flops
from offline_packing.index.table import Index
from offline_packing.planner.pack_plan import PackPlan
from task_encoders.families.cost import ModelCost
from task_encoders.packs.manifest import PackColumns


def pack_table(samples: Index, packs: PackPlan, cost: ModelCost) -> PackColumns:
    """The columns of a plan whose ids are those of the index. The plan has one pack at least."""
    flops, media = sample_flops(samples, cost), media_of_samples(samples.array)
    ids, starts = packs.sample_ids, packs.pack_offsets[:-1]
    tower, language = (np.add.reduceat(some[ids], starts, dtype=np.float64) for some in flops)
    return PackColumns(np.bitwise_or.reduceat(media[ids], starts), tower, language)


def media_of_samples(column: Callable[[str], npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    """(num_samples,) as `PackColumns.media`; `column` gives a column of the index."""
    return (column("num_images") > 0).astype(np.uint8) + 2 * (column("num_videos") > 0)

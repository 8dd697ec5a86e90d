"""What there is to report on: the complete stages of an output."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from offline_packing.index.table import Index
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.artifacts import check_layout, open_index, open_plan
from offline_packing.runs.manifest import Manifest, read_manifest
from offline_packing.runs.run import Run

#: Samples that are looked up at a time, to keep temporaries small.
_CHUNK = 1 << 21


@dataclass(frozen=True)
class CompleteStages:
    """The complete stages."""

    run: Run
    samples: Index
    #: None: not planned yet
    plan: PackPlan | None
    #: content of the plan's stage.json; empty without a plan
    plan_info: Mapping[str, Any]

    @cached_property
    def columns(self) -> dict[str, npt.NDArray[np.int32]]:
        """Sizes of every sample, (num_samples,) each: what packs are summed up from."""
        names = ("num_tokens", "num_vision_patches", "num_images")
        arrays = {name: np.empty(self.samples.info.num_samples, np.int32) for name in names}
        first = 0
        for part in self.samples.parts(*names):
            for name, array in arrays.items():
                array[first : first + len(part)] = part[name].to_numpy()
            first += len(part)
        return arrays

    @cached_property
    def num_uses(self) -> npt.NDArray[np.int32]:
        """(num_samples,) the number of packs that hold a sample; without a plan, 1 each."""
        if self.plan is None:
            return np.ones(self.samples.info.num_samples, np.int32)
        uses = np.zeros(self.samples.info.num_samples, np.int32)
        for start in range(0, len(self.plan.sample_ids), _CHUNK):
            np.add.at(uses, self.plan.sample_ids[start : start + _CHUNK], 1)
        return uses

    def packed(self, per_sample: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(num_packed,) a quantity (num_samples,) of the packed samples, of each use of one."""
        return np.repeat(per_sample, self.num_uses)

    def sum_of_packs(self, per_sample: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(num_packs,) int64 or float64: a quantity of the samples (num_samples,) per pack."""
        assert self.plan is not None
        kind = np.float64 if np.issubdtype(per_sample.dtype, np.floating) else np.int64
        offsets = self.plan.pack_offsets
        sums = np.empty(self.plan.num_packs, kind)
        first = 0
        while first < len(sums):
            last = int(np.searchsorted(offsets, offsets[first] + _CHUNK, side="right")) - 1
            last = max(last, first + 1)
            ids = self.plan.sample_ids[offsets[first] : offsets[last]]
            starts = offsets[first:last] - offsets[first]
            sums[first:last] = np.add.reduceat(per_sample[ids].astype(kind), starts)
            first = last
        return sums


def open_complete_stages(run: Run) -> tuple[CompleteStages, Manifest | None]:
    """All complete stages of an output, and its manifest if the packs are written.

    Raises:
        StageError: not even the index is complete, or a stage was made with other settings.
    """
    manifest = read_manifest(run)
    samples = open_index(run)
    if not run.workspace.plan_info.exists():
        return CompleteStages(run, samples, None, {}), manifest
    plan = open_plan(run)
    if manifest is not None:
        check_layout(run, plan.hash)
    return CompleteStages(run, samples, plan.packs, plan.info), manifest

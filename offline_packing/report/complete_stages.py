"""Complete stages of an output, and the samples they set aside."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.config.packing import PackingConfig
from offline_packing.index.set_aside import read_set_aside
from offline_packing.index.table import Index
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.artifacts import check_layout, key_prefix, open_index, open_plan
from offline_packing.runs.manifest import read_manifest
from offline_packing.runs.run import Run
from offline_packing.runs.set_aside import aside_while_measuring, aside_while_planning
from task_encoders.packs.manifest import Manifest
from task_encoders.samples import REASONS

#: Packs whose samples are looked up at a time, to keep temporaries small.
_PACKS_AT_ONCE: Final = 1 << 17
#: Examples kept of each reason, and the text that is kept of an example's detail.
_NUM_EXAMPLES: Final = 5
_DETAIL_LENGTH: Final = 200


@dataclass(frozen=True)
class CompleteStages:
    """The complete stages."""

    run: Run
    samples: Index
    #: None: not planned yet
    plan: PackPlan | None
    #: None: not written yet
    manifest: Manifest | None
    #: of the keys of packs; None: not planned yet
    key_prefix: str | None

    @cached_property
    def columns(self) -> dict[str, npt.NDArray[np.int32]]:
        """Sizes of every sample, (num_samples,) each: what packs are summed up from."""
        names = ("num_tokens", "num_vision_patches", "num_images")
        return {name: self.samples.array(name) for name in names}

    @cached_property
    def num_uses(self) -> npt.NDArray[np.int32]:
        """(num_samples,) the number of packs that hold a sample; without a plan, 1 each."""
        if self.plan is None:
            return np.ones(self.samples.info.num_samples, np.int32)
        uses = np.zeros(self.samples.info.num_samples, np.int32)
        np.add.at(uses, self.plan.sample_ids, 1)
        return uses

    def packed(self, per_sample: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(num_packed,) a quantity (num_samples,) of the packed samples, of each use of one."""
        return np.repeat(per_sample, self.num_uses)

    def sum_of_packs(self, per_sample: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(num_packs,) int64 or float64: a quantity of the samples (num_samples,) per pack."""
        assert self.plan is not None
        kind = np.float64 if np.issubdtype(per_sample.dtype, np.floating) else np.int64
        sums = np.empty(self.plan.num_packs, kind)
        for first in range(0, len(sums), _PACKS_AT_ONCE):
            offsets = self.plan.pack_offsets[first : first + _PACKS_AT_ONCE + 1]
            values = per_sample[self.plan.sample_ids[offsets[0] : offsets[-1]]].astype(kind)
            sums[first : first + _PACKS_AT_ONCE] = np.add.reduceat(
                values, offsets[:-1] - offsets[0]
            )
        return sums


def open_complete_stages(run: Run) -> CompleteStages:
    """All complete stages of an output. Raises StageError if not even the index is complete, or a
    stage was made with other settings."""
    manifest, samples = read_manifest(run.workspace.root), open_index(run)
    plan = open_plan(run) if run.workspace.plan_info.exists() else None
    if plan is not None and manifest is not None:
        check_layout(run, plan.hash)
    prefix = key_prefix(run, plan.hash) if plan else None
    return CompleteStages(run, samples, plan.packs if plan else None, manifest, prefix)


@dataclass
class SetAside:
    """Counts and examples of the samples that were set aside."""

    by_reason: Counter[str] = field(default_factory=Counter)
    #: (number of the source, whether set aside while planning) -> samples
    by_source: Counter[tuple[int, bool]] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def add(self, table: pa.Table, sources: npt.NDArray[np.int32], *, while_planning: bool) -> None:
        """Count rows of the set-aside table; `sources` (num_rows,) are the numbers of theirs."""
        names = ["reason", "source"]
        counts = pa.table([table["reason"], sources], names).group_by(names)
        for row in counts.aggregate([([], "count_all")]).to_pylist():
            self.by_reason[row["reason"]] += row["count_all"]
            self.by_source[row["source"], while_planning] += row["count_all"]
        for reason in pc.unique(table["reason"]).to_pylist():
            kept = self.examples.setdefault(reason, [])
            if len(kept) < _NUM_EXAMPLES:
                rows = table.filter(pc.equal(table["reason"], reason)).drop(["reason"])
                for row in rows.slice(0, _NUM_EXAMPLES - len(kept)).to_pylist():
                    kept.append({**row, "detail": row["detail"][:_DETAIL_LENGTH]})

    def document(self) -> list[dict[str, Any]]:
        """One entry per reason, the most frequent first."""
        total = self.by_reason.total()
        return [
            {
                "reason": reason,
                "explanation": REASONS[reason],
                "samples": count,
                "share": count / total,
                "examples": self.examples[reason],
            }
            for reason, count in sorted(self.by_reason.items(), key=lambda item: (-item[1], item))
        ]


def count_set_aside(stages: CompleteStages) -> SetAside:
    """Read the set-aside tables, one batch of rows at a time."""
    found, info, workspace = SetAside(), stages.samples.info, stages.run.workspace
    measured = aside_while_measuring(workspace, info) if info.num_set_aside else []
    planned = aside_while_planning(workspace) if stages.plan is not None else []
    for while_planning, paths in ((False, measured), (True, planned)):
        for table in read_set_aside(paths):
            found.add(table, _sources(table, stages.run.config), while_planning=while_planning)
    return found


def _sources(table: pa.Table, config: PackingConfig) -> npt.NDArray[np.int32]:
    """(num_rows,) the number of each row's source."""
    numbers = np.zeros(len(table), np.int32)
    prefixes = list(enumerate(zip(config.source, config.key_prefixes(), strict=True)))
    # The longest prefix that fits decides among sources with one path: it comes last.
    for number, (source, prefix) in sorted(prefixes, key=lambda item: len(item[1][1])):
        own = pc.and_(
            pc.equal(table["source"], source.path), pc.starts_with(table["key"], pattern=prefix)
        )
        numbers[own.to_numpy()] = number
    return numbers

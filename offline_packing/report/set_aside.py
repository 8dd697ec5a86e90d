"""What was set aside: counts by reason and source, and some examples of each reason."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from offline_packing.index.table import SET_ASIDE_SCHEMA, part_name
from offline_packing.report.complete_stages import CompleteStages
from task_encoders.samples import REASONS

#: Examples kept of each reason.
NUM_EXAMPLES: Final = 5
#: Text of an example's detail that is kept.
_DETAIL_LENGTH: Final = 200
_BATCH: Final = 1 << 16


@dataclass
class SetAside:
    """Counts and examples of the same rows."""

    by_reason: Counter[str] = field(default_factory=Counter)
    #: (number of the source, whether set aside while planning) -> samples
    by_source: Counter[tuple[int, bool]] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def document(self) -> list[dict[str, Any]]:
        """One entry per reason, the most frequent first."""
        total = sum(self.by_reason.values())
        return [
            {
                "reason": reason,
                "explanation": REASONS[reason],
                "samples": count,
                "share": count / total,
                "examples": self.examples.get(reason, []),
            }
            for reason, count in sorted(self.by_reason.items(), key=lambda item: (-item[1], item))
            if count
        ]


def count_set_aside(stages: CompleteStages) -> SetAside:
    """Read the set-aside tables, one batch of rows at a time."""
    found = SetAside()
    for while_planning, table in _tables(stages):
        counted = _count(table, stages)
        for (reason, source), count in counted.items():
            found.by_reason[reason] += count
            found.by_source[source, while_planning] += count
        _keep_examples(found.examples, table, {reason for reason, _ in counted})
    return found


def _tables(stages: CompleteStages) -> Iterator[tuple[bool, pa.Table]]:
    """(whether set aside while planning, some rows)."""
    workspace, info = stages.run.workspace, stages.samples.info
    if info.num_set_aside:
        for number in range(len(info.part_rows)):
            for batch in pq.ParquetFile(workspace.set_aside / part_name(number)).iter_batches(
                _BATCH
            ):
                yield False, pa.Table.from_batches([batch], SET_ASIDE_SCHEMA)
    if stages.plan is not None:
        for batch in pq.ParquetFile(workspace.plan / "set_aside.parquet").iter_batches(_BATCH):
            yield True, pa.Table.from_batches([batch], SET_ASIDE_SCHEMA)


def _count(table: pa.Table, stages: CompleteStages) -> Mapping[tuple[str, int], int]:
    """(reason, number of the source) -> rows."""
    config = stages.run.config
    numbers = np.zeros(len(table), np.int32)
    prefixes = list(enumerate(zip(config.source, config.key_prefixes(), strict=True)))
    # Of several sources with one path the longest prefix that fits decides: it comes last.
    for number, (source, prefix) in sorted(prefixes, key=lambda item: len(item[1][1])):
        own = pc.and_(
            pc.equal(table["source"], source.path), pc.starts_with(table["key"], pattern=prefix)
        )
        numbers[own.to_numpy()] = number
    grouped = (
        pa.table({"reason": table["reason"], "source": numbers})
        .group_by(["reason", "source"])
        .aggregate([([], "count_all")])
    )
    return {(row["reason"], row["source"]): row["count_all"] for row in grouped.to_pylist()}


def _keep_examples(
    examples: dict[str, list[dict[str, str]]], table: pa.Table, reasons: set[str]
) -> None:
    """Keep the first rows of each reason."""
    for reason in sorted(reasons):
        kept = examples.setdefault(reason, [])
        if len(kept) < NUM_EXAMPLES:
            rows = table.filter(pc.equal(table["reason"], reason))
            for row in rows.slice(0, NUM_EXAMPLES - len(kept)).to_pylist():
                detail = row["detail"][:_DETAIL_LENGTH]
                kept.append({"key": row["key"], "source": row["source"], "detail": detail})

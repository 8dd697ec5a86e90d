"""The set-aside tables of an output, read again: all rows, or one example of each reason."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from offline_packing.errors import StageError
from offline_packing.index.table import SET_ASIDE_SCHEMA

_ROWS_AT_ONCE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class AsideGroup:
    """Samples of one source that were set aside for one reason; `key` and `detail` are those of
    the first."""

    source: str
    reason: str
    count: int
    key: str
    detail: str


def read_set_aside(paths: Iterable[Path], reasons: Collection[str] = ()) -> Iterator[pa.Table]:
    """Rows of SET_ASIDE_SCHEMA, some at a time; of these reasons only, where any are named.

    Raises:
        StageError: a table is gone or damaged.
    """
    wanted = pa.array(sorted(reasons), pa.string())
    for path in paths:
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(_ROWS_AT_ONCE):
                    rows = pa.Table.from_batches([batch], SET_ASIDE_SCHEMA)
                    yield rows.filter(pc.is_in(rows["reason"], wanted)) if reasons else rows
        except (OSError, pa.ArrowException) as error:
            raise StageError(f"{path} cannot be read: {error}; retry measures again") from error


def group_set_aside(paths: Iterable[Path]) -> list[AsideGroup]:
    """The samples set aside, by source and reason, in the order of the tables. Raises StageError
    as `read_set_aside`."""
    found: dict[tuple[str, str], AsideGroup] = {}
    for table in read_set_aside(paths):
        grouped = table.group_by(["source", "reason"], use_threads=False).aggregate(
            [([], "count_all"), ("key", "first"), ("detail", "first")]
        )
        for source, reason, count, key, detail in zip(
            *(grouped[name].to_pylist() for name in ("source", "reason", "count_all")),
            *(grouped[name].to_pylist() for name in ("key_first", "detail_first")),
            strict=True,
        ):
            group = found.setdefault((source, reason), AsideGroup(source, reason, 0, key, detail))
            found[source, reason] = replace(group, count=group.count + count)
    return list(found.values())

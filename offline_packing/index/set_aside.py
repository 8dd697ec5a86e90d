"""Samples set aside, with their reasons: samples of an index as arrays, since they can be almost
all; and the tables of an output."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.errors import DamagedError
from offline_packing.index.rows import SampleIds, name_samples
from offline_packing.index.table import SET_ASIDE_SCHEMA, Index, escape, open_table
from task_encoders.storage.paths import REMEDY

#: The number of samples whose keys are in memory at a time.
_NAMED_AT_ONCE: Final = 1 << 17


@dataclass(frozen=True)
class AsideSamples:
    """Samples set aside, ascending by id, and the reason and detail of each."""

    ids: SampleIds
    #: (num_samples,) indices into texts
    codes: npt.NDArray[np.int32]
    #: pairs of reason and detail
    texts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, ids: SampleIds, reason: str, detail: str) -> "AsideSamples":
        """Set aside samples, ascending by id, for one reason."""
        return cls(ids, np.zeros(len(ids), np.int32), ((reason, detail),))

    @classmethod
    def merge(cls, found: Sequence["AsideSamples"]) -> "AsideSamples":
        """Merge tables; a sample in several keeps the reason of the first one."""
        if not found:
            return cls(np.zeros(0, np.int64), np.zeros(0, np.int32), ())
        starts = np.cumsum([0, *(len(aside.texts) for aside in found)])
        codes = [aside.codes + np.int32(start) for aside, start in zip(found, starts, strict=False)]
        ids, first = np.unique(np.concatenate([aside.ids for aside in found]), return_index=True)
        texts = tuple(text for aside in found for text in aside.texts)
        return cls(ids, np.concatenate(codes)[first], texts)

    @property
    def reasons(self) -> Counter[str]:
        """Number of samples by reason."""
        counts: Counter[str] = Counter()
        numbers = np.bincount(self.codes, minlength=len(self.texts)).tolist()
        for (reason, _), number in zip(self.texts, numbers, strict=True):
            counts[reason] += number
        return +counts

    def first(self, reason: str) -> tuple[int, str] | None:
        """Return the first sample set aside for a reason, and its detail."""
        numbers = [i for i, text in enumerate(self.texts) if text[0] == reason]
        places = np.flatnonzero(np.isin(self.codes, numbers))
        if not len(places):
            return None
        return int(self.ids[places[0]]), self.texts[self.codes[places[0]]][1]

    def tables(self, samples: Index, sources: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows of the set-aside table, some at a time. `sources` are paths by id."""
        paths = pa.array([escape(path) for path in sources], pa.string())
        reasons = pa.array([reason for reason, _ in self.texts], pa.string())
        details = pa.array([escape(detail) for _, detail in self.texts], pa.large_string())
        for start in range(0, len(self.ids), _NAMED_AT_ONCE):
            some = slice(start, start + _NAMED_AT_ONCE)
            named = name_samples(samples, self.ids[some])
            codes = pa.array(self.codes[some])
            columns = {
                "key": named["key"],
                "source": paths.take(named["source_id"].combine_chunks()),
                "reason": reasons.take(codes),
                "detail": details.take(codes),
            }
            yield pa.table([columns[field.name] for field in SET_ASIDE_SCHEMA], SET_ASIDE_SCHEMA)


@dataclass(frozen=True, slots=True)
class AsideGroup:
    """Samples of one source, set aside for one reason; `key` and `detail` of the first."""

    source: str
    reason: str
    count: int
    key: str
    detail: str


def read_set_aside(paths: Iterable[Path], reasons: Collection[str] = ()) -> Iterator[pa.Table]:
    """Yield rows of SET_ASIDE_SCHEMA, some at a time, of these reasons or of all. Raises StageError
    if a table is gone or damaged."""
    wanted = pa.array(sorted(reasons), pa.string())
    for path in paths:
        try:
            with open_table(path) as file:
                for batch in file.iter_batches():
                    rows = pa.Table.from_batches([batch], SET_ASIDE_SCHEMA)
                    yield rows.filter(pc.is_in(rows["reason"], wanted)) if reasons else rows
        except (OSError, pa.ArrowException) as error:
            raise DamagedError(f"{path} cannot be read: {error}; {REMEDY}") from error


def group_set_aside(paths: Iterable[Path], unwritten: Iterable[pa.Table] = ()) -> list[AsideGroup]:
    """Group the samples set aside by source and reason, those of the files before those not written
    yet. Raises StageError as `read_set_aside`."""
    found: dict[tuple[str, str], AsideGroup] = {}
    for table in itertools.chain(read_set_aside(paths), unwritten):
        grouped = table.group_by(["source", "reason"], use_threads=False).aggregate(
            [([], "count_all"), ("key", "first"), ("detail", "first")]
        )
        for row in grouped.to_pylist():
            of = row["source"], row["reason"]
            group = found.setdefault(of, AsideGroup(*of, 0, row["key_first"], row["detail_first"]))
            found[of] = replace(group, count=group.count + row["count_all"])
    return list(found.values())

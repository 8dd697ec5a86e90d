"""Which rows of an index are not planned, and why: arrays, since there can be as many as rows."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from offline_packing.index.rows import SampleIds, name_rows
from offline_packing.index.table import SET_ASIDE_SCHEMA, Index

#: Rows whose keys are in memory at a time.
_ROWS_AT_ONCE: Final = 1 << 17


@dataclass(frozen=True)
class AsideRows:
    """Rows, ascending, and for each the number of its reason and detail in `texts`."""

    rows: SampleIds
    #: int32 (num_rows,)
    codes: npt.NDArray[np.int32]
    texts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, rows: SampleIds, reason: str, detail: str) -> "AsideRows":
        """Rows, ascending, with one reason."""
        return cls(rows, np.zeros(len(rows), np.int32), ((reason, detail),))

    @classmethod
    def merge(cls, found: Sequence["AsideRows"]) -> "AsideRows":
        """All rows; one that is in several has the reason of the first."""
        if not found:
            return cls(np.zeros(0, np.int64), np.zeros(0, np.int32), ())
        starts = np.cumsum([0, *(len(aside.texts) for aside in found)])
        codes = [aside.codes + np.int32(start) for aside, start in zip(found, starts, strict=False)]
        rows, first = np.unique(np.concatenate([aside.rows for aside in found]), return_index=True)
        texts = tuple(text for aside in found for text in aside.texts)
        return cls(rows, np.concatenate(codes)[first], texts)

    @property
    def reasons(self) -> Counter[str]:
        """Rows by reason."""
        counts: Counter[str] = Counter()
        numbers = np.bincount(self.codes, minlength=len(self.texts)).tolist()
        for (reason, _), number in zip(self.texts, numbers, strict=True):
            counts[reason] += number
        return +counts

    def first(self, reason: str) -> tuple[int, str] | None:
        """The first row set aside for a reason, and its detail."""
        numbers = [i for i, text in enumerate(self.texts) if text[0] == reason]
        places = np.flatnonzero(np.isin(self.codes, numbers))
        if not len(places):
            return None
        return int(self.rows[places[0]]), self.texts[self.codes[places[0]]][1]

    def tables(self, samples: Index, sources: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of the set-aside table, some at a time.

        Args:
            sources: the path of each source.
        """
        paths = pa.array([_utf8(path) for path in sources], pa.string())
        reasons = pa.array([reason for reason, _ in self.texts], pa.string())
        details = pa.array([_utf8(detail) for _, detail in self.texts], pa.large_string())
        for start in range(0, len(self.rows), _ROWS_AT_ONCE):
            some = slice(start, start + _ROWS_AT_ONCE)
            named = name_rows(samples, self.rows[some])
            codes = pa.array(self.codes[some])
            columns = {
                "key": named["key"],
                "source": paths.take(named["source_id"].combine_chunks()),
                "reason": reasons.take(codes),
                "detail": details.take(codes),
            }
            yield pa.table([columns[field.name] for field in SET_ASIDE_SCHEMA], SET_ASIDE_SCHEMA)


def _utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()

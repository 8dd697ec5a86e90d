"""Samples that a reader cannot use: counted by reason, and bounded, so that a run whose data do not
fit its settings ends with an error instead of searching forever."""

import logging
from collections import Counter
from typing import Final

import torch

from offline_packing.errors import StageError
from task_encoders.samples import REASONS, SampleError

logger = logging.getLogger(__name__)

#: Samples in a row that may fail to be read before the run ends, as in Energon.
MAX_FAILURES_IN_A_ROW: Final = 100
#: Samples that may be set aside for any reason before the first that can be used.
MAX_UNUSABLE_AT_FIRST: Final = 10_000
_REASON_NAMES: Final = tuple(REASONS)
_COUNTED_WORKERS: Final = 256
_NONE_OF_USE: Final = (
    "no sample can be used, the last one because of {}; check the dataset, and the length of packs"
)


def shared_counts() -> torch.Tensor:
    """Zeros by worker and reason; in shared memory: a trainer sees what its workers count."""
    counts = torch.zeros(_COUNTED_WORKERS, len(REASONS), dtype=torch.int64)
    counts.share_memory_()
    return counts


def by_reason(counts: torch.Tensor) -> Counter[str]:
    """The reasons that occurred, over all workers."""
    return +Counter(dict(zip(_REASON_NAMES, counts.sum(dim=0).tolist(), strict=True)))


class Unusable:
    """Samples that one reader sets aside in a pass."""

    def __init__(self, counts: torch.Tensor, worker: int) -> None:
        #: by reason
        self.counts = counts[worker % _COUNTED_WORKERS]
        #: samples that could not be read, since the last that could
        self.failures_in_a_row = 0
        self._num_samples = 0
        self._last_error: SampleError | None = None

    def add(self, number: int, error: SampleError, *, any_used: bool) -> None:
        """Count a sample. Raises StageError if it is one too many."""
        logger.warning("set aside sample %d: %s", number, error)
        self._last_error = error
        self._num_samples += 1
        self.counts[_REASON_NAMES.index(error.reason)] += 1
        if self.failures_in_a_row == MAX_FAILURES_IN_A_ROW:
            raise StageError(
                f"{MAX_FAILURES_IN_A_ROW} samples in a row cannot be read, the last one, {number}, "
                f"with {error}; check the dataset"
            ) from error
        if self._num_samples == MAX_UNUSABLE_AT_FIRST and not any_used:
            raise StageError(_NONE_OF_USE.format(error)) from error

    def check_end(self, *, is_only_reader: bool) -> None:
        """Raise StageError at the end of an epoch without a sample that can be used; one of many
        readers may have had only a few."""
        had_many = is_only_reader or self._num_samples >= MAX_FAILURES_IN_A_ROW
        if had_many and self._last_error is not None:
            raise StageError(_NONE_OF_USE.format(self._last_error)) from self._last_error

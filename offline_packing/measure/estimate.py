"""How many records a source has, for what a dry run prints: only the beginning of large files is
read."""

import itertools
from collections.abc import Sequence
from copy import copy
from typing import Any, BinaryIO, Final

from offline_packing.sources import Source, SourcePart
from offline_packing.sources.reading.locators import Root

#: How many files are read, and records of each.
_SAMPLED_PARTS: Final = 8
_SAMPLED_RECORDS: Final = 1000


def estimate_records(source: Source, parts: Sequence[SourcePart]) -> tuple[int, bool]:
    """Records in parts of a source and whether that is exact. Parts of unknown size are
    one file each: the first records of some are read; the others are assumed to hold as many."""
    known = sum(part.num_records for part in parts if part.num_records is not None)
    unknown = [part for part in parts if part.num_records is None]
    if not unknown:
        return known, True
    chosen = unknown[:: -(-len(unknown) // _SAMPLED_PARTS)]
    sampled = [_estimate_part(source, part) for part in chosen]
    mean = sum(count for count, _ in sampled) / len(sampled)
    is_exact = len(chosen) == len(unknown) and all(exact for _, exact in sampled)
    return known + round(mean * len(unknown)), is_exact


def _estimate_part(source: Source, part: SourcePart) -> tuple[float, bool]:
    """Records in a part, of one file, in proportion to how far the first ones reach into it."""
    watched = copy(source)
    root = watched.root = _WatchedRoot(source.root)  # type: ignore[assignment]
    records = watched.records(part)
    count = sum(1 for _ in itertools.islice(records, _SAMPLED_RECORDS))
    if count < _SAMPLED_RECORDS:
        return count, True
    if not root.opened:  # it is no single file
        return count + sum(1 for _ in records), True
    reached = max(1, root.opened[0].tell())
    return count * max(1.0, source.root.size(root.opened[0]) / reached), False


class _WatchedRoot:
    """A root that keeps the opened files: how far each was read gives an estimate of the rest."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self.opened: list[BinaryIO] = []

    def open(self, container: str, *, sequential: bool = False) -> BinaryIO:
        self.opened.append(self._root.open(container, sequential=sequential))
        return self.opened[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._root, name)

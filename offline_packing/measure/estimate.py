"""How many records a source has, for what a dry run prints: of large files only the beginning is
read."""

import itertools
from collections.abc import Sequence
from copy import copy
from typing import BinaryIO, Final

from offline_packing.sources import Source, SourcePart

#: What is read: files, and records of each.
_SAMPLED_PARTS: Final = 8
_SAMPLED_RECORDS: Final = 1000


def estimate_records(source: Source, parts: Sequence[SourcePart]) -> tuple[int, bool]:
    """Records in parts of a source and whether that is exact. Parts whose number nobody knows are
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
    opened: list[BinaryIO] = []
    watched = copy(source)

    def open_container(container: str, *, sequential: bool = False) -> BinaryIO:
        opened.append(source.open_container(container, sequential=sequential))
        return opened[-1]

    watched.open_container = open_container  # type: ignore[method-assign]
    records = watched.records(part)
    count = sum(1 for _ in itertools.islice(records, _SAMPLED_RECORDS))
    if count < _SAMPLED_RECORDS:
        return count, True
    if not opened:  # it is no single file
        return count + sum(1 for _ in records), True
    reached = max(1, opened[0].tell())
    return count * max(1.0, source.root.size(opened[0]) / reached), False

"""Content that several samples share, by the index's columns of hashes."""

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.index.table import Index

Rows = npt.NDArray[np.int64]

_HASHES_AT_ONCE: Final = 1 << 20


def sort_equal(*columns: npt.NDArray[np.uint64]) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """Order that brings equal rows of the columns together, (num_rows,), the first one first; and
    whether the row before, in that order, is equal."""
    order = np.lexsort(columns)
    equal = np.ones(max(len(order) - 1, 0), bool)
    for column in columns:
        equal &= column[order[1:]] == column[order[:-1]]
    return order, np.append(False, equal)[: len(order)]


def places_of_equal(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Places of the hashes that stand in several, ascending. Sorted without their places, they take
    a quarter of the memory, and few are looked for again."""
    ordered = np.sort(hashes)
    several = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    found = [np.empty(0, np.int64)]
    for start in range(0, len(hashes) if len(several) else 0, _HASHES_AT_ONCE):
        some = np.isin(hashes[start : start + _HASHES_AT_ONCE], several)
        found.append(start + np.flatnonzero(some))
    return np.concatenate(found)


def shared_media(samples: Index) -> tuple[int, tuple[int, str]]:
    """The number of different images and videos that several samples show; and of the one that most
    samples show how many these are, and the key of the first."""
    found = [np.empty(0, np.uint64)]
    for part in samples.parts("media_hash"):
        media = part["media_hash"].combine_chunks()
        rows = pa.table([pc.list_parent_indices(media), pc.list_flatten(media)], ["row", "hash"])
        found.append(rows.group_by(["row", "hash"]).aggregate([])["hash"].to_numpy())
    hashes = np.sort(np.concatenate(found))
    shared, counts = np.unique(hashes[1:][hashes[1:] == hashes[:-1]], return_counts=True)
    if not len(shared):
        return 0, (0, "")
    most = np.argmax(counts)
    return len(shared), (int(counts[most]) + 1, _first_with(samples, shared[most]))


def _first_with(samples: Index, medium: np.uint64) -> str:
    """Key of the first sample that shows a medium."""
    for part in samples.parts("key", "media_hash"):
        media = part["media_hash"].combine_chunks()
        is_shown = pc.equal(pc.list_flatten(media), pa.scalar(int(medium), pa.uint64()))
        rows = pc.list_parent_indices(media).filter(is_shown)
        if len(rows):
            return str(part["key"][rows[0].as_py()].as_py())
    raise KeyError(medium)

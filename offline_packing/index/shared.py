"""Content that several samples share, by the index's columns of hashes."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.index.table import Index

Rows = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_HASHES_AT_ONCE: Final = 1 << 20
_OWN: Final = np.uint64(1 << 63)


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


def shared_contents(samples: Index) -> Iterator[tuple[slice, Rows, Hashes]]:
    """Contents that keep samples in one split, part by part of the index.

    A sample has its group, or else its images and videos; without any, and for the parts of a
    conversation, its own content: all texts and media of its record.

    Yields:
        the part's place among the samples; and of its (num_contents,) contents the row in the part
        and the hash. Hashes of samples' own contents have the highest bit, so that the least hash
        of a conversation is that of a picture, where any of its parts shows one.
    """
    columns = ["group_hash", "media_hash", "sample_hash"]
    if samples.info.split:
        columns.append("part")
    start = 0
    for part in samples.parts(*columns):
        groups = part["group_hash"].to_numpy()
        media = part["media_hash"].combine_chunks()
        grouped, rows = np.flatnonzero(groups), pc.list_parent_indices(media).to_numpy()
        by_media = groups[rows] == 0
        by_itself = pc.list_value_length(media).to_numpy() == 0
        if samples.info.split:
            by_itself |= part["part"].is_valid().to_numpy()
        alone = np.flatnonzero(by_itself & (groups == 0))
        others = np.concatenate([groups[grouped], pc.list_flatten(media).to_numpy()[by_media]])
        own = part["sample_hash"].to_numpy()[alone]
        yield (
            slice(start, start := start + len(part)),
            np.concatenate([grouped, rows[by_media], alone]),
            np.concatenate([others & ~_OWN, own | _OWN]),
        )


def most_shown(samples: Index) -> tuple[int, str]:
    """The number of samples that show the most frequent image or video, and the key of the first of
    them; (0, "") where no two samples show one."""
    found = [np.empty(0, np.uint64)]
    for part in samples.parts("media_hash"):
        media = part["media_hash"].combine_chunks()
        rows = pa.table([pc.list_parent_indices(media), pc.list_flatten(media)], ["row", "hash"])
        found.append(rows.group_by(["row", "hash"]).aggregate([])["hash"].to_numpy())
    hashes = np.sort(np.concatenate(found))
    shared, counts = np.unique(hashes[1:][hashes[1:] == hashes[:-1]], return_counts=True)
    if not len(shared):
        return 0, ""
    most = np.argmax(counts)
    return int(counts[most]) + 1, _first_with(samples, shared[most])


def _first_with(samples: Index, medium: np.uint64) -> str:
    """Key of the first sample that shows a medium."""
    for part in samples.parts("key", "media_hash"):
        media = part["media_hash"].combine_chunks()
        is_shown = pc.equal(pc.list_flatten(media), pa.scalar(int(medium), pa.uint64()))
        rows = pc.list_parent_indices(media).filter(is_shown)
        if len(rows):
            return str(part["key"][rows[0].as_py()].as_py())
    raise KeyError(medium)

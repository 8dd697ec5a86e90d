"""Records that samples are made of, and content that several samples share.

Most samples are one whole record. A long conversation that `pack.on_overlong: split_turns` cuts is
one record in several samples, its parts, which are neighbors in the index.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.index.rows import SampleIds, samples_of_shards
from offline_packing.index.table import Index

Rows = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_HASHES_AT_ONCE: Final = 1 << 20
_OWN: Final = np.uint64(1 << 63)


def places_of_equal(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return the indices of all hashes that occur more than once, ascending. Sorting the values
    alone takes a quarter of argsort's memory."""
    ordered = np.sort(hashes)
    several = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    found = [np.empty(0, np.int64)]
    for start in range(0, len(hashes) if len(several) else 0, _HASHES_AT_ONCE):
        some = np.isin(hashes[start : start + _HASHES_AT_ONCE], several)
        found.append(start + np.flatnonzero(some))
    return np.concatenate(found)


def shared_contents(samples: Index) -> Iterator[tuple[slice, Rows, Hashes]]:
    """Yield, for each part of the index, the contents that keep samples in one split: the part's
    slice of all samples, and of (num_contents,) contents the row in the part and the hash.

    The content of a sample is its group, or else its images and videos; without any, and for parts
    of a conversation, also all texts and media of its record. Such a hash has the highest bit, so
    that the least hash of a conversation is that of a picture, where any of its parts shows one.
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
    """Count the samples that show the most frequent image or video; return the count and the key
    of the first of them, or (0, "") if no two samples share one."""
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
    medium = pa.scalar(int(shared[most]), pa.uint64())
    for part in samples.parts("key", "media_hash"):
        media = part["media_hash"].combine_chunks()
        rows = pc.list_parent_indices(media).filter(pc.equal(pc.list_flatten(media), medium))
        if len(rows):
            return int(counts[most]) + 1, str(part["key"][rows[0].as_py()].as_py())
    raise KeyError(medium)


#: Columns that decide which records samples are made of.
RECORD_COLUMNS: Final = ("key", "content_hash", "source_id", "part")
#: The number of keys that are Python objects at a time.
_KEYS_AT_ONCE: Final = 1 << 17


def record_numbers(samples: Index) -> npt.NDArray[np.int64]:
    """Number each sample's record, (num_samples,): [0, 1, 1, 1, 2] if the second is cut."""
    if not samples.info.split:
        return np.arange(samples.info.num_samples)
    begins = [np.empty(0, bool)]
    for rows in samples.parts("key_hash", "sample_hash", "part"):
        first = pc.fill_null(pc.struct_field(rows["part"], "first"), -1).to_numpy()
        # Parts of a record have its hashes, and are in order; parts of its copy start again.
        is_same = (first[1:] > first[:-1]) & (first[:-1] >= 0)
        for name in ("key_hash", "sample_hash"):
            hashes = rows[name].to_numpy()
            is_same &= hashes[1:] == hashes[:-1]
        begins.append(np.concatenate([np.ones(min(1, len(rows)), bool), ~is_same]))
    return np.cumsum(np.concatenate(begins)) - 1


def find_duplicates(samples: Index) -> SampleIds:
    """Find the samples of records whose key an earlier record of the same source has, ascending.
    Equal hashes are found by sorting; only their records are compared by keys."""
    numbers = record_numbers(samples)
    firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
    suspects = places_of_equal(samples.array("key_hash")[firsts])
    if not len(suspects):
        return suspects
    (rows,) = samples_of_shards(samples, RECORD_COLUMNS, [firsts[suspects]], Path())
    named = records_of(rows).append_column("id", pa.array(suspects))
    first = named.group_by(["source_id", "key"]).aggregate([("id", "min")])["id_min"].to_numpy()
    return np.flatnonzero(np.isin(numbers, np.setdiff1d(suspects, first, assume_unique=True)))


def record_counts(samples: Index, packed: SampleIds) -> dict[str, int]:
    """Count the records read, packed, and set aside; return {} if each sample is one record. A
    conversation is packed if any of its parts is."""
    info = samples.info
    if not info.split:
        return {}
    in_packs = len(np.unique(record_numbers(samples)[packed]))
    read = info.num_records + info.num_set_aside
    return {"read": read, "packed": in_packs, "set_aside": read - in_packs}


def records_of(rows: pa.Table) -> pa.Table:
    """Return key, content_hash and source_id of the record of each row with RECORD_COLUMNS, and the
    turns from `first` to `end` that the sample trains of it; null: all."""
    keys = pc.coalesce(pc.struct_field(rows["part"], "key"), rows["key"])
    turns = {name: pc.struct_field(rows["part"], name) for name in ("first", "end")}
    return pa.table({"key": keys, **{n: rows[n] for n in ("content_hash", "source_id")}, **turns})


def own_keys(
    rows: pa.Table, column: str, prefixes: Iterable[tuple[object, str]]
) -> Iterator[tuple[Any, pa.RecordBatch]]:
    """Yield (keys without prefix, rows) of each source, given as (value of `column`, prefix)."""
    for batch in rows.to_batches(max_chunksize=_KEYS_AT_ONCE):
        for source, prefix in prefixes:
            is_source = pc.equal(batch[column], source)
            own = batch.filter(pc.and_(is_source, pc.starts_with(batch["key"], pattern=prefix)))
            yield pc.utf8_slice_codeunits(own["key"], len(prefix)), own


def count_packed(samples: Index, packed: SampleIds) -> tuple[int, int]:
    """Count the records in some samples; and how often a record, or turns of a cut one, are in a
    further sample, which is a fault."""
    packed = np.unique(packed)
    hashes = samples.array("key_hash")[packed]
    turns = [np.empty((2, 0), np.int64)]
    for part in samples.parts("part"):
        own = (("first", 0), ("end", np.iinfo(np.int32).max))  # of a record that is not cut
        columns = [pc.fill_null(pc.struct_field(part["part"], name), other) for name, other in own]
        turns.append(np.stack([column.to_numpy() for column in columns]))
    begins, ends = np.concatenate(turns, axis=1)[:, packed]
    order = np.lexsort((begins, hashes))
    is_same = hashes[order[1:]] == hashes[order[:-1]]
    is_twice = is_same & (begins[order[1:]] < ends[order[:-1]])
    return len(order) - int(np.count_nonzero(is_same)), int(np.count_nonzero(is_twice))

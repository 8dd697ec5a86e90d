"""Records that samples are made of: most samples are one whole record, and a long conversation that
`pack.on_overlong: split_turns` cuts is one record in several samples, its parts, which stand in the
index one after the other."""

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.index.rows import SampleIds, samples_of_shards
from offline_packing.index.shared import places_of_equal
from offline_packing.index.table import Index

#: Columns that say which records samples are made of.
RECORD_COLUMNS: Final = ("key", "content_hash", "source_id", "part")
#: End of the turns of a record that is not cut.
_ALL: Final = 2**31 - 1


def record_numbers(samples: Index) -> npt.NDArray[np.int64]:
    """(num_samples,) the number of each sample's record: [0, 1, 1, 1, 2] if the second is cut."""
    if not samples.info.split:
        return np.arange(samples.info.num_samples)
    begins = [np.empty(0, bool)]
    for rows in samples.parts("key_hash", "sample_hash", "part"):
        first = pc.fill_null(pc.struct_field(rows["part"], "first"), -1).to_numpy()
        # Parts of a record have its hashes, and are in order; those of a copy of it begin again.
        is_same = (first[1:] > first[:-1]) & (first[:-1] >= 0)
        for name in ("key_hash", "sample_hash"):
            hashes = rows[name].to_numpy()
            is_same &= hashes[1:] == hashes[:-1]
        begins.append(np.concatenate([np.ones(min(1, len(rows)), bool), ~is_same]))
    return np.cumsum(np.concatenate(begins)) - 1


def find_duplicates(samples: Index) -> SampleIds:
    """Samples of records whose key an earlier record of the same source has, ascending. Equal
    hashes are found by sorting; the few records that have one are compared by their keys."""
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
    """Records read, packed in some samples, and set aside, each counted once; empty where each
    sample is one record. A conversation of which any part is packed counts as packed."""
    info = samples.info
    if not info.split:
        return {}
    in_packs, read = len(np.unique(record_numbers(samples)[packed])), info.num_records
    read += info.num_set_aside
    return {"read": read, "packed": in_packs, "set_aside": read - in_packs}


def records_of(rows: pa.Table) -> pa.Table:
    """key, content_hash and source_id of the record of each sample with RECORD_COLUMNS, and the
    turns from `first` to `end` that the sample trains of it; null: all."""
    keys = pc.coalesce(pc.struct_field(rows["part"], "key"), rows["key"])
    turns = {name: pc.struct_field(rows["part"], name) for name in ("first", "end")}
    return pa.table({"key": keys, **{n: rows[n] for n in ("content_hash", "source_id")}, **turns})


def count_packed(samples: Index, packed: SampleIds) -> tuple[int, int]:
    """The number of records in some samples; and how often one of them, or turns of one that is
    cut, are in one more sample, which nothing should be."""
    packed = np.unique(packed)
    hashes = samples.array("key_hash")[packed]
    turns = [np.empty((2, 0), np.int64)]
    for part in samples.parts("part"):
        own = (("first", 0), ("end", _ALL))
        columns = [pc.fill_null(pc.struct_field(part["part"], name), other) for name, other in own]
        turns.append(np.stack([column.to_numpy() for column in columns]))
    begins, ends = np.concatenate(turns, axis=1)[:, packed]
    order = np.lexsort((begins, hashes))
    is_same = hashes[order[1:]] == hashes[order[:-1]]
    is_twice = is_same & (begins[order[1:]] < ends[order[:-1]])
    return len(order) - int(np.count_nonzero(is_same)), int(np.count_nonzero(is_twice))

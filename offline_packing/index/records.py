"""Records that samples are made of: most samples are one whole record, and a long conversation that
`pack.on_overlong: split_turns` cuts is one record in several samples, its parts."""

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.index.rows import SampleIds
from offline_packing.index.table import Index, key_hash

#: Columns that say which records samples are made of.
RECORD_COLUMNS: Final = ("key", "content_hash", "source_id", "part")
#: End of the turns of a record that is not cut.
_ALL: Final = 2**31 - 1


def record_counts(samples: Index, packed: SampleIds) -> dict[str, int]:
    """Records read, packed in some samples, and set aside, each counted once; empty where each
    sample is one record. A conversation of which any part is packed counts as packed."""
    if not samples.info.num_records:
        return {}
    in_packs, read = len(np.unique(record_hashes(samples)[packed])), samples.info.all_records
    return {"read": read, "packed": in_packs, "set_aside": read - in_packs}


def record_hashes(samples: Index) -> npt.NDArray[np.uint64]:
    """(num_samples,) the key_hash of each sample's record, which the parts of one conversation
    share."""
    hashes: npt.NDArray[np.uint64] = samples.array("key_hash").copy()
    first = 0
    for rows in samples.parts("source_id", "part") if samples.info.split else ():
        own = np.flatnonzero(rows["part"].is_valid())
        some = rows.take(pa.array(own))
        keys = pc.struct_field(some["part"], "key").to_pylist()
        hashes[first + own] = [*map(key_hash, some["source_id"].to_pylist(), keys)]
        first += len(rows)
    return hashes


def records_of(rows: pa.Table) -> pa.Table:
    """key, content_hash and source_id of the record of each sample with RECORD_COLUMNS, and the
    turns from `first` to `end` that the sample trains of it; null: all."""
    keys = pc.coalesce(pc.struct_field(rows["part"], "key"), rows["key"])
    turns = {name: pc.struct_field(rows["part"], name) for name in ("first", "end")}
    return pa.table({"key": keys, **{n: rows[n] for n in ("content_hash", "source_id")}, **turns})


def count_packed(samples: Index, packed: SampleIds) -> tuple[int, int]:
    """The number of records in some samples; and how often one of them, or turns of one that is
    cut, are in one more sample, which nothing should be."""
    is_packed = np.zeros(samples.info.num_samples, bool)
    is_packed[packed] = True
    hashes: list[int] = []
    turns = [np.empty((2, 0), np.int64)]
    first = 0
    for part in samples.parts(*RECORD_COLUMNS):
        some = records_of(part.filter(pa.array(is_packed[first : first + len(part)])))
        first += len(part)
        hashes += map(key_hash, some["source_id"].to_pylist(), some["key"].to_pylist())
        own = [pc.fill_null(some[name], other) for name, other in (("first", 0), ("end", _ALL))]
        turns.append(np.stack([column.to_numpy() for column in own]))
    own_hashes, (begins, ends) = np.array(hashes, np.uint64), np.concatenate(turns, axis=1)
    order = np.lexsort((begins, own_hashes))
    is_same = own_hashes[order[1:]] == own_hashes[order[:-1]]
    is_twice = is_same & (begins[order[1:]] < ends[order[:-1]])
    return len(order) - int(np.count_nonzero(is_same)), int(np.count_nonzero(is_twice))

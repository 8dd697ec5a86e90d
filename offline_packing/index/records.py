"""Records that samples are made of: most samples are one whole record, a dialogue is several, and a
long conversation is one record in several samples, its parts."""

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.index.rows import SampleIds, samples_of_shards
from offline_packing.index.table import Index, key_hash

#: Columns that say which records samples are made of.
RECORD_COLUMNS: Final = ("key", "content_hash", "source_id", "parts")
#: End of the turns of a record that is not cut.
_ALL: Final = 2**31 - 1


def count_records(samples: Index) -> npt.NDArray[np.int64]:
    """(num_samples,) the number of records that each sample is made of."""
    if not samples.info.num_records:
        return np.ones(samples.info.num_samples, np.int64)
    lengths = pc.fill_null(pc.list_value_length(samples.table("parts")["parts"]), 1)
    return lengths.to_numpy().astype(np.int64)


def record_counts(samples: Index, packed: SampleIds) -> dict[str, int]:
    """Records read, packed in some samples, and set aside, each counted once; empty where each
    sample is one record. A conversation of which any part is packed counts as packed."""
    if not samples.info.num_records:
        return {}
    rows = np.unique(packed)
    rows = rows[np.unique(record_hashes(samples)[rows], return_index=True)[1]]
    in_packs, read = count_records(samples)[rows].sum(), samples.info.all_records
    return {"read": read, "packed": int(in_packs), "set_aside": read - int(in_packs)}


def are_parts(rows: pa.Table) -> npt.NDArray[np.bool_]:
    """(num_rows,) whether each row is a part of a conversation; `rows` have the column parts."""
    parts = rows["parts"].combine_chunks()
    has_turns = pc.list_flatten(parts).field("turns").is_valid().to_numpy(zero_copy_only=False)
    found = np.zeros(len(rows), bool)
    found[pc.list_parent_indices(parts).to_numpy()[has_turns]] = True
    return found


def record_hashes(samples: Index) -> npt.NDArray[np.uint64]:
    """(num_samples,) a number that is the same for the parts of one conversation, and another one
    for every other sample."""
    hashes: npt.NDArray[np.uint64] = samples.array("key_hash").copy()
    first = 0
    for rows in samples.parts("dialogue_hash", "parts") if samples.info.split else ():
        own = np.flatnonzero(are_parts(rows))
        hashes[first + own] = rows["dialogue_hash"].to_numpy()[own]
        first += len(rows)
    return hashes


def records_of(rows: pa.Table) -> pa.Table:
    """key, content_hash and source_id of each record of samples with RECORD_COLUMNS, and the turns
    from `first` to `end` that they train of it; null: all."""
    whole = rows.filter(pc.is_null(rows["parts"])).drop(["parts"])
    for name in ("first", "end"):
        whole = whole.append_column(name, pa.nulls(len(whole), pa.int32()))
    parts = rows["parts"].combine_chunks()
    records, owners = pc.list_flatten(parts), pc.list_parent_indices(parts)
    columns = [records.field(name) for name in ("key", "content_hash")]
    turns = [pc.struct_field(records, ["turns", name]) for name in ("first", "end")]
    table = pa.table([*columns, rows["source_id"].take(owners), *turns], schema=whole.schema)
    return pa.concat_tables([whole, table])


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


def name_parts(samples: Index, ids: SampleIds) -> pa.Table:
    """source_id, key and parts of some samples, in the given order."""
    return next(samples_of_shards(samples, ("source_id", "key", "parts"), [ids], Path()))

"""Which rows of an index are planned: not those whose key came before, in this or in an earlier
generation. What a layout cannot hold the layout says itself."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.index.rows import rows_of_shards
from offline_packing.index.table import INDEX_SCHEMA, Index, key_hash
from offline_packing.runs.generations import earlier_generations
from offline_packing.runs.run import Stage

Rows = npt.NDArray[np.int64]


def name_rows(samples: Index, rows: Rows) -> pa.Table:
    """source_id and key of some rows, in the given order."""
    return next(rows_of_shards(samples, ("source_id", "key"), [rows], Path()))


def find_duplicates(hashes: npt.NDArray[np.uint64], name: Callable[[Rows], pa.Table]) -> Rows:
    """Rows whose key an earlier row of the same source has, ascending.

    Equal hashes are found by sorting; the few rows that have one are compared by their keys.

    Args:
        hashes: (num_samples,) key_hash of the index.
        name: gives source_id and key of some rows, see `name_rows`.
    """
    order = np.argsort(hashes, kind="stable")
    equal = hashes[order[1:]] == hashes[order[:-1]]
    suspects = np.union1d(order[1:][equal], order[:-1][equal])
    seen: set[tuple[int, str]] = set()
    repeated: list[int] = []
    for row, named in zip(suspects.tolist(), name(suspects).to_pylist(), strict=True):
        identity = (named["source_id"], named["key"])
        if identity in seen:
            repeated.append(row)
        seen.add(identity)
    return np.array(repeated, dtype=np.int64)


def find_known(stage: Stage, samples: Index) -> Rows:
    """Rows whose key an earlier generation has of the same source, ascending.

    Of the earlier indices one part is in memory at a time; equal hashes are compared by their keys.
    """
    hashes, source_ids = samples.array("key_hash"), samples.array("source_id")
    known: list[Rows] = []
    for generation in earlier_generations(stage):
        for new_id, source in enumerate(stage.config.source):
            old_id = generation.same_source(source)
            rows = np.flatnonzero(source_ids == new_id)
            if old_id is None or not len(rows):
                continue
            own = hashes[rows]
            if old_id != new_id:  # the hash covers the number of the source
                keys = name_rows(samples, rows)["key"].to_pylist()
                own = np.array([key_hash(old_id, key) for key in keys], dtype=np.uint64)
            suspects = _rows_with_hash(generation.open_index(), old_id, own)
            found = rows[np.isin(own, suspects["key_hash"].to_numpy())]
            equal = pc.is_in(name_rows(samples, found)["key"], suspects["key"].combine_chunks())
            known.append(found[equal.to_numpy()])
    return np.unique(np.concatenate([*known, np.empty(0, np.int64)]))


def _rows_with_hash(earlier: Index, source_id: int, hashes: npt.NDArray[np.uint64]) -> pa.Table:
    """key and key_hash of the rows of a source that have one of these hashes."""
    hashes = np.unique(hashes)
    columns = ("key", "key_hash")
    found = [INDEX_SCHEMA.empty_table().select(list(columns))]
    for number in range(len(earlier.info.part_rows)):
        part = earlier.part(number, "source_id", "key_hash")
        own = part["key_hash"].to_numpy()
        place = np.minimum(np.searchsorted(hashes, own), len(hashes) - 1)
        rows = (hashes[place] == own) & (part["source_id"].to_numpy() == source_id)
        if rows.any():
            found.append(earlier.part(number, *columns).filter(pa.array(rows)))
    return pa.concat_tables(found)

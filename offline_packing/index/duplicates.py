"""Samples whose key an earlier sample of the same source has."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from offline_packing.index.rows import SampleIds


def find_duplicates(
    hashes: npt.NDArray[np.uint64], name: Callable[[SampleIds], pa.Table]
) -> SampleIds:
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

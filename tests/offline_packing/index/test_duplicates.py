"""Duplicate keys are found by their text, whatever the hashes say."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from offline_packing.index.duplicates import find_duplicates


def duplicates(rows: list[tuple[int, str, int]]) -> list[int]:
    """Of rows (source, key, hash)."""
    sources, keys, hashes = zip(*rows, strict=True) if rows else ((), (), ())
    names = pa.table(
        {"source_id": pa.array(sources, pa.int32()), "key": pa.array(keys, pa.large_string())}
    )
    array = np.array(hashes, dtype=np.uint64)
    return find_duplicates(array, lambda ids: names.take(pa.array(ids))).tolist()


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from("abcd")), max_size=30))
def test_all_but_the_first(rows: list[tuple[int, str]]) -> None:
    # A poor hash: 'a' and 'c' collide, and so do the two sources.
    expected = [i for i, row in enumerate(rows) if row in rows[:i]]
    assert duplicates([(source, key, ord(key) % 2) for source, key in rows]) == expected


def test_equal_hashes_of_different_keys() -> None:
    assert duplicates([(0, "a", 7), (0, "b", 7)]) == []
    assert duplicates([(0, "a", 7), (1, "a", 7)]) == []
    assert duplicates([(0, "a", 7), (0, "b", 7), (0, "a", 7)]) == [2]

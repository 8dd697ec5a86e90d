"""Duplicate keys are found by their text, whatever the hashes say."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from offline_packing.plan_stage import find_duplicates


def names_table(rows: list[tuple[int, str, int]]) -> pa.Table:
    sources, keys, hashes = zip(*rows, strict=True) if rows else ((), (), ())
    return pa.table(
        {
            "source_id": pa.array(sources, pa.int32()),
            "key": pa.array(keys, pa.large_string()),
            "key_hash": pa.array(hashes, pa.uint64()),
        }
    )


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from("abcd")), max_size=30))
def test_all_but_the_first(rows: list[tuple[int, str]]) -> None:
    # A poor hash: 'a' and 'c' collide, and so do the two sources.
    table = names_table([(source, key, ord(key) % 2) for source, key in rows])
    expected = [i for i, row in enumerate(rows) if row in rows[:i]]
    assert find_duplicates(table).tolist() == expected


def test_equal_hashes_of_different_keys() -> None:
    assert find_duplicates(names_table([(0, "a", 7), (0, "b", 7)])).tolist() == []
    assert find_duplicates(names_table([(0, "a", 7), (1, "a", 7)])).tolist() == []
    assert find_duplicates(names_table([(0, "a", 7), (0, "b", 7), (0, "a", 7)])).tolist() == [2]

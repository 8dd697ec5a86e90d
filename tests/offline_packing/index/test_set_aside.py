"""Every row set aside once, with its first reason, in any number of tables; duplicate keys are
found by their text, whatever the hashes say."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.index import set_aside
from offline_packing.index.set_aside import AsideSamples, find_duplicates
from offline_packing.index.table import SET_ASIDE_SCHEMA
from tests.helpers.index_tables import make_index


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def merged() -> AsideSamples:
    left_out = AsideSamples(
        rows(2, 7), np.array([1, 0], np.int32), (("overlong", "9 tokens"), ("over_budget", "few"))
    )
    return AsideSamples.merge(
        [
            AsideSamples.of(rows(5, 9), "duplicate_key", "again"),
            AsideSamples.of(rows(1, 5), "not_in_layout", "no image"),
            AsideSamples.of(rows(), "not_in_layout", "no turn"),
            left_out,
        ]
    )


def test_the_first_reason_counts() -> None:
    aside = merged()
    assert aside.ids.tolist() == [1, 2, 5, 7, 9]
    assert [aside.texts[code] for code in aside.codes] == [
        ("not_in_layout", "no image"),
        ("over_budget", "few"),
        ("duplicate_key", "again"),
        ("overlong", "9 tokens"),
        ("duplicate_key", "again"),
    ]
    assert aside.reasons == {
        "duplicate_key": 2,
        "not_in_layout": 1,
        "overlong": 1,
        "over_budget": 1,
    }
    assert aside.first("duplicate_key") == (5, "again")
    assert aside.first("not_drawn") is None


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(set_aside, "_NAMED_AT_ONCE", at_once)
    samples = make_index(tmp_path, [3, 0, 4, 5])
    tables = list(merged().tables(samples, ["data/\udcff"]))
    assert len(tables) == -(-5 // at_once)
    table = pa.concat_tables(tables)
    assert table.schema == SET_ASIDE_SCHEMA
    assert table["key"].to_pylist() == ["k1", "k2", "k5", "k7", "k9"]
    assert table["reason"].to_pylist()[3:] == ["overlong", "duplicate_key"]
    assert table["detail"].to_pylist()[:2] == ["no image", "few"]
    assert set(table["source"].to_pylist()) == {"data/\\udcff"}


def duplicates(rows: list[tuple[int, str, int]]) -> list[int]:
    """A table of rows (source, key, hash)."""
    sources, keys, hashes = zip(*rows, strict=True) if rows else ((), (), ())
    names = pa.table(
        {"source_id": pa.array(sources, pa.int32()), "key": pa.array(keys, pa.large_string())}
    )
    array = np.array(hashes, dtype=np.uint64)
    return find_duplicates(array, lambda ids: names.take(pa.array(ids))).tolist()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from("abcd")), max_size=30))
def test_all_but_the_first(rows: list[tuple[int, str]]) -> None:
    # A poor hash: 'a' and 'c' collide, and so do the two sources.
    expected = [i for i, row in enumerate(rows) if row in rows[:i]]
    assert duplicates([(source, key, ord(key) % 2) for source, key in rows]) == expected

"""Rows of the index in any order; what is set aside, once each; duplicates."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.errors import StageError
from offline_packing.index import set_aside
from offline_packing.index import table as index
from offline_packing.index.records import find_duplicates, record_numbers
from offline_packing.index.rows import name_samples, samples_of_shards
from offline_packing.index.set_aside import AsideSamples
from offline_packing.index.table import INDEX_SCHEMA, SET_ASIDE_SCHEMA, Index, IndexInfo


def make_index(folder: Path, part_rows: list[int]) -> Index:
    """Rows whose key, tokens, locator and number of media follow from their number."""
    numbers = iter(range(sum(part_rows)))
    return write_index(folder, [[row_of(next(numbers)) for _ in range(n)] for n in part_rows])


def write_index(folder: Path, parts: list[list[dict[str, object]]], **info: Any) -> Index:
    """An index of these rows, of which some columns may lack."""
    for number, rows in enumerate(parts):
        with index.table_writer(folder / index.part_name(number), INDEX_SCHEMA) as write:
            write(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA))
    return Index(folder, IndexInfo({}, {}, list(map(len, parts)), {}, **info))


def row_of(i: int) -> dict[str, object]:
    """Row `i` of such an index."""
    locator = {"kind": "bytes", "container": f"c{i % 3}", "offset": i, "size": 1, "column": ""}
    media = [{**locator, "extension": "jpg"}] * (i % 3)
    return {"key": f"k{i}", "source_id": 0, "num_tokens": i, "json": locator, "media": media}


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_the_first_reason_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(set_aside, "_NAMED_AT_ONCE", at_once)
    texts = (("overlong", "9 tokens"), ("over_budget", "few"))
    aside = AsideSamples.merge(
        [
            AsideSamples.of(rows(5, 9), "duplicate_key", "again"),
            AsideSamples.of(rows(1, 5), "not_in_layout", "no image"),
            AsideSamples.of(rows(), "not_in_layout", "no turn"),
            AsideSamples(rows(2, 7), np.array([1, 0], np.int32), texts),
        ]
    )
    counts = {"duplicate_key": 2, "not_in_layout": 1, "overlong": 1, "over_budget": 1}
    assert aside.reasons == counts
    assert aside.first("duplicate_key") == (5, "again")
    assert aside.first("not_drawn") is None
    samples = make_index(tmp_path, [3, 0, 4, 5])
    tables = list(aside.tables(samples, ["data/\udcff"]))
    assert len(tables) == -(-5 // at_once)
    table = pa.concat_tables(tables)
    assert table.schema == SET_ASIDE_SCHEMA
    assert {*table["source"].to_pylist()} == {"data/\\udcff"}
    columns = (table[name].to_pylist() for name in ("key", "reason", "detail"))
    assert [*zip(*columns, strict=True)] == [
        ("k1", "not_in_layout", "no image"),
        ("k2", "over_budget", "few"),
        ("k5", "duplicate_key", "again"),
        ("k7", "overlong", "9 tokens"),
        ("k9", "duplicate_key", "again"),
    ]


@settings(deadline=None, max_examples=50)
@given(
    records=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from("abcd"), st.integers(0, 3)), max_size=20
    ),
    splits=st.booleans(),
)
def test_all_but_the_first(records: list[tuple[int, str, int]], splits: bool) -> None:
    """Of records (source, key, number of parts; 0: whole), one after the other, in which parts of
    copies have the same places."""
    rows: list[dict[str, object]] = []
    numbers: list[int] = []
    for number, (source, key, num_parts) in enumerate(records):
        # A poor hash: 'a' and 'c' collide, and so do the two sources.
        own = {"source_id": source, "key_hash": ord(key) % 2, "sample_hash": ord(key)}
        for i in range(num_parts if splits else 0):
            part = {"key": key, "begin": i, "first": i, "end": i + 1}
            rows.append({**own, "key": f"{key}[{i}:{i + 1}]", "part": part})
        if not splits or not num_parts:
            rows.append({**own, "key": key})
        numbers += [number] * (len(rows) - len(numbers))
    split = {"samples": 1, "conversations": 1} if splits else {}
    with tempfile.TemporaryDirectory() as folder:
        samples = write_index(Path(folder), [rows], split=split)
        assert record_numbers(samples).tolist() == numbers
        names = [record[:2] for record in records]
        later = [i for i, name in enumerate(names) if name in names[:i]]
        expected = [i for i, number in enumerate(numbers) if number in later]
        assert find_duplicates(samples).tolist() == expected


COLUMNS = ("key", "num_tokens", "json", "media")


@settings(deadline=None, max_examples=40)
@given(
    part_rows=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    samples_in_memory=st.integers(1, 40),
    data=st.data(),
)
def test_rows_in_order(part_rows: list[int], samples_in_memory: int, data: st.DataObject) -> None:
    total = sum(part_rows)
    ids = np.array(data.draw(st.permutations(range(total))), dtype=np.int64)
    ids = ids[: data.draw(st.integers(0, total))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    shards = np.split(ids, cuts)
    with tempfile.TemporaryDirectory() as name:
        samples = make_index(Path(name), part_rows)
        tables = list(
            samples_of_shards(
                samples, COLUMNS, shards, Path(name), samples_in_memory=samples_in_memory
            )
        )
        assert all("tmp" not in path.name for path in Path(name).iterdir())
    assert len(tables) == len(shards)
    for table, shard in zip(tables, shards, strict=True):
        rows = [{name: row_of(i)[name] for name in COLUMNS} for i in shard.tolist()]
        assert table.to_pylist() == rows


def test_parts_without_the_rows_are_not_read(tmp_path: Path) -> None:
    samples = make_index(tmp_path, [4, 4, 4])
    (tmp_path / index.part_name(1)).unlink()
    assert name_samples(samples, np.array([9, 2]))["key"].to_pylist() == ["k9", "k2"]
    assert len(name_samples(samples, np.array([], dtype=np.int64))) == 0
    with pytest.raises(StageError, match=r"part-00001\.parquet"):
        name_samples(samples, np.array([5]))

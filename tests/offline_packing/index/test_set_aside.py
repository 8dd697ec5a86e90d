"""Every row set aside once, with its first reason, in any number of tables."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from offline_packing.index import set_aside
from offline_packing.index.set_aside import AsideRows
from offline_packing.index.table import SET_ASIDE_SCHEMA
from tests.helpers.index_tables import make_index


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def merged() -> AsideRows:
    left_out = AsideRows(
        rows(2, 7), np.array([1, 0], np.int32), (("overlong", "9 tokens"), ("poor_pack", "few"))
    )
    return AsideRows.merge(
        [
            AsideRows.of(rows(5, 9), "duplicate_key", "again"),
            AsideRows.of(rows(1, 5), "not_in_layout", "no image"),
            AsideRows.of(rows(), "not_in_layout", "no turn"),
            left_out,
        ]
    )


def test_the_first_reason_counts() -> None:
    aside = merged()
    assert aside.rows.tolist() == [1, 2, 5, 7, 9]
    assert [aside.texts[code] for code in aside.codes] == [
        ("not_in_layout", "no image"),
        ("poor_pack", "few"),
        ("duplicate_key", "again"),
        ("overlong", "9 tokens"),
        ("duplicate_key", "again"),
    ]
    assert aside.reasons == {
        "duplicate_key": 2,
        "not_in_layout": 1,
        "overlong": 1,
        "poor_pack": 1,
    }
    assert aside.first("duplicate_key") == (5, "again")
    assert aside.first("over_budget") is None


def test_nothing() -> None:
    aside = AsideRows.merge([])
    assert (len(aside.rows), aside.reasons, aside.first("overlong")) == (0, {}, None)


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(set_aside, "_ROWS_AT_ONCE", at_once)
    samples = make_index(tmp_path, [3, 0, 4, 5])
    tables = list(merged().tables(samples, ["data/\udcff"]))
    assert len(tables) == -(-5 // at_once)
    table = pa.concat_tables(tables)
    assert table.schema == SET_ASIDE_SCHEMA
    assert table["key"].to_pylist() == ["k1", "k2", "k5", "k7", "k9"]
    assert table["reason"].to_pylist()[3:] == ["overlong", "duplicate_key"]
    assert table["detail"].to_pylist()[:2] == ["no image", "few"]
    assert set(table["source"].to_pylist()) == {"data/\\udcff"}

"""Rows come in the order that is asked for, whatever fits in memory and wherever parts end."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.errors import StageError
from offline_packing.index import table as index
from offline_packing.index.rows import name_samples, samples_of_shards
from tests.helpers.index_tables import make_index, row_of

COLUMNS = ("key", "num_tokens", "json", "media")


@settings(deadline=None, max_examples=60)
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

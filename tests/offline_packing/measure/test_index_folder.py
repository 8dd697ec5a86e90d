"""The folder of the index as others read it, and as earlier versions wrote it."""

from pathlib import Path

import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from offline_packing.errors import StageError
from offline_packing.measure.measure import measure
from tests.helpers.datasets import captioning_pairs, make_run


def test_index_is_a_folder_of_parquet_files(tmp_path: Path) -> None:
    run = make_run(captioning_pairs(tmp_path / "data", 20), tmp_path / "out")
    measure(run)
    assert len(pq.read_table(run.workspace.index)) == 20
    assert pyarrow.dataset.dataset(run.workspace.index).count_rows() == 20


def test_index_that_an_earlier_version_began(tmp_path: Path) -> None:
    """It says what its parts were made with under another name."""
    root = captioning_pairs(tmp_path / "data", 20)
    run = make_run(root, tmp_path / "out")
    measure(run)
    run.workspace.index_info.unlink()
    old = run.workspace.index_started.rename(run.workspace.index / "started.json")
    changed = make_run(root, tmp_path / "out", model={"max_pixels": 28 * 28 * 32})
    with pytest.raises(StageError, match=r"unfinished index .* model\.max_pixels was 50176"):
        measure(changed)
    measure(run)
    assert old.exists()

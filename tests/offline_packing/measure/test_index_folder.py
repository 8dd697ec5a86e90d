"""The folder of the index as others read it, and as earlier versions wrote it."""

from pathlib import Path

import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from offline_packing.errors import StageError
from offline_packing.measure.measure import measure
from tests.helpers.datasets import captioning_pairs, make_stage


def test_index_is_a_folder_of_parquet_files(tmp_path: Path) -> None:
    stage = make_stage(captioning_pairs(tmp_path / "data", 20), tmp_path / "out")
    measure(stage)
    assert len(pq.read_table(stage.workspace.index)) == 20
    assert pyarrow.dataset.dataset(stage.workspace.index).count_rows() == 20


def test_index_that_an_earlier_version_began(tmp_path: Path) -> None:
    """It says what its parts were made with under another name."""
    root = captioning_pairs(tmp_path / "data", 20)
    stage = make_stage(root, tmp_path / "out")
    measure(stage)
    stage.workspace.index_info.unlink()
    old = stage.workspace.index_started.rename(stage.workspace.index / "started.json")
    changed = make_stage(root, tmp_path / "out", model={"max_pixels": 28 * 28 * 32})
    with pytest.raises(StageError, match=r"unfinished index .* model\.max_pixels was 50176"):
        measure(changed)
    measure(stage)
    assert old.exists()

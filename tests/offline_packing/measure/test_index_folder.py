"""The folder of the index as others read it."""

from pathlib import Path

import pyarrow.dataset
import pyarrow.parquet as pq

from offline_packing.measure.measure import measure
from tests.helpers.datasets import captioning_pairs, make_run


def test_index_is_a_folder_of_parquet_files(tmp_path: Path) -> None:
    run = make_run(captioning_pairs(tmp_path / "data", 20), tmp_path / "out")
    measure(run)
    assert len(pq.read_table(run.workspace.index)) == 20
    assert pyarrow.dataset.dataset(run.workspace.index).count_rows() == 20

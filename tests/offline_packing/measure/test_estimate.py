"""What a dry run says of the number of records."""

from pathlib import Path

import pytest

from offline_packing.measure import estimate
from tests.helpers import accounting, formats


@pytest.mark.parametrize("name", ["jsonl", "jsonl_gz", "json_array", "webdataset", "webdataset_gz"])
def test_a_dry_run_estimates_from_the_beginning_of_files(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = formats.draw_samples(60)
    source = accounting.open_one(formats.WRITERS[name](tmp_path, samples), tmp_path)
    assert estimate.estimate_records(source, source.unread_parts()) == (60, True)
    monkeypatch.setattr(estimate, "_SAMPLED_RECORDS", 10)
    monkeypatch.setattr(estimate, "_SAMPLED_PARTS", 1)
    count, is_exact = estimate.estimate_records(source, source.unread_parts())
    assert not is_exact
    # Files this small are read in one block, so that only the order of magnitude can be right.
    assert 10 <= count <= 120

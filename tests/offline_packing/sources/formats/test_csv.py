"""CSV and TSV: the rows that Python's reader finds, however the file is cut into parts."""

import csv
import gzip
import io
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offline_packing.errors import StageError
from offline_packing.sources import open_source
from offline_packing.sources.base import SourceRecord
from offline_packing.sources.formats import jsonl
from task_encoders.samples import SampleError

cells = st.text(st.sampled_from('ab", \n\té;'), max_size=9)


def read(path: Path, samples_per_part: int = 2, **options: Any) -> list[SourceRecord]:
    """Records of the file, each read once more by its locator."""
    form = path.name.split(".")[1]
    unpacked = Path(tempfile.mkdtemp(dir=path.parent))
    source = open_source(
        {"format": form, "path": str(path), "task": "bmr", **options}, unpack_folder=unpacked
    )
    parts = source.scan(samples_per_part).parts
    found = [record for part in parts for record in source.records(part)]
    for record in found:
        if not isinstance(record.content, SampleError):
            assert source.read(record.locator) == record.content
    return found


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(st.tuples(cells, cells), max_size=7),
    samples_per_part=st.integers(1, 4),
    block=st.integers(1, 30),
    end=st.sampled_from(["\n", "\r\n"]),
    start=st.sampled_from(["", "\ufeff"]),
)
def test_rows(
    tmp_path: Path,
    rows: list[tuple[str, str]],
    samples_per_part: int,
    block: int,
    end: str,
    start: str,
) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerows([("question", "answer"), *rows])
    data = (start + text.getvalue()).encode()
    (tmp_path / "a.csv").write_bytes(data)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(data))
    expected = [
        {name: cell for name, cell in zip(("question", "answer"), row, strict=True) if cell}
        for row in rows
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_BUFFER", block)
        for name in ("a.csv", "a.csv.gz"):
            found = read(tmp_path / name, samples_per_part)
            assert [record.content for record in found] == expected
            assert [record.key for record in found] == [f"a:{i + 2}" for i in range(len(rows))]


def test_quotes_in_tsv_are_characters_and_lists_are_json(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('id\timages\tq\tanswer\n7\t["a.jpg", "b.jpg"]\ta 5" nail\t[sic]\n8\tx\n')
    first, second = read(path, fields={"question": "q"})
    assert first.key == "7"
    assert first.content == {
        "id": "7", "images": ["a.jpg", "b.jpg"], "question": 'a 5" nail', "answer": "[sic]"
    }  # fmt: skip
    assert isinstance(second.content, SampleError)
    assert second.content.detail == "2 cells, the heading has 4"


def test_a_heading_that_names_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a dog,dog.jpg\na cat,cat.jpg\n")
    with pytest.raises(StageError, match=r"a\.csv: it has the columns a dog, dog\.jpg; its"):
        read(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    with pytest.raises(StageError, match=r"a\.csv: it has 2 columns named 'text'"):
        read(tmp_path / "a.csv")

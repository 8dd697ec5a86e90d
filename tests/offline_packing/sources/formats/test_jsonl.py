"""Files of many records: lines, arrays, CSV and TSV."""

import csv
import gzip
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offline_packing.sources import open_source
from offline_packing.sources.base import SourceRecord
from offline_packing.sources.formats import jsonl
from task_encoders.samples import SampleError

OFTEN = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
texts = st.text(st.sampled_from('ab\\"[]{},: \n/é'), max_size=12)
values = st.recursive(
    texts | st.integers(0, 9) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def read(path: Path, samples_per_part: int = 2, **options: Any) -> list[SourceRecord]:
    """Records of the file, or of a folder of JSON files, each read once more by its locator."""
    form = "json" if path.is_dir() else path.name.split(".")[1]
    unpacked = Path(tempfile.mkdtemp(dir=path if path.is_dir() else path.parent, prefix="."))
    given = {"format": form, "path": str(path), "task": "bmr", **options}
    source, found = open_source(given, unpack_folder=unpacked), list[SourceRecord]()
    for part in source.scan(samples_per_part).parts:
        records = list(source.records(part))
        if form == "json" and part.num_records is not None:  # the damage of a file counts as well
            count = len({one.key.partition(".")[0] for one in records})  # lists count once
            assert count <= part.num_records <= samples_per_part + 1
        found += records
    for record in found:
        if not isinstance(record.content, SampleError):
            assert source.read(record.locator) == record.content
    return found


@OFTEN
@given(
    content=st.lists(st.dictionaries(texts, values, max_size=4), max_size=8),
    indent=st.none() | st.integers(0, 2),
    samples_per_part=st.integers(1, 4),
    block=st.integers(1, 40),
    around=st.sampled_from(["", " ", "\n\n"]),
)
def test_elements(
    tmp_path: Path,
    content: list[dict[str, Any]],
    indent: int | None,
    samples_per_part: int,
    block: int,
    around: str,
) -> None:
    path = tmp_path / "a.json"
    path.write_text(around + json.dumps(content, indent=indent) + around, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_BUFFER", block)
        found = read(path, samples_per_part)
    assert [record.content for record in found] == content


def read_lists(path: Path, data: bytes) -> dict[str, Any]:
    """The records of a file by key; None in place of an error."""
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    contents = {one.key: one.content for one in read(path)}
    return {k: None if isinstance(one, SampleError) else one for k, one in contents.items()}


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.jsonl"])
def test_lists_of_records_are_read_flat(tmp_path: Path, name: str) -> None:
    """As Qwen's packed files have them."""
    lists: list[Any] = [[{"a": 1}, {"b": [2, "]"]}], {"c": 3}, [{"d": {}}, 5], [6], [{"e": 1}]]
    text = "\n".join(map(json.dumps, lists)) if name == "a.jsonl" else json.dumps(lists)
    keys = "a:1.1 a:1.2 a:2 a:3.1 a:3.2 a:4 a:5.1".split()
    inner = [{"a": 1}, {"b": [2, "]"]}, {"c": 3}, {"d": {}}, None, None, {"e": 1}]
    found = read_lists(tmp_path / name, f"\ufeff{text}".encode())
    assert found == dict(zip(keys, inner, strict=True))
    broken = read_lists(tmp_path / "b.jsonl", b'[{"a": 1}] 2\n[{"a": 1}\n')
    assert broken == {"b:1": None, "b:2": None}


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
@pytest.mark.parametrize(
    ("indent", "samples_per_part", "block"), [(None, 1, 9), (2, 2, 1 << 16), (None, 100, 9)]
)
@pytest.mark.parametrize("after", [{}, {"type": "x]}{", "more": [1, {"a": []}], "end": {"b": "}"}}])
def test_objects_with_one_list_of_objects(
    tmp_path: Path, name: str, indent: int | None, samples_per_part: int, block: int, after: Any
) -> None:
    """As DocVQA and VQAv2 have them, with other fields before and after."""
    content = [{"a": i, "b": ']}, {\\"[', "c": [{"d": i}]} for i in range(5)]
    before = {"info": {"year": [2017]}, "names": ["x]{"], "description": "[{", "license": []}
    text = json.dumps({**before, "questions": content, **after}, indent=indent).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_BUFFER", max(block, len(text) // 2))
        found = read(path, samples_per_part)
    assert [record.content for record in found] == content
    assert [record.key for record in found] == [f"a:{i + 1}" for i in range(5)]


@pytest.mark.parametrize(
    ("text", "outcomes"),
    [
        ('[{"a": 1}, {"a": 2}', ["ok", "ok", "damaged_source"]),  # no closing bracket
        ('[{"a": 1}, {"a": 2},', ["ok", "ok", "damaged_source"]),
        ('[{"a": 1}, {"a": 2}, \n', ["ok", "ok", "damaged_source"]),
        ('[{"a": 1},', ["ok", "damaged_source"]),
        ('[{"a": 1}, {"a": 2', ["ok", "damaged_source"]),
        ("[", ["damaged_source"]),
        ('[{"a": 1},, 7, {"a": 2},]', ["ok", "bad_record", "ok"]),
        ('[{"a": "never closed}, {"a": 2}]', ["damaged_source"]),
        ('[{"a": 1}] {"a": 2}', ["ok", "damaged_source"]),
        ("[]", []),
        ("", ["damaged_source"]),
        ("nothing", ["damaged_source"]),
        # objects that hold one list of records, or something else
        ('{"data": [{"a": 1}, {"a": 2}', ["ok", "ok", "damaged_source"]),
        ('{"data": [{"a": 1}]', ["ok", "damaged_source"]),
        ('{"data": [{"a": 1}]} {}', ["ok", "damaged_source"]),
        ('{"data": [{"a": 1}], "other": [{"b": 2}]}', ["ok", "damaged_source"]),
        ('{"images": [{"a": 1}]}', ["damaged_source"]),  # one record, of format pairs
        ('{"id": 1, "caption": "A.", "data": [{"a": 1}]}', ["damaged_source"]),
        ('{"data": {"a": [{"b": 1}]}}', ["damaged_source"]),
        ('{"data": []}', ["damaged_source"]),
    ],
)
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_damaged_arrays(tmp_path: Path, name: str, text: str, outcomes: list[str]) -> None:
    (tmp_path / "whole.json").write_text("[]")  # without it, the source is refused
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if "gz" in name else text.encode())
    contents = [record.content for record in read(tmp_path)]
    reasons = [c.reason if isinstance(c, SampleError) else "ok" for c in contents]
    assert reasons == outcomes


@pytest.mark.parametrize("block", [1, 1 << 16])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz"])
def test_blank_records_are_counted_but_not_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block: int
) -> None:
    """Nor do they make parts."""
    monkeypatch.setattr(jsonl, "_BUFFER", block)
    monkeypatch.setattr(jsonl, "_BLOCK", block)
    _, form, *packed = name.split(".")
    blank = (" ,\n" if form == "json" else " \t\r\n") * 300
    text = (f"[{{}}{blank}{{}}]" if form == "json" else f"{{}}{blank}{{}}").encode() + b" \n" * 999
    (tmp_path / name).write_bytes(gzip.compress(text) if packed else text)
    source = open_source({"format": form, "path": str(tmp_path / name), "task": "bmr"})
    parts = source.scan(1).parts
    found = [[record.key for record in source.records(part)] for part in parts]
    assert found == ([["a:1", "a:301"]] if packed else [["a:1"], ["a:301"]])
    if packed and block > 1:
        assert isinstance(source, jsonl.JsonlSource)
        assert len(list(source._split(*parts[0].items[:3]))) < 5


def test_element_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_JSON_BYTES", 100)
    monkeypatch.setattr(jsonl, "_BUFFER", 64)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"a": "x" * 20}, {"a": "x" * 500}, {"a": 3}]))
    found = read(path)
    assert [isinstance(record.content, SampleError) for record in found] == [False, True, False]
    assert [record.key for record in found] == ["a:1", "a:2", "a:3"]


cells = st.text(st.sampled_from('ab", \n\té;'), max_size=9)


@OFTEN
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

"""Elements of a JSON array: those that the parser finds, however the file is cut."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offline_packing.sources import open_source
from offline_packing.sources.formats import jsonl
from task_encoders.samples import SampleError

texts = st.text(st.sampled_from('ab\\"[]{},: \n/é'), max_size=12)
values = st.recursive(
    texts | st.integers(0, 9) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def read(path: Path, samples_per_part: int = 2) -> list[Any]:
    """Records of the file, each read once more by its locator."""
    unpacked = (path if path.is_dir() else path.parent) / ".unpacked"
    options = {"format": "json", "path": str(path), "task": "bmr"}
    source = open_source(options, unpack_folder=unpacked)
    found = []
    for part in source.scan(samples_per_part).parts:
        records = list(source.records(part))
        if part.num_records is not None:  # the damage of a file counts, too
            assert len(records) <= part.num_records <= samples_per_part + 1
        found += records
    for record in found:
        if not isinstance(record.content, SampleError):
            assert source.read(record.locator) == record.content
    return found


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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
    ],
)
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_damaged_arrays(tmp_path: Path, name: str, text: str, outcomes: list[str]) -> None:
    (tmp_path / "whole.json").write_text("[]")  # without it, the source is refused
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if "gz" in name else text.encode())
    contents = [record.content for record in read(tmp_path)]
    reasons = [c.reason if isinstance(c, SampleError) else "ok" for c in contents]
    assert reasons == outcomes


@pytest.mark.parametrize("block", [1, 7, 1 << 16])
@pytest.mark.parametrize(("name", "text"), [("a.jsonl.gz", "{}%s{}"), ("a.json.gz", "[{}%s{}]")])
def test_blank_records_are_counted_but_not_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, block: int
) -> None:
    monkeypatch.setattr(jsonl, "_BUFFER", block)
    between = (" ,\n" if "[" in text else " \t\r\n") * 2000
    (tmp_path / name).write_bytes(gzip.compress((text % between).encode()))
    form = name.split(".")[1]
    source = open_source({"format": form, "path": str(tmp_path / name), "task": "bmr"})
    (part,) = source.scan(10).parts
    records = list(source.records(part))
    assert [record.key for record in records] == ["a:1", "a:2001"]
    assert [record.content for record in records] == [{}, {}]
    if block > 7:
        assert isinstance(source, jsonl.JsonlSource)
        assert len(list(source._split(*part.items[:3]))) < 5


def test_element_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_JSON_BYTES", 100)
    monkeypatch.setattr(jsonl, "_BUFFER", 64)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"a": "x" * 20}, {"a": "x" * 500}, {"a": 3}]))
    found = read(path)
    assert [isinstance(record.content, SampleError) for record in found] == [False, True, False]
    assert [record.key for record in found] == ["a:1", "a:2", "a:3"]


@pytest.mark.parametrize("block", [5, 1 << 21])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", "{}\n" + " \r\n" * 2000 + "{}" + " \r\n" * 1000),
        ("a.json", "[{}" + ", " * 2001 + "{}]" + " \n" * 1000),
    ],
)
def test_blank_records_make_no_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, block: int
) -> None:
    monkeypatch.setattr(jsonl, "_BLOCK", block)
    (tmp_path / name).write_text(text)
    form = name.split(".")[1]
    source = open_source({"format": form, "path": str(tmp_path / name), "task": "bmr"})
    parts = source.scan(1).parts
    found = [[record.key for record in source.records(part)] for part in parts]
    assert found == [["a:1"], ["a:2002"]]

"""Tables of measured files: new ones are found by name, whatever the name; others by time."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.errors import StageError
from offline_packing.measured_files import (
    added_files,
    find_growth,
    list_files,
    read_files,
    save_files,
)
from offline_packing.sources import PairsSource, Source
from offline_packing.sources.jsonl import JsonlSource

Entry = tuple[str, int, int]


class Listed(PairsSource):
    """A source whose files are said, not read."""

    def __init__(self, root: Path, entries: list[Entry]) -> None:
        super().__init__(str(root), "captioning")
        self._entries = entries

    def entries(self) -> Iterator[Entry]:
        return iter(self._entries)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


def names(array: "object") -> list[str]:
    return [os.fsdecode(name) for name in array.to_pylist()]  # type: ignore[attr-defined]


@settings(max_examples=100, deadline=None)
@given(
    generations=st.lists(
        st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2), max_size=6), max_size=3
    ),
    now=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2), max_size=6),
)
def test_growth_is_the_difference(
    root: Path, generations: list[dict[str, int]], now: dict[str, int]
) -> None:
    """Against dictionaries; the last generation that holds a file says how it was."""
    known: dict[str, int] = {}
    for i, files in enumerate(generations):
        source = Listed(root, [(name, size, size) for name, size in files.items()])
        save_files(root / f"{i}.parquet", list_files(source), source.scan(10))
        known |= files
    if not generations:
        return
    source = Listed(root, [(name, size, size) for name, size in now.items()])
    table = read_files(root / f"{i}.parquet" for i in range(len(generations)))
    gone = sorted(known.keys() - now.keys())
    changed = sorted(name for name in known.keys() & now.keys() if known[name] != now[name])
    if gone or changed:
        message = "gone" if gone else "not as it was measured"
        with pytest.raises(StageError, match=rf"/{(gone or changed)[0]}\b.*{message}"):
            find_growth(source, list_files(source), table)
        return
    growth = find_growth(source, list_files(source), table)
    assert names(growth.new) == sorted(now.keys() - known.keys())
    assert growth.grown == {}


def test_names_that_are_not_utf8(root: Path) -> None:
    name = os.fsdecode(b"\xff.json")
    source = Listed(root, [("a.json", 1, 1)])
    save_files(root / "old.parquet", list_files(source), source.scan(10))
    source = Listed(root, [(name, 2, 2), ("a.json", 1, 1)])
    growth = find_growth(source, list_files(source), read_files([root / "old.parquet"]))
    assert growth.new_names() == {name}
    assert names(added_files(list_files(source), growth)["container"]) == [name]


def test_times_count_unless_accepted(root: Path) -> None:
    source: Source = Listed(root, [("a", 1, 1), ("b", 1, 1)])
    save_files(root / "old.parquet", list_files(source), source.scan(10))
    known = read_files([root / "old.parquet"])
    source = Listed(root, [("a", 1, 2), ("b", 1, 2)])
    with pytest.raises(StageError, match=r"/a and 1 more: .*--accept-mismatch modifi"):
        find_growth(source, list_files(source), known)
    growth = find_growth(source, list_files(source), known, accept={"modification_time"})
    assert not len(growth.new)
    source = Listed(root, [("a", 1, 2), ("b", 2, 2)])
    with pytest.raises(StageError, match=r"/b: not as it was measured"):
        find_growth(source, list_files(source), known, accept={"modification_time"})


def test_stretches_of_a_file_that_grew_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1\n2\n")
    source = JsonlSource(str(path), "bmr")
    tables = []
    for number, more in enumerate((b"3\n", b"4\n5\n")):
        files = list_files(source)
        if tables:
            growth = find_growth(source, files, read_files(tables))
            scan, files = source.scan_new(10, growth), added_files(files, growth)
        else:
            scan = source.scan(10)
        tables.append(tmp_path / f"{number}.parquet")
        save_files(tables[-1], files, scan)
        with open(path, "ab") as file:
            file.write(more)
    growth = find_growth(source, list_files(source), read_files(tables))
    assert growth.grown == {"a.jsonl": (6, 3)}
    columns = read_files(tables).to_pydict()
    assert (columns["begin"], columns["size"]) == ([0, 4], [4, 6])
    path.write_bytes(b"1\n2\n3 \n4\n5\n")  # the second stretch differs
    with pytest.raises(StageError, match=r"a\.jsonl: not as it was measured"):
        find_growth(source, list_files(source), read_files(tables))

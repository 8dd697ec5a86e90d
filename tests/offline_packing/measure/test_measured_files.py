"""Tables of measured files: new ones are found by name, whatever the name; others by time."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.errors import StageError
from offline_packing.measure import measured_files
from offline_packing.measure.measured_files import (
    describe_changes,
    find_growth,
    list_files,
    save_files,
)
from offline_packing.sources import PairsSource, Scan, Source
from offline_packing.sources.formats.jsonl import JsonlSource
from offline_packing.sources.roots import listing
from offline_packing.sources.roots.local import MediaRoot

Entry = tuple[str, int, int]


class Listed(PairsSource):
    """A source whose files are said, not read."""

    def __init__(self, root: Path, entries: list[Entry]) -> None:
        super().__init__(str(root), "captioning")
        self._entries = entries

    def entries(self) -> Iterator[Entry]:
        return iter(sorted(self._entries, key=lambda entry: listing.order(os.fsencode(entry[0]))))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


#: In the order of listings: files before the folders beside them, stems as wholes.
NAMES = ["z", "a.json", "a.jpg", "a-.json", "b", "a/a", "a/b.json", "a/b/c", "a-/a"]


@settings(max_examples=200, deadline=None)
@given(
    generations=st.lists(
        st.dictionaries(st.sampled_from(NAMES), st.integers(0, 2), max_size=9), max_size=3
    ),
    now=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 2), max_size=9),
    is_appended=st.booleans(),
    chunk=st.integers(1, 4),
)
def test_growth_is_the_difference(
    root: Path,
    generations: list[dict[str, int]],
    now: dict[str, int],
    is_appended: bool,
    chunk: int,
) -> None:
    """Against dictionaries, however the tables are cut; the last generation that holds a file says
    how it was."""
    known: dict[str, int] = {}
    for i, files in enumerate(generations):
        source = Listed(root, [(name, size, size) for name, size in files.items()])
        save_files(root / f"{i}.parquet", list_files(source), Scan((), ""))
        known |= files
    if not generations:
        return
    now = {**known, **{name: now[name] for name in now.keys() - known}} if is_appended else now
    source = Listed(root, [(name, size, size) for name, size in now.items()])
    tables = [root / f"{i}.parquet" for i in range(len(generations))]
    gone = known.keys() - now.keys()
    changed = {name for name in known.keys() & now.keys() if known[name] != now[name]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_files, "_CHUNK", chunk)
        if gone or changed:
            first = re.escape(min(gone or changed))
            more = len(gone or changed) - 1
            count = f" and {more} more" if more else ""
            message = "gone" if gone else "not as it was measured"
            with pytest.raises(StageError, match=rf"/{first}{count}: {message}"):
                find_growth(source, list_files(source), tables)
            return
        growth = find_growth(source, list_files(source), tables)
    new = now.keys() - known.keys()
    ordered = sorted(map(os.fsencode, new), key=listing.order)
    assert list(growth.new_files()) == ordered
    assert (growth.num_added, growth.grown) == (len(new), {})


def test_order_is_that_of_a_listing(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    listed = [os.fsencode(name) for name, *_ in listing.walk(MediaRoot(tmp_path))]
    assert set(map(os.fsdecode, listed)) == set(NAMES)
    assert sorted(listed, key=listing.order) == listed


@settings(max_examples=100, deadline=None)
@given(
    was=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2), max_size=6),
    now=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2), max_size=6),
)
def test_changes_are_counted_by_kind(root: Path, was: dict[str, int], now: dict[str, int]) -> None:
    """Against dictionaries: 2 and 3 differ by their time only."""
    entries = [
        [(name, 1 + kind // 2, 1 + kind) for name, kind in sorted(files.items())]
        for files in (was, now)
    ]
    source = Listed(root, entries[0])
    save_files(root / "was.parquet", list_files(source), source.scan(10))
    both = sorted(was.keys() & now.keys())
    expected = {
        "added": sorted(now.keys() - was.keys()),
        "removed": sorted(was.keys() - now.keys()),
        "of another size": [name for name in both if was[name] // 2 != now[name] // 2],
        "of another modification time": [
            name for name in both if was[name] != now[name] and was[name] // 2 == now[name] // 2
        ],
    }
    shown = describe_changes(root / "was.parquet", list_files(Listed(root, entries[1])))
    assert shown == ", ".join(
        f"{len(found)} {what} ({', '.join(map(repr, found[:3]))}{', …' * (len(found) > 3)})"
        for what, found in expected.items()
        if found
    )


def test_names_that_are_not_utf8(root: Path) -> None:
    name = os.fsdecode(b"\xff.json")
    source = Listed(root, [("a.json", 1, 1)])
    save_files(root / "old.parquet", list_files(source), source.scan(10))
    source = Listed(root, [(name, 2, 2), ("a.json", 1, 1)])
    growth = find_growth(source, list_files(source), [root / "old.parquet"])
    assert growth.new_names() == {name}


def test_times_count_unless_accepted(root: Path) -> None:
    source: Source = Listed(root, [("a", 1, 1), ("b", 1, 1)])
    known = [root / "old.parquet"]
    save_files(known[0], list_files(source), source.scan(10))
    source = Listed(root, [("a", 1, 2), ("b", 1, 2)])
    with pytest.raises(StageError, match=r"/a and 1 more: .*--accept-mismatch modifi"):
        find_growth(source, list_files(source), known)
    growth = find_growth(source, list_files(source), known, accept={"modification_time"})
    assert not growth.num_added
    source = Listed(root, [("a", 1, 2), ("b", 2, 2)])
    with pytest.raises(StageError, match=r"/b: not as it was measured"):
        find_growth(source, list_files(source), known, accept={"modification_time"})


def test_stretches_of_a_file_that_grew_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1\n2\n")
    source = JsonlSource(str(path), "bmr")
    tables: list[Path] = []
    for number, more in enumerate((b"3\n", b"4\n5\n")):
        files, scan = list_files(source), source.scan(10)
        if tables:
            growth = find_growth(source, files, tables)
            scan, files = source.scan_new(10, growth), growth.added
        tables.append(tmp_path / f"{number}.parquet")
        save_files(tables[-1], files, scan)
        with open(path, "ab") as file:
            file.write(more)
    growth = find_growth(source, list_files(source), tables)
    assert growth.grown == {"a.jsonl": (6, 3)}
    columns = pa.concat_tables(map(pq.read_table, tables)).to_pydict()
    assert (columns["begin"], columns["size"]) == ([0, 4], [4, 6])
    path.write_bytes(b"1\n2\n3\n")
    os.utime(path, ns=(0, 0))  # the time alone is no growth
    assert not find_growth(source, list_files(source), tables).num_added
    path.write_bytes(b"1\n2\n3 \n4\n5\n")  # the second stretch differs
    with pytest.raises(StageError, match=r"a\.jsonl: not as it was measured"):
        find_growth(source, list_files(source), tables)

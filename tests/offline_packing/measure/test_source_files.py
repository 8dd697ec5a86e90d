"""Files of sources: what changed since they were measured is counted by kind and named; what a
dry run says of them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.measure.measure import preview_measure
from offline_packing.measure.source_files import describe_changes, save_files
from offline_packing.sources import Scan
from offline_packing.sources.formats.pairs import PairsSource
from offline_packing.sources.roots import listing
from offline_packing.sources.roots.roots import MediaRoot
from tests.helpers import formats
from tests.helpers.datasets import make_run

Entry = tuple[str, int, int]


def order(container: bytes) -> bytes:
    """By this key files are in the order in which they are listed."""
    folder, slash, name = container.rpartition(b"/")
    # Files stand before the folders beside them: the file after two zeros, a folder after 0, 1.
    return (slash + folder).replace(b"/", b"\0\1") + b"\0\0" + listing.to_key(name)


class Listed(PairsSource):
    """A source whose files are said, not read."""

    def __init__(self, root: Path, entries: list[Entry]) -> None:
        super().__init__(self.Options(format="pairs", path=str(root), task="captioning"))
        self._entries = entries

    def entries(self) -> Iterator[Entry]:
        return iter(sorted(self._entries, key=lambda entry: order(os.fsencode(entry[0]))))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


#: In the order of listings: files before the folders beside them, stems as wholes.
NAMES = ["z", "a.json", "a.jpg", "a-.json", "b", "a/a", "a/b.json", "a/b/c", "a-/a"]


def test_order_is_that_of_a_listing(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    listed = [os.fsencode(name) for name, *_ in listing.walk(MediaRoot(tmp_path))]
    assert set(map(os.fsdecode, listed)) == set(NAMES)
    assert sorted(listed, key=order) == listed


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
    save_files(root, [Listed(root, entries[0])], [Scan((), "")])
    both = sorted(was.keys() & now.keys())
    expected = {
        "added": sorted(now.keys() - was.keys()),
        "removed": sorted(was.keys() - now.keys()),
        "of another size": [name for name in both if was[name] // 2 != now[name] // 2],
        "of another modification time": [
            name for name in both if was[name] != now[name] and was[name] // 2 == now[name] // 2
        ],
    }
    shown = describe_changes(root / "source-00000.parquet", Listed(root, entries[1]))
    assert shown == ", ".join(
        f"{len(found)} {what} ({', '.join(map(repr, found[:3]))}{', …' * (len(found) > 3)})"
        for what, found in expected.items()
        if found
    )


def test_names_need_not_be_utf8(root: Path) -> None:
    save_files(root, [Listed(root, [("a.json", 1, 1)])], [Scan((), "")])
    now = Listed(root, [(os.fsdecode(b"\xff.json"), 2, 2), ("a.json", 1, 1)])
    assert describe_changes(root / "source-00000.parquet", now) == "1 added ('\\udcff.json')"


def test_a_dry_run_counts_what_it_need_not_read(tmp_path: Path) -> None:
    samples = formats.draw_samples(6)
    for name, expected in (("jsonl", "1 files of"), ("parquet", "6 records of")):
        source = formats.WRITERS[name](tmp_path / name, samples)
        run = make_run({"task": "bmr", **source}, tmp_path / "out")
        assert preview_measure(run).startswith(f"would measure {expected} {source['path']}")
    assert not (tmp_path / "out").exists()

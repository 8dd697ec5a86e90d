"""Scanning and measuring of parts: every record once, in one order, however they are cut, with few
media in memory at a time; the index as others read it; and what changed in files since."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offline_packing.errors import StageError, as_sample_error
from offline_packing.measure import measure as measuring
from offline_packing.measure.measure import measure, preview_measure
from offline_packing.runs.source_files import describe_changes, save_files
from offline_packing.sources import Embedded, Scan, Source, SourceRecord, open_source
from offline_packing.sources.formats import jsonl as jsonl_module
from offline_packing.sources.formats.pairs import PairsSource
from offline_packing.sources.roots import listing
from offline_packing.sources.roots.listing import container_hash
from offline_packing.sources.roots.roots import MediaRoot
from task_encoders.samples import SampleError
from tests.helpers import formats
from tests.helpers.accounting import measuring_of, open_one
from tests.helpers.datasets import captioning_pairs, make_run

OFTEN = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def jsonl(path: Path, **options: str) -> Source:
    return open_source({"format": "jsonl", "path": str(path), "task": "bmr", **options})


def records(source: Source, samples_per_part: int) -> list[SourceRecord]:
    scan = source.scan(samples_per_part)
    found = [list(source.records(part)) for part in scan.parts]
    for part, rows in zip(scan.parts, found, strict=True):
        assert len(rows) <= part.num_records <= samples_per_part
    return [record for rows in found for record in rows]


@OFTEN
@given(
    lines=st.lists(
        st.sampled_from(['{"id": 1}', "", "  ", "broken", '{"a": "é\\n"}']), max_size=30
    ),
    ends_with_newline=st.booleans(),
    samples_per_part=st.integers(1, 8),
    block=st.integers(1, 64),
)
def test_jsonl_parts_equal_the_lines(
    tmp_path: Path, lines: list[str], ends_with_newline: bool, samples_per_part: int, block: int
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n" * ends_with_newline, "utf-8")
    data = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl_module, "_BLOCK", block)
        if not data.strip():
            with pytest.raises(StageError, match=r"a\.jsonl: it is empty"):
                jsonl(path).scan(samples_per_part)
            return
        found = records(jsonl(path), samples_per_part)
    expected = [(n, line) for n, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    texts = [data[r.locator.offset :][: r.locator.size].rstrip(b"\n") for r in found]
    assert texts == [line for _, line in expected]
    numbers = [n for n, line in expected if line != b'{"id": 1}']
    assert [r.key for r in found if r.key != "1"] == [f"a:{n}" for n in numbers]


def test_an_image_root_that_is_not_there(tmp_path: Path) -> None:
    formats.write_file(path := tmp_path / "a.jsonl", b'{"images": ["x.jpg"]}')
    with pytest.raises(StageError, match=r"image_root .* is not a folder"):
        jsonl(path, image_root=str(tmp_path / "nowhere"))


PAIR_NAMES = st.builds(
    "{}{}.{}".format,
    st.sampled_from(["", "a/", "a/b/", "a-/", "b/"]),
    st.text("ab.-\n\t", min_size=1, max_size=4).filter(lambda t: not t.startswith(".")),
    st.sampled_from(["json", "JSON", "jpg", "mp4", "txt", ""]),
)


def make_pairs(root: Path, names: list[str]) -> Source:
    for name in names:
        formats.write_file(root / name, b"{}")
    return open_source({"format": "pairs", "path": str(root), "task": "captioning"})


def test_pairs_by_stem(tmp_path: Path) -> None:
    names = ["a.json", "a.jpg", "a-1.json", "a-1.PNG", "a.b.json", "a.b.jpg", "sub/a.json"]
    names += ["output_00000001.json", "output_1.json"]  # the first is of text alone
    source = make_pairs(
        tmp_path, [*names, "lonely.jpg", "notes.txt", ".hidden.json", ".git/x.json"]
    )
    found = {record.key: record.paired_media for record in records(source, 2)}
    assert found == {
        "a": ("a.jpg",),
        "a-1": ("a-1.PNG",),
        "a.b": ("a.b.jpg",),
        "sub/a": (),
        "output_00000001": None,
        "output_1": (),
    }
    assert source.scan(2).unpaired_media.tolist() == [container_hash(b"lonely.jpg")]


@OFTEN
@given(
    names=st.sets(PAIR_NAMES, max_size=30),
    chunk=st.integers(1, 5),
    samples_per_part=st.integers(3, 5),
)
def test_pairs_equal_a_simple_pairing(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], chunk: int, samples_per_part: int
) -> None:
    """However names are cut into pieces and parts, each JSON comes once with the media beside."""
    root = tmp_path_factory.mktemp("pairs")
    source = make_pairs(root, sorted(names))
    with pytest.MonkeyPatch.context() as patch:
        whole = source.scan(1000)
        patch.setattr(listing, "_CHUNK", chunk)
        assert source.scan(1000).parts == whole.parts
        found = records(source, samples_per_part)
    stems: dict[str, list[str]] = {}
    for name in sorted(names):
        stem, _, suffix = name.rpartition(".")
        if suffix in ("jpg", "mp4"):
            stems.setdefault(stem, []).append(name.rpartition("/")[2])
    expected = [
        (name, tuple(stems.get(name.rpartition(".")[0], [])))
        for name in sorted(names)
        if name.lower().endswith(".json")
    ]
    assert sorted((r.locator.container, r.paired_media) for r in found) == sorted(expected)
    paired = {name.rpartition(".")[0] for name, _ in expected}
    assert len(whole.unpaired_media) == sum(
        len(images) for stem, images in stems.items() if stem not in paired
    )


def test_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    source = make_pairs(tmp_path / "pairs", ["a.json", "a.jpg"])
    first = source.scan(10).fingerprint
    assert source.scan(1).fingerprint == first
    (tmp_path / "pairs" / "a.jpg").write_text("larger")
    second = source.scan(10).fingerprint
    (tmp_path / "pairs" / "b.json").write_text("{}")
    assert len({first, second, source.scan(10).fingerprint}) == 3
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}')
    before = jsonl(path).scan(10).fingerprint
    path.write_text('{"a": 2}')  # the same size
    assert jsonl(path).scan(10).fingerprint != before


def test_very_many_parts_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(measuring, "MANY_PARTS", 5)
    source = captioning_pairs(tmp_path / "data", 8)
    measure(make_run(source, tmp_path / "few", engine={"samples_per_part": 2}))
    assert "parts" not in caplog.text
    measure(make_run(source, tmp_path / "many", engine={"samples_per_part": 1}))
    assert "8 parts write several files each; raise engine.samples_per_part 1" in caplog.text


@pytest.mark.parametrize(("num_bytes", "most"), [(0, 32), (1 << 20, 16), (20 << 20, 1)])
def test_media_in_records_are_held_within_a_limit(
    tmp_path: Path, num_bytes: int, most: int
) -> None:
    rows = [{"question": "What?", "answer": f"{i}."} for i in range(40)]
    source = open_one(formats.of_lines(tmp_path / "a.jsonl", rows), tmp_path)
    (part,) = source.scan(1000).parts
    found, drawn = list(source.records(part)), 0
    medium = Embedded(found[0].locator, bytes(num_bytes))

    def draw() -> Iterator[SourceRecord]:
        nonlocal drawn
        for record in found:
            drawn += 1
            yield replace(record, embedded={"a.jpg": medium})

    rows = measuring_of(source).rows(enumerate(draw()))
    next(rows)
    assert drawn == most
    assert len(list(rows)) == len(found) - 1


def test_an_error_holds_nothing_of_its_record() -> None:
    def fail(record: bytes) -> None:
        raise SampleError("too_costly", f"{len(record)} bytes")

    with pytest.raises(SampleError) as raised:
        fail(bytes(100))
    assert raised.value.__traceback__ is not None  # whose frames have the record
    kept = as_sample_error(raised.value)
    assert (str(kept), kept.__traceback__) == ("too_costly: 100 bytes", None)


Entry = tuple[str, int, int]


class Listed(PairsSource):
    """A source whose files are said, not read."""

    def __init__(self, root: Path, entries: list[Entry]) -> None:
        super().__init__(self.Options(format="pairs", path=str(root), task="captioning"))
        self._entries = entries

    def entries(self) -> Iterator[Entry]:
        return iter(sorted(self._entries))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


def test_files_are_listed_before_folders_and_by_stem(tmp_path: Path) -> None:
    names = ["a.jpg", "a.json", "a-.json", "b", "z", "a/a", "a/b.json", "a/b/c", "a-/a"]
    for name in names:
        formats.write_file(tmp_path / name, b"")
    assert [name for name, *_ in listing.walk(MediaRoot(tmp_path))] == names


@OFTEN
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
    now = Listed(root, [("a.json", 1, 1), (os.fsdecode(b"\xff.json"), 2, 2)])
    assert describe_changes(root / "source-00000.parquet", now) == "1 added ('\\udcff.json')"


def test_a_dry_run_counts_what_it_need_not_read(tmp_path: Path) -> None:
    samples = formats.draw_samples(6)
    for name, expected in (("jsonl", "1 files of"), ("parquet", "6 records of")):
        source = formats.WRITERS[name](tmp_path / name, samples)
        run = make_run({"task": "bmr", **source}, tmp_path / "out")
        assert preview_measure(run).startswith(f"would measure {expected} {source['path']}")
    assert not (tmp_path / "out").exists()

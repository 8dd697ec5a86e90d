"""Diagnosis looks at the first 4,096 records of a source and at one in a hundred after them."""

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from offline_packing.errors import StageError
from offline_packing.index import measured
from offline_packing.layouts import LAYOUTS
from offline_packing.measure import diagnosis, measure_part
from offline_packing.measure.diagnosis import estimate, shares_of_first
from offline_packing.measure.measure import measure
from offline_packing.runs.run import Run
from offline_packing.sources import SourcePart
from offline_packing.sources.lost_fields import lost_fields
from tests.helpers.datasets import make_run, pack_all, plan_summary
from tests.helpers.formats import lines, write_file

#: Instead of the first 4,096.
NUM_FIRST = 60
NUM_RECORDS = 400
#: Records after the first, of which one in a hundred is looked at.
LATER = range(NUM_FIRST, NUM_RECORDS, diagnosis.ONE_IN)
CONTROL = "<|im_end|>"


@pytest.fixture(autouse=True)
def few_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (diagnosis.NUM_FIRST, diagnosis.ONE_IN) == (4096, 100)
    monkeypatch.setattr(diagnosis, "NUM_FIRST", NUM_FIRST)


def record(number: int, **fields: Any) -> dict[str, Any]:
    return {"question": f"What is {number}?", "answer": f"It is {number}."} | fields


def run_of(folder: Path, records: list[dict[str, Any]], task: str = "bmr", **sections: Any) -> Run:
    write_file(folder / "a.jsonl", lines(records))
    source = {"format": "jsonl", "path": str(folder / "a.jsonl"), "task": task}
    return make_run(source, folder / "out", **sections)


def looked_at(monkeypatch: pytest.MonkeyPatch, run: Run) -> list[str]:
    """Keys of the samples that measuring looks at."""
    keys: list[str] = []

    def note(record: Any, sample: Any, fields: Any) -> Any:
        keys.append(sample.key)
        return lost_fields(record, sample, fields)

    monkeypatch.setattr(diagnosis, "lost_fields", note)
    measure(run)
    return keys


@pytest.mark.parametrize("place", [0, NUM_FIRST - 1, LATER[1]])
def test_what_is_wrong_is_found(place: int, tmp_path: Path) -> None:
    """Of the first each is found, and of the others one in a hundred."""
    records = [record(i) for i in range(NUM_RECORDS)]
    records[place] |= {"note": "More text.", "answer": f"So {CONTROL}"}
    records[LATER[1] + 1] |= {"other": "Text that is not looked at."}
    run = run_of(tmp_path, records, engine={"samples_per_part": 128})
    count = 1 if place < NUM_FIRST else (NUM_RECORDS - NUM_FIRST) // len(LATER)
    note, control = measure(run).info.warnings
    assert note == (
        f"field 'note' holds text that no sample uses (about {count} samples, such as "
        f"a:{place + 1}: 'More text.')"
    )
    assert control.startswith(f"texts hold {CONTROL!r}, trained as text")
    assert f"(about {count} samples, such as a:{place + 1}: " in control
    assert note in plan_summary(run)


def test_counts_are_estimates_that_no_index_exceeds(tmp_path: Path) -> None:
    records = [
        record(i, answer="Yes." if i % 10 else "No.", note="Text.") for i in range(NUM_RECORDS)
    ]
    info = measure(run_of(tmp_path, records)).info
    assert [count for count, _ in info.lost.values()] == [NUM_RECORDS]
    # of the first 54 of 60; after them numbers 60, 160 … are looked at, all of which answer No
    assert info.common["answers"] == (NUM_RECORDS - 54, "'No.'")


@pytest.mark.parametrize("samples_per_part", [64, 150, 5000])
def test_parts_do_not_change_which_are_looked_at(
    samples_per_part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = {"samples_per_part": samples_per_part}
    run = run_of(tmp_path, [record(i) for i in range(NUM_RECORDS)], engine=engine)
    expected = [f"a:{i + 1}" for i in [*range(NUM_FIRST), *LATER]]
    assert looked_at(monkeypatch, run) == expected


def test_skipped_records_have_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record(i) for i in range(NUM_RECORDS)]
    known = [one | {"id": str(i)} for i, one in enumerate(records)]
    pack_all(run_of(tmp_path / "old", known[:NUM_RECORDS:3]))
    source = {"format": "jsonl", "path": str(tmp_path / "a.jsonl"), "task": "bmr"}
    write_file(tmp_path / "a.jsonl", lines(known))
    source |= {"skip": [str(tmp_path / "old" / "out")]}
    keys = looked_at(monkeypatch, make_run(source, tmp_path / "new"))
    assert keys == [str(i) for i in [*range(NUM_FIRST), *LATER] if i % 3]


def test_a_heading_is_not_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "".join(f"What is {i}?\tIt is {i}.\n" for i in range(NUM_RECORDS))
    found = []
    for size in (70, 1000):
        write_file(tmp_path / f"{size}.tsv", f"question\tanswer\n{rows}".encode())
        source = {"format": "tsv", "path": str(tmp_path / f"{size}.tsv"), "task": "bmr"}
        engine = {"samples_per_part": size}
        keys = looked_at(monkeypatch, make_run(source, tmp_path / f"out{size}", engine=engine))
        found.append([key.rpartition(":")[2] for key in keys])
    assert found[0] == found[1] == [str(i + 2) for i in [*range(NUM_FIRST), *LATER]]


def test_files_whose_records_are_not_counted_share_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = gzip.compress(lines([record(i) for i in range(250)]), mtime=0)
    for name in "ab":
        write_file(tmp_path / "data" / f"{name}.jsonl.gz", data)
    source = {"format": "jsonl", "path": str(tmp_path / "data"), "task": "bmr"}
    keys = looked_at(monkeypatch, make_run(source, tmp_path / "out"))
    expected = [*range(1, 31), 31, 131, 231]
    assert keys == [f"{name}:{i}" for name in "ab" for i in expected]


def test_shares_of_the_first() -> None:
    counts = [3000, None, 3000, None, 5]
    shares = shares_of_first([SourcePart(None, count) for count in counts])
    assert shares == [60, 30, -2940, 30, -5940]


def test_sources_are_estimated_apart() -> None:
    """What is wrong in a source of two does not depend on the size of the other."""

    def notes(first: tuple[int, int], later: tuple[int, int], key: str) -> dict[str, Any]:
        lost = [{"": count, "x": lacking} for count, lacking in (first, later)]
        return {"lost": lost, "answers": [{}, {}], "examples": {"x": key}}

    parts = [
        (0, 100, notes((40, 3), (3, 1), "a")),
        (1, 10**6, notes((40, 0), (10**4, 0), "b")),
        (0, 100, notes((0, 0), (1, 0), "c")),
    ]
    assert estimate(parts) == ({"x": (3 + (200 - 40) // 4, "a")}, (0, ""))


def test_nothing_is_diagnosed_in_the_other_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither texts, fields nor traits of records that are not looked at are gone through."""
    calls: Counter[str] = Counter()

    def counting(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counted(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        monkeypatch.setattr(module, name, counted)

    for name in ("lost_fields", "control_text", "clipped_images"):
        counting(diagnosis, name)
    counting(measure_part, "sample_traits")
    counting(measured, "_has_control_elsewhere")
    measure(run_of(tmp_path, [record(i) for i in range(NUM_RECORDS)]))
    looks = NUM_FIRST + len(LATER)
    assert calls == dict.fromkeys(("lost_fields", "control_text", "clipped_images"), looks)


@pytest.mark.parametrize("layout", ["loongforge", "llava_onevision"])
def test_an_index_without_traits_is_not_taken_for_a_layout_that_needs_them(
    layout: str, tmp_path: Path
) -> None:
    records = [record(0), record(1, answer=f"So {CONTROL}")]
    samples = measure(run_of(tmp_path, records, "vqa"))
    assert samples.table("traits")["traits"].null_count == 2
    other = run_of(tmp_path, records, "vqa", output={"layout": layout})
    with pytest.raises(StageError, match=r"index\.traits was not set, is 'measured'; .*overwrite"):
        measure(other)
    with pytest.raises(StageError, match="does not need the traits of samples; run measure again"):
        LAYOUTS[layout].admit(samples)
    output = {"layout": layout, "overwrite": True}
    again = measure(run_of(tmp_path, records, "vqa", output=output))
    assert again.table("traits")["traits"].to_pylist() == [0, measured.Trait.CONTROL_TEXT]


def test_traits_belong_to_the_fingerprint_of_an_unfinished_index(tmp_path: Path) -> None:
    records = [record(0)]
    run = run_of(tmp_path, records)
    measure(run)
    run.workspace.index_info.unlink()
    with pytest.raises(StageError, match=r"the unfinished index .* index\.traits was not set"):
        measure(run_of(tmp_path, records, output={"layout": "loongforge"}))

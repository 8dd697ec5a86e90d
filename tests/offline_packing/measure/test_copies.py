"""source.drop_copies: samples that repeat earlier ones are set aside."""

from pathlib import Path
from typing import Any

import pytest

from offline_packing.index.table import part_name
from offline_packing.measure import answers, copies
from offline_packing.measure.measure import measure, preview_measure
from offline_packing.report.report import report
from offline_packing.runs.run import Run
from offline_packing.runs.set_aside import list_set_aside
from offline_packing.storage.files import read_json
from offline_packing.verify.verify import verify
from tests.helpers.datasets import (
    dialogue,
    image_bytes,
    index_rows,
    make_run,
    pack_all,
    plan_summary,
    twin_pictures,
)
from tests.helpers.faults import KilledError, killing
from tests.helpers.formats import WRITERS, lines, write_file
from tests.helpers.outputs import packs_of, set_aside_in_plan, shard_files
from tests.helpers.repairs import repair

WHY = "an earlier sample has the same texts and media"


def record(key: str, image: str = "0.jpg", text: str = "What?", **more: Any) -> dict[str, Any]:
    return {"id": key, "image": image, "question": text, "answer": "A cat.", **more}


#: With the ids of copies in capitals.
RECORDS = [
    record("a"),
    record("b", "1.jpg"),
    record("A"),
    record("c", text="Who?"),
    record("d", answer="A dog."),
    record("e", system="Be brief."),
    record("COPY", "same.jpg"),
    record("f", "one.bmp"),
    record("g", "other.bmp"),
    record("G", "other.bmp"),
    {**record("h"), "image": ["0.jpg", "1.jpg"]},
    {**record("i"), "image": ["1.jpg", "0.jpg"]},
    *(record(f"{i}", text=f"{i}?") for i in range(20)),
    record("E", system="Be brief."),
    record("LAST"),
]


def run_of(folder: Path, *records: list[dict[str, Any]], name: str = "out", **more: Any) -> Run:
    """A run over one source, or several, whose pictures have the same names."""
    one, other = twin_pictures()
    pictures = {"0.jpg": image_bytes(56, 56), "1.jpg": image_bytes(84, 56), "one.bmp": one}
    pictures |= {"same.jpg": pictures["0.jpg"], "other.bmp": other}
    options = {"drop_copies": True, **more.pop("source", {})}
    several = options.pop("each", [{}] * len(records))
    sources = []
    for number, (own, each) in enumerate(zip(records, several, strict=True)):
        for file, data in pictures.items():
            write_file(folder / f"{number}" / file, data)
        path = folder / f"{number}" / "a.jsonl"
        write_file(path, lines(own))
        named = {"name": f"s{number}"} if len(records) > 1 else {}
        place = {"format": "jsonl", "path": str(path), "task": "bmr"}
        sources.append({**place, **named, **options, **each})
    return make_run(sources, folder / name, **more)


def packed_keys(run: Run) -> list[str]:
    return sorted(key for _, keys in packs_of(run) for key in keys)


def aside(run: Run) -> dict[str, str]:
    return {row["key"]: row["reason"] for row in set_aside_in_plan(run)}


@pytest.fixture(scope="module")
def dropped(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An output whose index has three parts."""
    run = run_of(tmp_path_factory.mktemp("copies"), RECORDS, output={"packs_per_shard": 1})
    pack_all(run)
    return run


def test_the_first_is_kept(dropped: Run) -> None:
    """Equal are turns, system messages and pictures, by all bytes and in order."""
    of_copies = {"A", "COPY", "G", "E", "LAST"}
    assert aside(dropped) == dict.fromkeys(of_copies, "copy")
    assert packed_keys(dropped) == sorted({one["id"] for one in RECORDS} - of_copies)
    assert verify(dropped, deep=True).ok


def test_where_copies_are_said(dropped: Run, tmp_path: Path) -> None:
    """They are no loss that would stop the run, and no warning."""
    rows = [line.split("\t") for line in "".join(list_set_aside(dropped)).splitlines()]
    assert [row[0] for row in rows if row[2:] == ["copy", WHY]] == ["A", "COPY", "G", "E", "LAST"]
    assert "\n  copy                  5\n" in plan_summary(dropped)
    report(dropped)
    document = read_json(dropped.workspace.report / "report.json")
    (group,) = document["set_aside"]
    assert (group["reason"], group["samples"]) == ("copy", 5)
    assert not any("repeat" in line for line in document["warnings"])
    other = run_of(tmp_path, RECORDS)
    assert preview_measure(other).endswith(
        f"1 files of {other.config.source[0].path}, set copies aside\n"
    )


def test_the_same_bytes_after_a_kill_and_on_workers(
    dropped: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while candidates are compared, or while they are marked; or damaged later."""
    expected, folder = shard_files(dropped), dropped.workspace.root.parent
    spread = run_of(
        folder, RECORDS, name="workers", engine={"workers": 2}, output={"packs_per_shard": 1}
    )
    pack_all(spread)
    assert shard_files(spread) == expected

    killed = run_of(folder, RECORDS, name="killed", output={"packs_per_shard": 1})
    for function in ("save_digests", "rewrite_part"):
        with monkeypatch.context() as patch:
            patch.setattr(copies, function, killing(getattr(copies, function), after=1))
            with pytest.raises(KilledError):
                measure(killed)
    assert len(list(killed.workspace.records.glob("copies-*"))) == 2
    with monkeypatch.context() as patch:  # all were compared
        patch.setattr(copies, "save_digests", killing(copies.save_digests, after=0))
        pack_all(killed)
    assert shard_files(killed) == expected
    assert not killed.workspace.records.exists()

    index = killed.workspace.index / part_name(2)
    whole = index.read_bytes()
    index.write_bytes(whole[:100])
    repair(killed)
    assert index.read_bytes() == whole
    (killed.workspace.plan / "set_aside.parquet").unlink()
    repair(killed)
    assert aside(killed) == aside(dropped)
    assert shard_files(killed) == expected


@pytest.mark.parametrize("name", WRITERS)
def test_every_format(name: str, tmp_path: Path) -> None:
    pictures = [image_bytes(56, 56), image_bytes(84, 56)]
    samples = [
        (f"s{i:03d}", dialogue(f"<image>\nWhat {i // 4}?", "A cat."), [pictures[i % 2]])
        for i in range(8)
    ]
    task = "vqa" if name == "csv_rows" else "bmr"
    source = {**WRITERS[name](tmp_path / "data", samples), "task": task, "drop_copies": True}
    run = make_run(source, tmp_path / "out")
    pack_all(run)
    assert len(packed_keys(run)) == 4
    assert set(aside(run).values()) == {"copy"}
    assert len(aside(run)) == 4


@pytest.mark.parametrize(
    ("drops", "expected"),
    [
        ((True, True), {"s0/A", "s1/x", "s1/Y"}),
        ((False, True), {"s1/x", "s1/Y"}),
        ((True, False), {"s0/A"}),
    ],
)
def test_of_several_sources(drops: tuple[bool, bool], expected: set[str], tmp_path: Path) -> None:
    """A copy of a sample of the other source is that of the one that is named first."""
    first = [record("a"), record("A"), record("b", "1.jpg")]
    second = [record("x", "same.jpg"), record("y", text="Y?"), record("Y", text="Y?")]
    each = [{"drop_copies": drop} for drop in drops]
    run = run_of(tmp_path, first, second, source={"each": each})
    pack_all(run)
    assert set(aside(run)) == expected
    warnings = [line for line in plan_summary(run).splitlines() if "stand in source s0" in line]
    assert len(warnings) == (not drops[1])


def test_before_records_are_merged(tmp_path: Path) -> None:
    records = [record("a"), record("b", text="B?"), record("A"), record("B", "same.jpg", "B?")]
    merge = {"merge_same_image": {"max_tokens": 300}}
    run = run_of(tmp_path, records, source=merge)
    manifest = pack_all(run)
    rows = index_rows(run)
    assert [[part["key"] for part in row["parts"] or [row]] for row in rows] == [
        ["a", "b"],
        ["A"],
        ["B"],
    ]
    assert aside(run) == {"A": "copy", "B": "copy"}
    assert manifest.counts.records == {"read": 4, "packed": 2, "set_aside": 2}
    assert verify(run, deep=True).ok


def test_in_no_epoch_and_not_again_as_new_data(tmp_path: Path) -> None:
    """The outputs of source.skip know what they set aside."""
    epochs = {"pack": {"epochs": 2, "seq_length": 256}, "output": {"layout": "references"}}
    run = run_of(tmp_path, RECORDS[:6], **epochs)
    manifest = pack_all(run)
    assert manifest.counts.set_aside == {"copy": 1}
    assert manifest.counts.packed == 10
    skip = {"skip": [str(run.workspace.root)]}
    new = run_of(tmp_path, [*RECORDS[:6], record("z", text="Z?")], name="new", source=skip)
    info = measure(new).info
    assert (info.num_skipped, info.num_samples) == (6, 1)


def test_what_is_said_of_data_in_common(tmp_path: Path) -> None:
    """Counts over all parts of an index; without the option copies are only counted."""
    records = [
        record(f"{i}", "0.jpg" if i % 5 == 0 else f"p{i}.jpg", f"{i}?", answer=f"It is {i}.")
        for i in range(1000)
    ]
    for i in range(3, 1000, 5):
        records[i]["answer"] = "None"
    records[7] = {**records[3], "id": "again"}
    run = run_of(tmp_path, records, source={"drop_copies": False})
    for i in range(1000):
        write_file(tmp_path / "0" / f"p{i}.jpg", image_bytes(56, 56) + f"{i}".encode())
    assert measure(run).info.warnings == [
        "1 of 1,000 samples repeat an earlier one, such as 'again'; see source.drop_copies",
        "200 of 1,000 samples show 1 image or video, such as '0'",
        "201 of 1,000 answers are 'None'",
    ]
    run.workspace.index_info.unlink()
    assert len(measure(run).info.warnings) == 3


def test_frequent_answers_of_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There are more different ones than are counted at a time."""
    monkeypatch.setattr(answers, "_COUNTED", 8)
    monkeypatch.setattr(answers, "_KEPT", 2)
    records = [
        record(f"{i}", answer="None" if i % 3 else f"It is {i}.", text=f"{i}?") for i in range(90)
    ]
    run = run_of(tmp_path, records)
    assert measure(run).info.common["answers"] == (60, "'None'")

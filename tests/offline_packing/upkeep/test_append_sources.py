"""append over sources of every format: only what is new is measured, what changed is refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offline_packing.errors import StageError
from offline_packing.measure import measure_part as measure_part_module
from offline_packing.runs.run import Stage
from offline_packing.upkeep.append import append
from offline_packing.upkeep.retry import retry
from offline_packing.verify.verify import verify
from tests.helpers import formats
from tests.helpers.datasets import image_bytes, index_rows, make_stage, pack_all, write_json
from tests.helpers.formats import Sample, draw_samples, write_file

OLD, NEW = 12, 5
SAMPLES = draw_samples(OLD + NEW)


def grow_pairs(root: Path, new: list[Sample]) -> None:
    formats.pairs(root, new)


def grow_jsonl(root: Path, new: list[Sample]) -> None:
    with open(root / "chat.jsonl", "ab") as file:
        file.write(formats.lines(formats.with_files(root, new)))


def grow_jsonl_gz(root: Path, new: list[Sample]) -> None:
    write_file(root / "a.jsonl", formats.lines(formats.with_files(root, new)))  # sorts in front


def grow_webdataset(root: Path, new: list[Sample]) -> None:
    write_file(root / "b" / "shard-000.tar", formats.tar_bytes(formats.tar_members(new)))


def grow_energon(root: Path, new: list[Sample]) -> None:
    write_file(root / "shard-002.tar", formats.tar_bytes(formats.tar_members(new)))
    split = root / ".nv-meta" / "split.yaml"
    split.write_text(split.read_text().replace("001}", "002}"))


def grow_parquet(root: Path, new: list[Sample]) -> None:
    pq.write_table(formats.table(new), root / "extra.parquet")


def grow_huggingface(root: Path, new: list[Sample]) -> None:
    rows = formats.table(new)
    path = root / "train" / "data-00001-of-00002.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
        writer.write_table(rows)
    files = sorted(path.name for path in (root / "train").glob("*.arrow"))
    write_json(root / "train/state.json", {"_data_files": [{"filename": name} for name in files]})


def grow_packs(root: Path, new: list[Sample]) -> None:
    write_file(root / "pretrain-1.tar", formats.tar_bytes(formats.pack_members(new)))


def grow_raw_packing_data(root: Path, new: list[Sample]) -> None:
    for name, data in formats.pack_members(new):
        write_file(root / "raw_packing_data" / "more" / name, data)


GROWERS: dict[str, Callable[[Path, list[Sample]], None]] = {
    grower.__name__.removeprefix("grow_"): grower
    for grower in (
        *(grow_pairs, grow_jsonl, grow_jsonl_gz, grow_webdataset, grow_energon, grow_parquet),
        *(grow_huggingface, grow_packs, grow_raw_packing_data),
    )
}


def all_files(folder: Path) -> dict[str, bytes]:
    """Every file of an output but the lock."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def untouched(before: dict[str, bytes], after: dict[str, bytes]) -> bool:
    """Whether all files but the manifest and Energon's metadata are as they were."""
    rewritten = ("manifest.json", ".nv-meta/")
    return all(after[n] == data for n, data in before.items() if not n.startswith(rewritten))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of all samples that are measured, in this process, as long as the test runs."""
    keys: list[str] = []
    true_measure = measure_part_module.measure_record

    def counted(record: Any, key: str, *args: Any) -> Any:
        keys.append(key)
        return true_measure(record, key, *args)

    monkeypatch.setattr(measure_part_module, "measure_record", counted)
    return keys


def make_source(name: str, root: Path) -> dict[str, Any]:
    return {**formats.WRITERS[name](root, SAMPLES[:OLD]), "task": "bmr"}


@pytest.mark.parametrize("name", GROWERS)
def test_only_new_samples_are_measured(name: str, tmp_path: Path, measured: list[str]) -> None:
    source = make_source(name, tmp_path / "data")
    stage = make_stage(source, tmp_path / "out")
    assert pack_all(stage)["counts"]["packed"] == OLD
    before = all_files(tmp_path / "out")
    measured.clear()
    append(stage)
    assert all_files(tmp_path / "out") == before, "nothing was new"
    GROWERS[name](tmp_path / "data", SAMPLES[OLD:])
    manifest = append(stage)
    assert len(measured) == NEW
    assert manifest["counts"]["samples"] == manifest["counts"]["packed"] == OLD + NEW
    after = all_files(tmp_path / "out")
    assert untouched(before, after)
    assert len(after) > len(before)
    result = verify(stage, deep=True)
    assert result.ok, result.problems
    append(stage)
    assert len(measured) == NEW
    assert all_files(tmp_path / "out") == after, "nothing was new"


CHANGED: dict[str, tuple[str, str]] = {
    "pairs": ("s0003.png", "s0003.json"),
    "jsonl": ("chat.jsonl", "chat.jsonl"),
    "jsonl_gz": ("chat.jsonl.gz", "chat.jsonl.gz"),
    "json_array": ("llava.json", "llava.json"),
    "llama_factory": ("mllm.json", "mllm.json"),
    "webdataset": ("shard-000.tar", "shard-001.tar"),
    "energon": ("shard-001.tar", "shard-000.tar"),
    "parquet": ("train-00000.parquet", "train-00000.parquet"),
    "huggingface": ("train/data-00000-of-00001.arrow",) * 2,
    "packs": ("pretrain-0.tar", "pretrain-0.tar"),
    "raw_packing_data": ("ps_00000000.json", "ps_00000001.img000.png"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_changed_is_refused_by_name(name: str, tmp_path: Path) -> None:
    source = make_source(name, tmp_path / "data")
    stage = make_stage(source, tmp_path / "out")
    pack_all(stage)
    before = all_files(tmp_path / "out")
    edited, removed = CHANGED[name]
    root = tmp_path / "data" / ("raw_packing_data" if name == "raw_packing_data" else "")
    data = bytearray((root / edited).read_bytes())
    data[-3] ^= 1
    (root / edited).write_bytes(data)
    with pytest.raises(StageError, match=rf"{edited}: not as it was measured .* rsync -t"):
        append(stage)
    if name in ("jsonl", "json_array", "llama_factory"):  # the source is the file itself
        return
    data[-3] ^= 1
    (root / edited).write_bytes(data)
    (root / removed).rename(tmp_path / "removed")
    with pytest.raises(StageError, match=rf"{removed}.* (gone, but packed already|is not there)"):
        append(stage)
    assert all_files(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["pairs", "webdataset"])
def test_a_copy_without_times(name: str, tmp_path: Path) -> None:
    """It looks edited, unless the option says that it is not; sizes are compared all the same."""
    source = make_source(name, tmp_path / "data")
    stage = make_stage(source, tmp_path / "out")
    pack_all(stage)
    for path in (tmp_path / "data").rglob("*"):
        os.utime(path, ns=(1, 1))
    GROWERS[name](tmp_path / "data", SAMPLES[OLD:])
    with pytest.raises(StageError, match=r" and \d+ more: not as it was"):
        append(stage)
    accepting = Stage(stage.config, stage.engine, frozenset({"modification_time"}))
    assert append(accepting)["counts"]["packed"] == OLD + NEW
    victim = min((tmp_path / "data").glob("s*"))
    victim.write_bytes(victim.read_bytes() + b" ")
    with pytest.raises(StageError, match=f"{victim.name}: not as it was measured"):
        append(accepting)


def test_a_touched_jsonl_is_as_it_was(tmp_path: Path, measured: list[str]) -> None:
    """Its content was hashed, so that its time need not be believed."""
    stage = make_stage(make_source("jsonl", tmp_path / "data"), tmp_path / "out")
    pack_all(stage)
    before = all_files(tmp_path / "out")
    os.utime(tmp_path / "data" / "chat.jsonl", ns=(1, 1))
    measured.clear()
    append(stage)
    assert not measured
    assert all_files(tmp_path / "out") == before


def text_line(key: str | None, text: str = "Fine.") -> bytes:
    record = {"id": key} if key else {}
    return formats.lines([{**record, "messages": formats.dialogue("How are you?", text)}])


@pytest.fixture
def lines(tmp_path: Path) -> tuple[Stage, Path]:
    """A packed JSONL file of three records without ids, the last line without its end."""
    path = tmp_path / "chat.jsonl"
    path.write_bytes((text_line(None) * 3)[:-1])
    stage = make_stage({"format": "jsonl", "path": str(path), "task": "bmr"}, tmp_path / "out")
    pack_all(stage)
    return stage, path


def test_lines_go_on_being_counted(lines: tuple[Stage, Path]) -> None:
    stage, path = lines
    for more in (b"\n" + text_line(None), text_line(None) * 2):
        with open(path, "ab") as file:
            file.write(more)
        append(stage)
    found = [
        row["key"]
        for number in range(3)
        for row in index_rows(Stage(stage.config, stage.engine, generation=number))
    ]
    assert found == [f"chat:{n}" for n in range(1, 7)]
    assert verify(stage, deep=True).ok


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data + b"[1]\n",  # the last line is another record now
        lambda data: data.replace(b"Fine.", b"Ill. ", 1) + b"\n" + text_line(None),
        lambda data: data[:-20],
        lambda data: text_line(None, "Well.") + data,
    ],
    ids=["no line end", "edited in front", "cut", "written in front"],
)
def test_lines_that_were_measured_must_stay(
    lines: tuple[Stage, Path], change: Callable[[bytes], bytes]
) -> None:
    stage, path = lines
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StageError, match=r"chat\.jsonl: not as it was measured"):
        append(stage)


def test_keys_that_are_packed_are_duplicates(tmp_path: Path) -> None:
    root = tmp_path / "data"
    write_file(root / "a.jsonl", text_line("one") + text_line("two"))
    config = {"format": "jsonl", "path": str(root), "task": "bmr"}
    stage = make_stage(config, tmp_path / "out")
    pack_all(stage)
    write_file(root / "b.jsonl", text_line("two") + text_line("three") * 2)
    counts = append(stage)["counts"]
    assert (counts["samples"], counts["packed"]) == (5, 3)
    assert counts["set_aside"] == {"duplicate_key": 2}
    write_file(root / "c.jsonl", text_line("three") + b"{}\n")
    counts = append(stage)["counts"]  # it adds no shard, but tells of what was set aside
    assert (counts["samples"], counts["packed"]) == (7, 3)
    assert counts["set_aside"] == {"duplicate_key": 3, "bad_record": 1}
    assert verify(stage, deep=True).ok
    before = all_files(tmp_path / "out")
    append(stage)
    assert all_files(tmp_path / "out") == before


def test_pairs_beside_known_files(tmp_path: Path, measured: list[str]) -> None:
    """A JSON for an image that was there; an image for a JSON that was set aside without one."""
    root = tmp_path / "data"
    stage = make_stage(make_source("pairs", root), tmp_path / "out")
    write_file(root / "waiting.jpg", image_bytes())
    write_json(root / "alone.json", {"messages": SAMPLES[0][1]})
    assert pack_all(stage)["counts"]["set_aside"] == {"missing_image": 1}
    measured.clear()
    write_json(root / "waiting.json", {"messages": SAMPLES[0][1]})
    write_file(root / "alone.jpg", image_bytes())
    counts = append(stage)["counts"]
    assert measured == ["waiting"]
    assert (counts["samples"], counts["packed"]) == (OLD + 2, OLD + 1)
    assert verify(stage, deep=True).ok


def test_a_source_joins_and_another_grows(tmp_path: Path, measured: list[str]) -> None:
    """One configuration, edited: keys of the first source stay without its name."""
    first = make_source("webdataset", tmp_path / "first")
    pack_all(make_stage(first, tmp_path / "out"))
    second = {**formats.parquet(tmp_path / "second", SAMPLES[:4]), "task": "bmr"}
    grow_webdataset(tmp_path / "first", SAMPLES[OLD:])
    measured.clear()
    blend = make_stage([second, first], tmp_path / "out")
    assert append(blend)["counts"]["packed"] == OLD + NEW + 4
    assert measured == [
        *(f"second/{key}" for key, *_ in SAMPLES[:4]),
        *(f"b/shard-000/{key}" for key, *_ in SAMPLES[OLD:]),
    ]
    for stage in (blend, make_stage(first, tmp_path / "out")):  # either configuration will do
        assert verify(stage, deep=True).ok
    tar = formats.tar_bytes(formats.tar_members([(f"{SAMPLES[0][0]}", *SAMPLES[0][1:])]))
    write_file(tmp_path / "first" / "c.tar", tar)
    assert append(blend)["counts"]["packed"] == OLD + NEW + 5
    assert verify(blend, deep=True).ok


@pytest.mark.parametrize(
    ("field", "value"),
    [("repeat", 2), ("name", "other"), ("fields", {"messages": "chat"}), ("image_root", "images")],
)
def test_a_source_must_be_used_as_before(field: str, value: Any, tmp_path: Path) -> None:
    source = make_source("jsonl", tmp_path / "data")
    pack_all(make_stage(source, tmp_path / "out"))
    grow_jsonl(tmp_path / "data", SAMPLES[OLD:])
    if field == "image_root":
        value = str(tmp_path / "data" / value)
    with pytest.raises(StageError, match=rf"source\.0\.{field} was .*, is .*{value}.*append with"):
        append(make_stage({**source, field: value}, tmp_path / "out"))


def test_one_path_as_two_sources(tmp_path: Path) -> None:
    """Told apart by their names: two captions of each row."""

    def write(name: str, words: list[str]) -> None:
        long = [f"A {word}." for word in words]
        table = pa.table({"q": ["What?"] * len(words), "short": words, "long": long})
        pq.write_table(table, tmp_path / "data" / name)

    (tmp_path / "data").mkdir()
    write("a.parquet", ["cat", "dog"])
    path = str(tmp_path / "data")
    sources = [
        {
            "format": "parquet",
            "path": path,
            "task": "vqa",
            "name": name,
            "fields": {"question": "q", "answer": name},
        }
        for name in ("short", "long")
    ]
    stage = make_stage(sources, tmp_path / "out")
    assert pack_all(stage)["counts"]["packed"] == 4
    write("b.parquet", ["owl"])
    assert append(make_stage(sources[::-1], tmp_path / "out"))["counts"]["packed"] == 6
    assert verify(stage, deep=True).ok


def test_weights_must_stay(tmp_path: Path) -> None:
    sources = [
        {**make_source(name, tmp_path / name), "weight": weight}
        for name, weight in (("parquet", 1), ("webdataset", 2))
    ]
    stage = make_stage(sources, tmp_path / "out")
    assert pack_all(stage)["counts"]["packed"] == 3 * OLD
    with pytest.raises(StageError, match=r"source\.1\.weight was 2\.0, is 3\.0"):
        append(make_stage([sources[0], {**sources[1], "weight": 3}], tmp_path / "out"))
    grow_parquet(tmp_path / "parquet", SAMPLES[OLD:])
    grow_webdataset(tmp_path / "webdataset", SAMPLES[OLD:])
    assert append(stage)["counts"]["packed"] == 3 * (OLD + NEW)
    assert verify(stage, deep=True).ok


@pytest.mark.parametrize("path", ["data/b", "."])
def test_sources_that_overlap(path: str, tmp_path: Path) -> None:
    source = make_source("webdataset", tmp_path / "in" / "data")
    pack_all(make_stage(source, tmp_path / "out"))
    grow_webdataset(tmp_path / "in" / "data", SAMPLES[OLD:])
    with pytest.raises(StageError, match=r"shares files with .* which is packed already"):
        append(make_stage({**source, "path": str(tmp_path / "in" / path)}, tmp_path / "out"))


def test_retry_after_the_source_grew(tmp_path: Path) -> None:
    """The hash of a shard, not the time of the JSONL file, says that it is as it was."""
    stage = make_stage(make_source("jsonl", tmp_path / "data"), tmp_path / "out")
    pack_all(stage)
    grow_jsonl(tmp_path / "data", SAMPLES[OLD:])
    append(stage)
    before = all_files(tmp_path / "out")
    (tmp_path / "out" / "train-000000.tar").unlink()
    assert retry(stage) == "wrote 1 damaged shards again: train-000000.tar"
    assert all_files(tmp_path / "out") == before


def test_the_listing_is_needed(tmp_path: Path) -> None:
    stage = make_stage(make_source("pairs", tmp_path / "data"), tmp_path / "out")
    pack_all(stage)
    shutil.rmtree(stage.workspace.files)
    with pytest.raises(StageError, match=r"source-00000\.parquet is missing"):
        append(stage)


def test_a_format_that_cannot_tell(tmp_path: Path) -> None:
    """A source of one's own without scan_new: new files are refused, none are no matter."""
    write_file(tmp_path / "data" / "a.csv", b"a.jpg,What?,That.\n")
    write_file(tmp_path / "data" / "a.jpg", image_bytes())
    path = str(tmp_path / "data" / "a.csv")
    source = {"format": "examples.csv_source:CsvSource", "path": path, "task": "vqa"}
    stage = make_stage(source, tmp_path / "out")
    manifest = pack_all(stage)
    assert append(stage) == json.loads(json.dumps(manifest))
    with open(path, "ab") as file:
        file.write(b"a.jpg,Again?,Yes.\n")
    with pytest.raises(StageError, match=r"a\.csv: not as it was measured"):
        append(stage)

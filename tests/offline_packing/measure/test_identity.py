"""Samples of one id, copies of samples, and samples that other outputs hold."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offline_packing.errors import ConfigError, StageError
from offline_packing.index.table import IndexInfo, key_hash
from offline_packing.measure import diagnosis
from offline_packing.measure.measure import measure, preview_measure
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from tests.helpers.datasets import (
    captioning_pairs,
    dialogue,
    image_bytes,
    make_config,
    make_run,
    outcomes,
    pack_all,
    packed_run,
    write_json,
)
from tests.helpers.formats import lines, of_lines, tar_bytes, write_file


def keys_of(run: Run) -> list[str]:
    table = open_index(run).table("key", "key_hash", "source_id")
    keys: list[str] = table["key"].to_pylist()
    expected = [key_hash(0, key) for key in keys]
    assert table["key_hash"].to_pylist() == expected
    return keys


def record(key: str, image: str = "0.jpg", text: str = "What?", **more: Any) -> dict[str, Any]:
    return {"id": key, "image": image, "question": text, "answer": "A cat.", **more}


def run_of(folder: Path, records: list[dict[str, Any]], size: int = 16) -> Run:
    write_file(folder / "0.jpg", image_bytes(56, 56))
    source = of_lines(folder / "a.jsonl", records)
    return make_run(source, folder / f"out{size}", engine={"samples_per_part": size})


def test_keys_do_not_depend_on_parts(tmp_path: Path) -> None:
    """Three questions on each image, one kind after another as in LLaVA-Instruct-150K."""
    records = [record(f"{i}", text=f"Question {kind}") for kind in range(3) for i in range(4)]
    records.append(records[5])
    measure(run := run_of(tmp_path, records, 5))
    measure(other := run_of(tmp_path, records, 4096))
    assert (keys := keys_of(run)) == keys_of(other)
    assert keys[:4] == [record["id"] for record in records[:4]]
    assert [key.partition("@")[0] for key in keys] == [record["id"] for record in records]
    assert len({*keys}) == len(keys) - 1
    assert keys[12] == keys[5]


def test_rows_of_one_id_with_images_inside(tmp_path: Path) -> None:
    """Equal texts on other pictures are other samples; equal rows are duplicates."""
    images = [image_bytes(56), image_bytes(84), image_bytes(56)]
    said = [dialogue("<image>\nWhat?", "A square.")] * 3
    table = pa.table({"id": [7, 7, 7], "image": images, "messages": said})
    pq.write_table(table, tmp_path / "a.parquet")
    source = {"format": "parquet", "path": str(tmp_path / "a.parquet"), "task": "vqa"}
    run = make_run(source, tmp_path / "out")
    counts = pack_all(run).counts
    assert (counts.packed, counts.set_aside) == (2, {"duplicate_key": 1})


def test_what_is_said_of_data_in_common(tmp_path: Path) -> None:
    """Counts over all parts of an index."""
    records = [
        record(
            f"{i}", f"p{i}.jpg" if i % 2 else "0.jpg", f"{i}?", answer="None" if i % 2 else f"{i}."
        )
        for i in range(200)
    ]
    records[7] = {**records[3], "id": "again"}
    run = run_of(tmp_path, records)
    for i in range(1, 200, 2):
        write_file(tmp_path / f"p{i}.jpg", image_bytes(56, 56) + f"{i}".encode())
    assert measure(run).info.warnings == [
        "1 of 200 samples repeat an earlier one, such as 'again'",
        "100 of 200 samples show the same image or video, such as '0'",
        "about 100 of 200 answers are 'None'",
    ]


def test_frequent_answers_of_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There are more different ones than are counted at a time."""
    monkeypatch.setattr(diagnosis, "_COUNTED", 8)
    monkeypatch.setattr(diagnosis, "_KEPT", 2)
    records = [
        record(f"{i}", answer="None" if i % 3 else f"It is {i}.", text=f"{i}?") for i in range(90)
    ]
    run = run_of(tmp_path, records)
    assert measure(run).info.common["answers"] == (60, "'None'")


PARTS = {"samples_per_part": 8}


def skipping(source: dict[str, Any], tmp_path: Path, *outputs: str, **sections: Any) -> Run:
    """A run over a source that leaves out what these outputs hold."""
    skip = [str(tmp_path / name) for name in outputs]
    return make_run({**source, "skip": skip}, tmp_path / "new", engine=PARTS, **sections)


def pairs(root: Path) -> dict[str, Any]:
    return {"format": "pairs", "path": str(root), "task": "captioning"}


def test_known_samples_are_not_even_read(tmp_path: Path) -> None:
    """Packed or set aside, for another model: their files may be gone or broken by now."""
    root = captioning_pairs(tmp_path / "data", 10)
    (root / "broken.json").write_text("{")
    write_json(root / "long.json", {"caption": "red " * 900})
    (root / "long.jpg").write_bytes(image_bytes())
    pack_all(make_run(root, tmp_path / "old", model={"max_pixels": 28 * 28 * 32}))
    for path in [*root.rglob("*.json")]:
        path.write_text("no JSON any more")
    captioning_pairs(root, 20, first=10)
    new = skipping(pairs(root), tmp_path, "old")
    assert preview_measure(new) == f"would measure 10 new records of {root}, and skip 12\n"
    assert not (tmp_path / "new").exists()
    manifest = pack_all(new)
    assert manifest.counts.samples == manifest.counts.packed == 10
    assert sorted(keys_of(new)) == sorted(f"part{i % 2}/{i:06d}" for i in range(10, 20))
    assert verify(new, deep=True).ok
    info = IndexInfo.load(new.workspace.packing)
    assert info is not None
    assert info.num_skipped == 12
    assert not new.workspace.skip.exists()
    # And so on: a third output of what neither holds.
    captioning_pairs(root, 23, first=20)
    third = make_run(
        {**pairs(root), "skip": [str(tmp_path / "old"), str(tmp_path / "new")]}, tmp_path / "third"
    )
    assert sorted(outcomes(third)) == ["part0/000020", "part0/000022", "part1/000021"]


def line(identity: object, text: str, **image: str) -> dict[str, Any]:
    return {"id": identity, "caption": text, **image}


def test_ids_that_records_share(tmp_path: Path) -> None:
    """The content tells which of them is known; media of known records are not opened."""
    path = tmp_path / "data/a.jsonl"
    write_file(tmp_path / "data/7.jpg", image_bytes())
    old = [
        line(7, "one", image="7.jpg"),
        line(7, "two"),
        line(8, "gone", image="8.jpg"),
        line(9, "nine"),
    ]
    source = of_lines(path, old, "captioning")
    manifest = pack_all(make_run(source, tmp_path / "old"))
    assert manifest.counts.set_aside == {"missing_image": 1}
    (tmp_path / "data/7.jpg").unlink()
    write_file(path, lines([line(7, "three"), line(10, "ten"), *old, line(7, "two")]))
    new = skipping(source, tmp_path, "old")
    assert outcomes(new) == {"7": "ok", "10": "ok"}
    rows = open_index(new).table("key", "num_tokens")
    assert len(rows) == 2


def tar(path: Path, names: Sequence[str]) -> None:
    parts = {"jpg": image_bytes(), "txt": b"a red circle"}.items()
    members = [(f"{name}.{part}", data) for name in names for part, data in parts]
    write_file(path, tar_bytes(members))


def test_samples_of_tars(tmp_path: Path) -> None:
    tar(tmp_path / "data/0.tar", ["a", "b"])
    source = {"format": "webdataset", "path": str(tmp_path / "data"), "task": "captioning"}
    pack_all(make_run(source, tmp_path / "old"))
    tar(tmp_path / "data/0.tar", ["a", "b", "c"])
    tar(tmp_path / "data/1.tar", ["a"])
    assert sorted(outcomes(skipping(source, tmp_path, "old"))) == ["0/c", "1/a"]


def test_prefixes_of_several_sources(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A further source in the configuration changes every key; samples stay what they are."""
    for name in ("a", "b"):
        captioning_pairs(tmp_path / name, 4)
    pack_all(make_run(tmp_path / "a", tmp_path / "old"))
    captioning_pairs(tmp_path / "a", 6, first=4)
    known = {**pairs(tmp_path / "a"), "skip": str(tmp_path / "old")}
    both = make_run([known, pairs(tmp_path / "b")], tmp_path / "both")
    found = set(outcomes(both))
    assert {key for key in found if key.startswith("a/")} == {"a/part0/000004", "a/part1/000005"}
    assert len(found) == 2 + 4
    pack_all(both)
    captioning_pairs(tmp_path / "b", 5, first=4)
    assert set(outcomes(skipping(pairs(tmp_path / "b"), tmp_path, "both"))) == {"part0/000004"}
    assert "other folders" not in caplog.text
    with caplog.at_level(logging.WARNING):
        (tmp_path / "a").rename(tmp_path / "moved")
        moved = make_run(
            {**pairs(tmp_path / "moved"), "skip": str(tmp_path / "old")}, tmp_path / "elsewhere"
        )
        assert set(outcomes(moved)) == {"part0/000004", "part1/000005"}
    assert "was packed from other folders" in caplog.text


def test_sources_of_other_names(tmp_path: Path) -> None:
    """A prefix is not a part of what the source calls a sample; one of several has to be named."""
    for name in ("a", "b"):
        captioning_pairs(tmp_path / name, 4)
    first = {**pairs(tmp_path / "a"), "name": "first"}
    pack_all(make_run(first, tmp_path / "one"))
    pack_all(make_run([first, pairs(tmp_path / "b")], tmp_path / "two"))
    (tmp_path / "a").rename(tmp_path / "moved")
    captioning_pairs(tmp_path / "moved", 5, first=4)
    moved = {**pairs(tmp_path / "moved"), "name": "second"}
    with pytest.raises(StageError, match=r"which it calls b, first, so that none .* source.name"):
        measure(skipping(moved, tmp_path, "two"))
    assert set(outcomes(skipping(moved, tmp_path, "one"))) == {"second/part0/000004"}


def test_what_cannot_be_left_out(tmp_path: Path) -> None:
    root = captioning_pairs(tmp_path / "data", 10)
    with pytest.raises(StageError, match=r"old is not a complete output, it has no manifest\.json"):
        measure(skipping(pairs(root), tmp_path, "old"))
    old = packed_run(root, tmp_path / "old")
    with pytest.raises(ConfigError, match=r"is named by source\.skip or .*; new packs need"):
        make_config({**pairs(root), "skip": str(tmp_path / "old")}, tmp_path / "old")
    new = skipping(pairs(root), tmp_path, "old")
    measure(new)
    with pytest.raises(StageError, match=r"no sample is new, source\.skip holds all 10"):
        pack_all(new)
    captioning_pairs(root, 11, first=10)
    with pytest.raises(StageError, match=r"2 added .*source\.skip=\S+/old and another output"):
        measure(old)

"""source.skip: new data become an output of their own, and nothing is in both."""

import io
import json
import logging
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from offline_packing.errors import ConfigError, StageError
from offline_packing.index.table import IndexInfo
from offline_packing.measure.measure import measure, preview_measure
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from tests.helpers.datasets import (
    captioning_pairs,
    image_bytes,
    make_config,
    make_run,
    outcomes,
    pack_all,
    write_json,
)

PARTS = {"samples_per_part": 8}


def skipping(source: dict[str, Any], tmp_path: Path, *outputs: str, **sections: Any) -> Run:
    """A run over a source that leaves out what these outputs hold."""
    skip = [str(tmp_path / name) for name in outputs]
    return make_run({**source, "skip": skip}, tmp_path / "new", engine=PARTS, **sections)


def pairs(root: Path) -> dict[str, Any]:
    return {"format": "pairs", "path": str(root), "task": "captioning"}


def keys_of(run: Run) -> list[str]:
    return sorted(open_index(run).table("key")["key"].to_pylist())


def test_known_samples_are_not_even_read(tmp_path: Path) -> None:
    """Packed or set aside, for another model: their files may be gone or broken by now."""
    root = captioning_pairs(tmp_path / "data", 30)
    (root / "broken.json").write_text("{")
    write_json(root / "long.json", {"caption": "red " * 900})
    (root / "long.jpg").write_bytes(image_bytes())
    pack_all(make_run(root, tmp_path / "old", model={"max_pixels": 28 * 28 * 32}))
    for path in [*root.rglob("*.json")]:
        path.write_text("no JSON any more")
    captioning_pairs(root, 40, first=30)
    new = skipping(pairs(root), tmp_path, "old")
    assert preview_measure(new) == f"would measure 10 new records of {root}, and skip 32\n"
    assert not (tmp_path / "new").exists()
    manifest = pack_all(new)
    assert manifest.counts.samples == manifest.counts.packed == 10
    assert keys_of(new) == sorted(f"part{i % 2}/{i:06d}" for i in range(30, 40))
    assert verify(new, deep=True).ok
    info = IndexInfo.load(new.workspace.index_info)
    assert info is not None
    assert info.num_skipped == 32
    assert not new.workspace.skip.exists()
    # And so on: a third output of what neither holds.
    captioning_pairs(root, 43, first=40)
    third = make_run(
        {**pairs(root), "skip": [str(tmp_path / "old"), str(tmp_path / "new")]}, tmp_path / "third"
    )
    assert sorted(outcomes(third)) == ["part0/000040", "part0/000042", "part1/000041"]


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def line(identity: object, text: str, image: str | None = None) -> dict[str, Any]:
    return {"id": identity, "caption": text, **({"image": image} if image else {})}


def test_ids_that_records_share(tmp_path: Path) -> None:
    """The content tells which of them is known; media of known records are not opened."""
    path = tmp_path / "data/a.jsonl"
    (tmp_path / "data").mkdir()
    (tmp_path / "data/7.jpg").write_bytes(image_bytes())
    old = [line(7, "one", "7.jpg"), line(7, "two"), line(8, "gone", "8.jpg"), line(9, "nine")]
    write_lines(path, old)
    source = {"format": "jsonl", "path": str(path), "task": "captioning"}
    manifest = pack_all(make_run(source, tmp_path / "old"))
    assert manifest.counts.set_aside == {"missing_image": 1}
    (tmp_path / "data/7.jpg").unlink()
    write_lines(path, [line(7, "three"), line(10, "ten"), *old, line(7, "two")])
    new = skipping(source, tmp_path, "old")
    assert outcomes(new) == {"7": "ok", "10": "ok"}
    rows = open_index(new).table("key", "num_tokens")
    assert len(rows) == 2


def tar(path: Path, names: Sequence[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name in names:
            for part, data in (("jpg", image_bytes()), ("txt", b"a red circle")):
                member = tarfile.TarInfo(f"{name}.{part}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))


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
        captioning_pairs(tmp_path / name, 12)
    pack_all(make_run(tmp_path / "a", tmp_path / "old"))
    captioning_pairs(tmp_path / "a", 14, first=12)
    known = {**pairs(tmp_path / "a"), "skip": str(tmp_path / "old")}
    both = make_run([known, pairs(tmp_path / "b")], tmp_path / "both")
    found = set(outcomes(both))
    assert {key for key in found if key.startswith("a/")} == {"a/part0/000012", "a/part1/000013"}
    assert len(found) == 2 + 12
    pack_all(both)
    captioning_pairs(tmp_path / "b", 13, first=12)
    assert set(outcomes(skipping(pairs(tmp_path / "b"), tmp_path, "both"))) == {"part0/000012"}
    assert "other folders" not in caplog.text
    with caplog.at_level(logging.WARNING):
        (tmp_path / "a").rename(tmp_path / "moved")
        moved = make_run(
            {**pairs(tmp_path / "moved"), "skip": str(tmp_path / "old")}, tmp_path / "elsewhere"
        )
        assert set(outcomes(moved)) == {"part0/000012", "part1/000013"}
    assert "was packed from other folders" in caplog.text


def test_sources_of_other_names(tmp_path: Path) -> None:
    """A prefix is not a part of what the source calls a sample; one of several has to be named."""
    for name in ("a", "b"):
        captioning_pairs(tmp_path / name, 12)
    first = {**pairs(tmp_path / "a"), "name": "first"}
    pack_all(make_run(first, tmp_path / "one"))
    pack_all(make_run([first, pairs(tmp_path / "b")], tmp_path / "two"))
    (tmp_path / "a").rename(tmp_path / "moved")
    captioning_pairs(tmp_path / "moved", 13, first=12)
    moved = {**pairs(tmp_path / "moved"), "name": "second"}
    with pytest.raises(StageError, match=r"which it calls b, first, so that none .* source.name"):
        measure(skipping(moved, tmp_path, "two"))
    assert set(outcomes(skipping(moved, tmp_path, "one"))) == {"second/part0/000012"}


def test_killed_and_run_again(tmp_path: Path) -> None:
    root = captioning_pairs(tmp_path / "data", 30)
    pack_all(make_run(root, tmp_path / "old"))
    captioning_pairs(root, 36, first=30)
    new = skipping(pairs(root), tmp_path, "old")
    measure(new)
    before = new.workspace.index_info.read_bytes()
    new.workspace.index_info.unlink()
    (new.workspace.index / "part-00001.parquet").unlink()
    measure(new)
    assert new.workspace.index_info.read_bytes() == before
    assert json.loads(before)["num_skipped"] == 30


def test_what_cannot_be_left_out(tmp_path: Path) -> None:
    root = captioning_pairs(tmp_path / "data", 10)
    with pytest.raises(StageError, match=r"old is not a complete output, it has no manifest\.json"):
        measure(skipping(pairs(root), tmp_path, "old"))
    old = make_run(root, tmp_path / "old")
    pack_all(old)
    with pytest.raises(ConfigError, match=r"is named by source\.skip; new data need a folder"):
        make_config({**pairs(root), "skip": str(tmp_path / "old")}, tmp_path / "old")
    new = skipping(pairs(root), tmp_path, "old")
    measure(new)
    with pytest.raises(StageError, match=r"no sample is new, source\.skip holds all 10"):
        pack_all(new)
    captioning_pairs(root, 11, first=10)
    with pytest.raises(StageError, match=r"2 added .*source\.skip=\S+/old and another output"):
        measure(old)

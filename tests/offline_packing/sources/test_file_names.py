"""Names in upper case are read as others are; compressed files that are not read are refused."""

import bz2
import lzma
from pathlib import Path
from typing import Any

import pytest

from offline_packing.errors import StageError
from tests.helpers.accounting import account, open_one, outcomes
from tests.helpers.datasets import dialogue, image_bytes, make_run, pack_all
from tests.helpers.formats import (
    WRITERS,
    draw_samples,
    lines,
    tar_bytes,
    write_file,
)

JPEG = image_bytes()
TEXT = lines([{"messages": dialogue("Hi", "Hello")}])


@pytest.mark.parametrize(
    "name",
    ["jsonl", "jsonl_gz", "jsonl_zst", "webdataset", "webdataset_gz", "parquet"],
)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside others"])
def test_files_in_upper_case(tmp_path: Path, name: str, beside: bool) -> None:
    root = tmp_path / "data"
    samples = draw_samples(6)
    config = {**WRITERS[name](root, samples), "path": str(root)}
    suffixes = (".jsonl", ".tar", ".parquet", ".arrow", ".gz", ".zst")
    found = [path for path in sorted(root.rglob("*")) if path.suffix in suffixes]
    for path in found[: 1 if beside else None]:
        stem, *ends = path.name.split(".")
        path.rename(path.with_name(".".join([stem, *(end.upper() for end in ends)])))
    expected = {key for key, *_ in samples}
    got = outcomes(config, tmp_path)
    assert set(got.values()) == {"ok"}
    assert {key.rpartition("/")[2] for key in got} == expected
    assert not any(".TAR" in key for key in got)


@pytest.mark.parametrize(
    ("kind", "name", "data"),
    [
        ("webdataset", "b.tar.xz", lzma.compress(tar_bytes([("k.txt", b"A.")]))),
        ("webdataset", "b.TAR.BZ2", bz2.compress(tar_bytes([("k.txt", b"A.")]))),
        ("webdataset", "sub/b.txz", b"x"),
        ("jsonl", "b.jsonl.xz", lzma.compress(TEXT)),
        ("json", "b.json.bz2", bz2.compress(b"[]")),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_compressed_files_that_are_not_read(
    tmp_path: Path, kind: str, name: str, data: bytes, alone: bool
) -> None:
    config = {"format": kind, "path": str(tmp_path)}
    write_file(tmp_path / name, data)
    if not alone:
        write_file(tmp_path / "a.tar", tar_bytes([("k.txt", b"A.")]))
        write_file(tmp_path / "a.jsonl", TEXT)
        write_file(tmp_path / "a.json", b"[]")
    with pytest.raises(StageError, match=rf"holds {name}, compressed in a way that is not read"):
        account(open_one(config, tmp_path))


UPPER: dict[str, tuple[str, list[tuple[str, bytes]]]] = {
    "described": (
        "captioning",
        [("a.Jpg", JPEG), ("a.Txt", b"A square."), ("a.Json", b'{"width": 56}')],
    ),
    "named as WebDataset does": (
        "vqa",
        [
            ("a.IMG0.JPG", JPEG),
            ("a.IMG1.PNG", image_bytes(84, 56, "PNG")),
            (
                "a.JSON",
                b'{"images": ["img1.png", "img0.jpg"], "question": "Two?", "answer": "Yes."}',
            ),
        ],
    ),
}


@pytest.mark.parametrize("name", UPPER)
def test_members_in_upper_case(tmp_path: Path, name: str) -> None:
    task, members = UPPER[name]
    write_file(tmp_path / "data" / "s.tar", tar_bytes(members))
    config: dict[str, Any] = {"format": "webdataset", "path": str(tmp_path / "data"), "task": task}
    ((key, outcome, row),) = account(open_one(config, tmp_path))
    assert (key, outcome) == ("s/a", "ok")
    assert row is not None
    if task == "vqa":
        assert row.extensions == ("png", "jpg")
    assert pack_all(make_run(config, tmp_path / "out")).counts.packed == 1

"""Sources elsewhere (fsspec), of one's own (plug-in), with fields of their own; odd file names;
media that stand in their records as `data:` URIs or as base64 alone."""

import base64
import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import offline_packing.sources as sources_package
from offline_packing.errors import ChangedError, ConfigError, StageError
from offline_packing.measure.measure import measure
from offline_packing.runs.artifacts import config_fingerprint
from offline_packing.sources import SOURCES
from offline_packing.sources.roots.roots import RemoteRoot, open_root
from offline_packing.verify.verify import verify
from task_encoders.samples import SampleError
from tests.helpers.accounting import account, open_one
from tests.helpers.accounting import outcomes as outcomes_of
from tests.helpers.datasets import (
    image_bytes,
    make_config,
    make_run,
    outcomes,
    pack_all,
    packed_run,
)
from tests.helpers.formats import WRITERS, draw_samples, of_lines, tar_bytes, write_file
from tests.helpers.videos import make_video


def test_remote_paths_stay_inside() -> None:
    fsspec.filesystem("memory").pipe("memory://inside/a.jpg", b"x")
    root, name = open_root("memory://inside")
    assert isinstance(root, RemoteRoot)
    assert name is None
    assert root.locate("sub", "../a.jpg") == "a.jpg"
    for outside in ("../a.jpg", "/a.jpg", "sub/../../a.jpg"):
        with pytest.raises(SampleError, match="path_outside_root"):
            root.locate("", outside)
    cached, _ = open_root("simplecache::memory://inside")  # the URL names a file system's options
    assert cached.entry("a.jpg") == ("a.jpg", 1, 0)
    with pytest.raises(StageError, match=r"does not exist; set source\.path"):
        open_root("memory://nowhere")
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_root("nosuchstorage://bucket")


def test_plug_in_packs_like_any_other(tmp_path: Path) -> None:
    write_file(tmp_path / "data" / "a.jpg", image_bytes())
    lines = ['a.jpg,"What, then?",A square.', "nowhere.jpg,q,a", "too,few", 'a.jpg,q,"b ""c"""']
    write_file(tmp_path / "data" / "vqa.csv", "\n".join(lines).encode())
    source = {
        "format": "examples.csv_source:CsvSource",
        "path": str(tmp_path / "data" / "vqa.csv"),
        "task": "vqa",
    }
    run = make_run(source, tmp_path / "out", engine={"samples_per_part": 3})
    assert list(outcomes(run).values()).count("ok") == 2
    counts = pack_all(run).counts
    assert counts.packed == 2
    assert counts.set_aside == {"bad_record": 1, "missing_image": 1}


MODULE = '''
from offline_packing.sources import Source
from offline_packing.sources.formats.jsonl import JsonlSource
from offline_packing.sources.options import FileOptions


class FirstOptions(FileOptions):
    first: int = 2


class FirstSource(JsonlSource):
    """The first lines of each part."""

    Options = FirstOptions

    def records(self, part):
        yield from list(super().records(part))[: self.options.first]
'''


def test_an_option_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a source in a file of its own, by its class or by a name in the registry."""
    write_file(tmp_path / "first_source.py", MODULE.encode())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "first_source", raising=False)
    write_file(path := tmp_path / "a.jsonl", b'{"text": "One line."}\n' * 6)
    source = {"format": "first_source:FirstSource", "path": str(path), "task": "captioning"}
    config = make_config({**source, "first": 3}, tmp_path / "out")
    assert config.model_dump()["source"][0]["first"] == 3
    assert config_fingerprint(config)["source.0.first"] == "3"
    assert "source.0.first" not in config_fingerprint(make_config(source, tmp_path))
    run = make_run({**source, "first": 3}, tmp_path / "packed")
    assert measure(run).info.num_samples == 3
    monkeypatch.setitem(SOURCES, "first", sources_package.source_class(source["format"]))
    named = make_run({**source, "format": "first"}, tmp_path / "named")
    assert measure(named).info.num_samples == 2
    for more, message in (
        ({"first": "many"}, r"source\.0\.first.*integer"),
        ({"frist": 1}, r"source\.0\.frist is not a known field; valid: .*, first"),
        ({"format": "jsonl", "first": 2}, "first applies to format first only; remove it"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_config({**source, **more}, tmp_path / "out")


JPEG = image_bytes()


@pytest.mark.parametrize("name", ["jsonl", "jsonl_zst", "webdataset", "webdataset_gz", "parquet"])
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
    got = outcomes_of(config, tmp_path)
    assert set(got.values()) == {"ok"}
    assert {key.rpartition("/")[2] for key in got} == expected
    assert not any(".TAR" in key for key in got)


PNG = image_bytes(56, 84, "PNG")
CLIP = make_video(4)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def uri(data: bytes, kind: str = "image/jpeg") -> str:
    return f"data:{kind};base64,{base64_of(data)}"


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    """A dialogue whose question is a list of parts."""
    content = [*parts, {"type": "text", "text": "What?"}]
    answer = {"role": "assistant", "content": "This."}
    return {"messages": [{"role": "user", "content": content}, answer]}


#: Records, and the media that they hold.
RECORDS: dict[str, tuple[dict[str, Any], list[bytes]]] = {
    "openai": (said({"type": "image_url", "image_url": {"url": uri(JPEG)}}), [JPEG]),
    "part": (said({"type": "image", "image": uri(PNG, "image/png;charset=x")}), [PNG]),
    "list": ({"question": "<image><image>?", "answer": "a", "images": [uri(PNG), base64_of(JPEG)]},
             [PNG, JPEG]),
    "twice": ({"question": "<image><image>?", "answer": "a", "images": [uri(PNG), uri(PNG)]},
              [PNG, PNG]),
    "bare": ({"question": "?", "answer": "a", "image": base64_of(JPEG)}, [JPEG]),
    "mime": ({"question": "?", "answer": "a", "image": base64.encodebytes(PNG).decode()}, [PNG]),
    "unpadded": ({"question": "?", "answer": "a", "image": uri(JPEG).rstrip("=")}, [JPEG]),
    "video": ({"question": "<video>?", "answer": "a", "video": uri(CLIP, "video/mp4")}, [CLIP]),
    "object": ({"question": "?", "answer": "a", "image": {"url": uri(PNG)}}, [PNG]),
}  # fmt: skip


def write_inline(root: Path, records: list[dict[str, Any]], form: str) -> dict[str, Any]:
    """A source of records; a table has those with one text as their image."""
    if form == "jsonl":
        return of_lines(root / "a.jsonl", records)
    root.mkdir()
    if form == "tar":
        members = [(f"{one['id']}.new.json", json.dumps(one).encode()) for one in records]
        write_file(root / "a.tar", tar_bytes(members))
        return {"format": "webdataset", "path": str(root)}
    if form == "parquet":
        flat = [record for record in records if isinstance(record.get("image"), str)]
        pq.write_table(pa.Table.from_pylist(flat), root / "a.parquet")
        return {"format": "parquet", "path": str(root)}
    table = io.StringIO()
    writer = csv.DictWriter(table, sorted({name for record in records for name in record}))
    writer.writeheader()
    for record in records:
        writer.writerow({k: v if isinstance(v, str) else json.dumps(v) for k, v in record.items()})
    write_file(root / "a.csv", table.getvalue().encode())
    return {"format": "csv", "path": str(root)}


@pytest.mark.parametrize("form", ["jsonl", "csv", "tar", "parquet"])
def test_they_are_read_again_from_their_locators(form: str, tmp_path: Path) -> None:
    records = [{"id": key, **record} for key, (record, _) in RECORDS.items()]
    source = open_one(write_inline(tmp_path / "data", records, form), tmp_path)
    found = account(source)
    assert [outcome for _, outcome, _ in found if outcome != "ok"] == []
    for key, _, row in found:
        assert row is not None
        images = [source.read_media(locator) for locator in row.media]
        assert images == RECORDS[key.rpartition("/")[2]][1]
    assert len(found) == (3 if form == "parquet" else len(RECORDS))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (uri(JPEG[:300]), "bad_image"),
        (uri(b""), "bad_image"),
        (uri(b"no picture at all" * 9), "bad_image"),
        ("data:image/png;base64,§§§§", "bad_image"),
        ("data:image/svg+xml,<svg/>", "bad_image"),
        ("data:", "bad_image"),
        ("data:video/mp4;base64,AAAAAAA", "bad_image"),  # where an image is to be
        ("A" * 200, "missing_image"),  # a name like others
        ("JFIF" * 50 + ".jpg", "missing_image"),
    ],
)
def test_broken_ones_are_set_aside(tmp_path: Path, name: str, reason: str) -> None:
    record = {"id": "k", "question": "?", "answer": "a", "image": name}
    assert outcomes_of(of_lines(tmp_path / "a.jsonl", [record]), tmp_path) == {"k": reason}


def test_packs_hold_the_bytes(tmp_path: Path) -> None:
    records = [{"id": key, **record} for key, (record, _) in RECORDS.items()]
    source = of_lines(tmp_path / "data/a.jsonl", records)
    run = packed_run(source, tmp_path / "out", pack={"seq_length": 512})
    assert verify(run, deep=True).ok
    with pytest.raises(StageError, match=r"media=refer: packs cannot refer to .*: record"):
        pack_all(make_run(source, tmp_path / "b", output={"media": "refer"}))


def test_another_picture_of_the_same_size_is_noticed(tmp_path: Path) -> None:
    record = {"id": "k", "question": "?", "answer": "a", "image": uri(JPEG)}
    source = open_one(of_lines(tmp_path / "a.jsonl", [record]), tmp_path)
    ((_, _, row),) = account(source)
    assert row is not None
    changed = JPEG[:-20] + bytes(20)
    other = of_lines(tmp_path / "a.jsonl", [record | {"image": uri(changed)}])
    with pytest.raises(ChangedError):
        open_one(other, tmp_path).read_media(row.media[0])

"""Damaged, hostile and odd containers: read in part, or refused. Damaged at random, every kind of
source accounts for every record: no crash, no hang, and what is used can be read again."""

import csv
import gzip
import io
import json
import os
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offline_packing.errors import StageError
from offline_packing.sources import open_source
from offline_packing.sources.formats import jsonl
from offline_packing.storage import streams
from task_encoders.samples import SampleError
from tests.helpers import formats
from tests.helpers.accounting import account, open_one, outcomes
from tests.helpers.datasets import image_bytes
from tests.helpers.formats import lines, tar_bytes, tar_members, write_file


def special(name: str, kind: bytes, target: str = "", size: int = 0) -> tuple[Any, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, size
    return info, b""


JPEG = image_bytes()
ASK = json.dumps({"question": "<image>?", "answer": "A square."}).encode()
SAMPLES = formats.draw_samples(3)
CONTAINERS = {".parquet", ".arrow", ".json", ".jsonl", ".csv", ".gz", ".tar"}
#: bits of each footer that are flipped; FUZZED_SAMPLES=2000 takes five CPU minutes
FLIPS = int(os.environ.get("FUZZED_SAMPLES", "16"))
MEMBERS = tar_members(SAMPLES)
TAR = tar_bytes(MEMBERS)
#: of keys with a dot
DOTTED = tar_bytes([(f"v1.{i}.{end}", data) for i in range(3)
                    for end, data in (("jpg", JPEG), ("json", ASK))])  # fmt: skip
WEBDATASET = {"format": "webdataset"}


def offset_of(name: str) -> int:
    """Offset of a member's header in TAR."""
    with tarfile.open(fileobj=io.BytesIO(TAR)) as tar:
        return tar.getmember(name).offset


LAST, JSON_AT = offset_of("s0002.img0.jpg"), offset_of("s0002.json")
LONG_NAME, _ = special("././@LongLink", tarfile.GNUTYPE_LONGNAME, size=1 << 40)
ENDLESS = LONG_NAME.tobuf(tarfile.GNU_FORMAT)
SIZE_AT = offset_of("s0001.img0.png") + 130
#: A damaged tar, and its samples that are read, or damaged.
CUTS: dict[str, tuple[bytes, str]] = {
    "at_a_sample": (TAR[:LAST], "a/s0000 a/s0001 a.tar!"),
    "in_a_header": (TAR[: LAST + 100], "a/s0000 a/s0001 a.tar!"),
    "in_an_image": (TAR[: LAST + 700], "a/s0000 a/s0001 a/s0002!"),
    "between_image_and_json": (TAR[:JSON_AT], "a/s0000 a/s0001 a/s0002!"),
    "in_the_json": (TAR[: JSON_AT + 512 + 20], "a/s0000 a/s0001 a/s0002!"),
    "in_the_padding": (
        TAR[: JSON_AT + 512 + len(dict(MEMBERS)["s0002.json"]) + 3],
        "a/s0000 a/s0001 a/s0002 a.tar!",
    ),
    "in_the_first_header": (TAR[:17], "a.tar!"),
    "before_everything": (b"", "a.tar!"),
    "a_size_that_is_damaged": (
        TAR[:SIZE_AT] + bytes([TAR[SIZE_AT] ^ 1]) + TAR[SIZE_AT + 1 :],
        "a/s0000 a.tar!",
    ),
    "a_name_without_end": (TAR[:LAST] + ENDLESS, "a/s0000 a/s0001 a.tar!"),
    "in_an_image_of_a_dotted_key": (
        DOTTED[: DOTTED.index(b"v1.2.jpg") + 532],
        "a/v1.0 a/v1.1 a/v1.2.jpg!",
    ),
    "in_the_json_of_a_dotted_key": (
        DOTTED[: DOTTED.index(b"v1.2.json") + 532],
        "a/v1.0 a/v1.1 a/v1.2!",
    ),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_truncated_tar(tmp_path: Path, cut: str, packed: bool) -> None:
    data, expected = CUTS[cut]
    path = written(tmp_path / "data", data, packed)
    found = outcomes({**WEBDATASET, "path": str(tmp_path / "data")}, tmp_path)
    shown = [key + {"damaged_source": "!", "ok": ""}[outcome] for key, outcome in found.items()]
    assert shown == expected.replace("a.tar", path.name).split()


def written(folder: Path, data: bytes, packed: bool) -> Path:
    """Write a tar, perhaps a compressed one."""
    path = folder / ("a.tar.gz" if packed else "a.tar")
    write_file(path, gzip.compress(data) if packed else data)
    return path


def naming(image: str) -> bytes:
    return ASK.replace(b"{", b'{"image": "%b", ' % image.encode(), 1)


PICKLE = b"cos\nsystem\n(S'touch /tmp/owned'\ntR."
#: Outcome -> members of a tar.
ODD: dict[str, dict[str, list[Any]]] = {
    "ok": {
        "pickle_beside": [("k.jpg", JPEG), ("k.json", ASK), ("k.pkl", PICKLE)],
        "folder_between": [("k.jpg", JPEG), special("d", tarfile.DIRTYPE), ("k.json", ASK)],
        "name_leads_outside": [("../../k.jpg", JPEG), ("../../k.json", ASK)],
        "long_name": [("d" * 200 + "/k.jpg", JPEG), ("d" * 200 + "/k.json", ASK)],
        "image_named_as_in_its_origin": [("k.jpg", JPEG), ("k.json", naming("coco/7.jpg"))],
    },
    "bad_record": {"pickle_only": [("k.jpg", JPEG), ("k.pkl", PICKLE)]},
    "bad_json": {
        "pickle_as_json": [("k.jpg", JPEG), ("k.json", PICKLE)],
        "json_is_link": [("k.jpg", JPEG), special("k.json", tarfile.SYMTYPE, "/etc/passwd")],
        "json_is_device": [("k.jpg", JPEG), special("k.json", tarfile.CHRTYPE)],
    },
    "missing_image": {
        "image_is_link": [special("k.jpg", tarfile.SYMTYPE, "/etc/passwd"), ("k.json", ASK)],
        "image_is_hard_link": [special("k.jpg", tarfile.LNKTYPE, "../other.jpg"), ("k.json", ASK)],
        "named_elsewhere": [("k.a.jpg", JPEG), ("k.b.jpg", JPEG), ("k.json", naming("c.jpg"))],
    },
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("expected", ODD)
def test_odd_members(tmp_path: Path, expected: str, packed: bool) -> None:
    for name, members in ODD[expected].items():
        path = written(tmp_path / name, tar_bytes(members), packed)
        (outcome,) = outcomes({**WEBDATASET, "path": str(path)}, tmp_path).values()
        assert outcome == expected, name


@pytest.mark.parametrize("packed", [False, True])
def test_members_of_no_sample_are_counted(tmp_path: Path, packed: bool) -> None:
    members = [("k.jpg", JPEG), ("._k.jpg", b"macOS"), (".h", b"x"), ("d/...png", JPEG)]
    members += [("k.json", ASK), ("README", b"read"), ("x\ny/k.jpg", JPEG), ("x\ny/k.json", ASK)]
    path = written(tmp_path, tar_bytes(members), packed)
    lost = dict.fromkeys(("a/.h", "a/d/...png", "a/README"), "bad_record")
    found = outcomes({**WEBDATASET, "path": str(path)}, tmp_path)
    assert found == lost | {"a/k": "ok", "a/x\ny/k": "ok"}


@pytest.mark.parametrize(
    ("name", "kind", "before", "whole", "bomb"),
    [
        ("a.jsonl.gz", "jsonl", 1, lines([{"question": "a", "answer": "b"}]), bytes(4 << 20)),
        ("a.tar.gz", "webdataset", 2, TAR[:LAST], tar_bytes([("z.bin", bytes(4 << 20))])),
    ],
)
def test_gzip_bomb_ends_its_file(
    tmp_path: Path, monkeypatch: Any, name: str, kind: str, before: int, whole: bytes, bomb: bytes
) -> None:
    monkeypatch.setattr(streams, "_FREE_BYTES", 1 << 20)
    write_file(tmp_path / "data" / name, gzip.compress(whole, 1) + gzip.compress(bomb))
    found = list(outcomes({"format": kind, "path": str(tmp_path / "data")}, tmp_path).values())
    assert found == ["ok"] * before + ["damaged_source"]


def test_blank_rows_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes of them unpack from megabytes; a row after them keeps its number."""
    blocks, have_text = [], jsonl._have_text
    monkeypatch.setattr(jsonl, "_have_text", lambda *own: blocks.append(own) or have_text(*own))
    rows = b"caption\n" + b"\n" * (8 << 20) + b"one\n" + b"\n" * (8 << 20) + b"two\n"
    write_file(tmp_path / "a.csv.gz", gzip.compress(rows, 1))
    source = open_source({"format": "csv", "path": str(tmp_path), "task": "captioning"})
    found = [one.key for part in source.unread_parts() for one in source.records(part)]
    assert found == [f"a:{number}" for number in ((8 << 20) + 2, (16 << 20) + 3)]
    assert len(blocks) < 12


#: Damage to a file of a format, which all of its samples are lost by; and what is said of it.
SPOILED: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "parquet_cut": ("parquet", lambda data: data[:-300], "restore it or write it again"),
    "arrow_cut": ("huggingface", lambda data: data[:-300], "restore it or write it again"),
    "parquet_empty": ("parquet", lambda data: b"", "restore it or write it again"),
    "json_object": ("json_array", lambda data: b'{"a": 1}', "no JSON array; use format pairs"),
    "json_utf16": ("json_array", lambda data: data.decode().encode("utf-16"), "it is UTF-16"),
    "json_empty": ("json_array", lambda data: b"", "it is empty; restore it"),
    "jsonl_utf16": ("jsonl", lambda data: data.decode().encode("utf-16-le"), "it is UTF-16"),
    "jsonl_cr": ("jsonl", lambda data: data.replace(b"\n", b"\r"), "its lines end in CR"),
    "gz_empty": ("jsonl_gz", lambda data: b"", "it is empty; restore it"),
    "gz_of_nothing": ("jsonl_gz", lambda data: gzip.compress(b""), "it is empty; restore it"),
    "csv_cr": ("csv_rows", lambda data: data.replace(b"\n", b"\r"), "its lines end in CR"),
    "csv_empty": ("csv_rows", lambda data: b"", "it is empty; restore it"),
    "csv_heading": ("csv_rows", lambda data: b"id,id\n1,2\n3,4\n5,6\n", "rename them"),
    "tsv_heading": ("tsv_gz", lambda data: gzip.compress(b"a\tb\n" * 4), "name them; name"),
    "tar_empty": ("webdataset", lambda data: b"", "without its end marker"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_said_of_a_damaged_file(tmp_path: Path, name: str) -> None:
    """Once or with each record that can be counted, or a source without any other file is
    refused."""
    writer, spoil, said = SPOILED[name]
    config = formats.WRITERS[writer](tmp_path / "data", SAMPLES)
    path = container_in(tmp_path / "data")
    path.write_bytes(spoil(path.read_bytes()))
    source = open_one({**config, "path": str(path)}, tmp_path)
    try:
        records = (record for part in source.scan(3).parts for record in source.records(part))
        details = [one.content.detail for one in records if isinstance(one.content, SampleError)]
        assert len(details) == (3 if "heading" in name else 1)
    except StageError as error:
        details = [str(error)]
    assert all(f"{path.name}: " in one and said in one for one in details)


def container_in(folder: Path) -> Path:
    """The file that holds the samples of a source, or the first of them."""
    files = [path for path in folder.rglob("*.*") if path.suffix in CONTAINERS]
    return min(files, key=lambda path: (path.suffix == ".json", path))


@pytest.mark.parametrize("kind", ["parquet", "huggingface"])
def test_damaged_footers(tmp_path: Path, kind: str) -> None:
    """Any bit of them, also those of which pyarrow ends the process, costs one file at most."""
    config = formats.WRITERS[kind](tmp_path / "data" / "x", SAMPLES)
    formats.WRITERS[kind](tmp_path / "data" / "y", SAMPLES)
    path = container_in(tmp_path / "data" / "x")
    whole, seen = path.read_bytes(), set()
    size = int.from_bytes(whole[-8:-4], "little") + 8 if kind == "parquet" else len(whole)
    rng = np.random.default_rng(2)
    for _ in range(FLIPS):
        data = bytearray(whole)
        data[-int(rng.integers(1, size + 1))] ^= 1 << int(rng.integers(8))
        path.unlink()  # tables of the last case are mapped
        path.write_bytes(data)
        found = account(open_one({**config, "path": str(tmp_path / "data")}, tmp_path))
        assert sum(reason == "ok" for _, reason, _ in found) >= len(SAMPLES)
        seen |= {reason for _, reason, _ in found}
    assert {"ok", "damaged_source"} <= seen


def test_damaged_row_group_costs_its_rows(tmp_path: Path) -> None:
    samples = formats.draw_samples(12)
    source = formats.parquet(tmp_path / "data", samples)
    path = tmp_path / "data" / "train-00000.parquet"
    column = pq.ParquetFile(path).metadata.row_group(1).column(3)
    data = bytearray(path.read_bytes())
    start = column.data_page_offset
    data[start : start + 40] = bytes(40)
    path.write_bytes(bytes(data))
    found = outcomes(source, tmp_path)
    lost = [key for key, outcome in found.items() if outcome == "damaged_source"]
    assert lost == [f"train-00000:{row}" for row in range(4, 8)]
    assert list(found.values()).count("ok") == 8


DATASET, SPLIT = ".nv-meta/dataset.yaml", ".nv-meta/split.yaml"
LOADED = b"sample_type: {__class__: VQASample}\nsample_loader: sample_loader.py:sample_loader\n"
NOTES = {"notes.txt": b""}
#: Format, files, and why they are refused.
REFUSED: dict[str, tuple[str, dict[str, bytes], str]] = {
    "no_tar": ("webdataset", NOTES, r"holds no \*\.tar"),
    "no_parquet": ("parquet", NOTES, r"holds no \*\.parquet"),
    "no_packs": ("packs", NOTES, r"holds no packs: \*\.tar, ps_"),
    "no_metadata": ("energon", {"a.tar": TAR}, "run energon prepare there"),
    "metadataset": (
        "energon",
        {"a.yaml": b"__class__: MetadatasetV2\n"},
        "give each that a metadataset lists as a source",
    ),
    "pickles": (
        "energon",
        {DATASET: b"__class__: ChatMLWebdataset\nfield_map: {imgs: jpgs}\n"},
        "field_map names 'jpgs', pickles or sound",
    ),
    "lists_of_fields": (
        "energon",
        {DATASET: b"__class__: ChatMLWebdataset\nfield_map: {imgs: [jpg]}\n"},
        "without a field_map of names",
    ),
    "sample_loader": ("energon", {DATASET: LOADED}, "'VQASample' without a field_map"),
    "unknown_sample_type": (
        "energon",
        {DATASET: b"sample_type: {__class__: OCRSample}\nfield_map: {a: b}\n"},
        "'OCRSample'.*none of CaptioningSample, VQASample, ChatMLWebdataset, CrudeWebdataset",
    ),
    "shard_gone": (
        "energon",
        {DATASET: b"__class__: CrudeWebdataset\n", SPLIT: b"split_parts: {train: [a.tar]}\n"},
        "a.tar, which split 'train' names, does not exist",
    ),
    "dataset_not_named": (
        "llama_factory",
        {"dataset_info.json": b'{"a": {"file_name": "a.json"}}'},
        "no dataset None; set source.dataset to one of: a",
    ),
    "split_of_no_dataset": (
        "huggingface",
        {"dataset_dict.json": b'{"splits": ["test"]}'},
        "has the splits test, not 'train'; set source.split",
    ),
    "name_not_utf8": (
        "jsonl",
        {"a.jsonl": b"{}", "caf\udce9.jsonl": b'{"id": "a", "question": "b", "answer": "c"}'},
        r"holds 'caf\\udce9\.jsonl', whose name is not UTF-8; rename it",
    ),
    "tar_outside": ("webdataset", {}, "a.tar cannot be read: .*link to .*outside"),
    **{  # beside one that is read
        name: (
            {"tar": "webdataset"}.get(kind, kind),
            {name: b"x", f"a.{kind}": TAR},
            f"holds '{name}', compressed in a way that is not read",
        )
        for name, kind in (
            *(("b.tar.xz", "tar"), ("b.TAR.BZ2", "tar"), ("sub/b.txz", "tar")),
            *(("b.jsonl.xz", "jsonl"), ("b.json.bz2", "json")),
        )
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_sources_that_cannot_be_used(tmp_path: Path, name: str) -> None:
    kind, files, message = REFUSED[name]
    root = tmp_path / "data"
    root.mkdir()
    for file, data in files.items():
        write_file(root / file, data)
    if name == "tar_outside":
        write_file(tmp_path / "outside.tar", TAR)
        (root / "a.tar").symlink_to(tmp_path / "outside.tar")
    path = root / "a.yaml" if name == "metadataset" else root
    with pytest.raises(StageError, match=message):
        outcomes({"format": kind, "path": str(path)}, tmp_path)


FIVE = formats.draw_samples(5, seed=1)
#: damaged files among whole ones, of all formats: FUZZED_SAMPLES=400 takes two CPU minutes
CASES = int(os.environ.get("FUZZED_SAMPLES", "45"))


def flip(data: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(data)
    for place in rng.integers(0, len(data), rng.integers(1, 6)):
        changed[place] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def flip_end(data: bytes, rng: np.random.Generator) -> bytes:
    """One bit of what may be a footer, an end mark or a checksum."""
    changed = bytearray(data)
    changed[-int(rng.integers(1, min(len(data), 2000) + 1))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def replace(data: bytes, rng: np.random.Generator) -> bytes:
    """Put junk, or nothing, in place of some bytes, or of none."""
    start, size = int(rng.integers(len(data))), int(rng.choice([0, 64, rng.integers(1, 700)]))
    junk = [b"", bytes(size), b"\xff" * 64, b'"' * 9, b"[{" * 50, b"\\", b"\n", rng.bytes(699)]
    return data[:start] + junk[rng.integers(len(junk))] + data[start + size :]


def repeat(data: bytes, rng: np.random.Generator) -> bytes:
    start, end = sorted(rng.integers(0, len(data), 2).tolist())
    return data[:end] + data[start:]


def encode(data: bytes, rng: np.random.Generator) -> bytes:
    return data.decode("latin-1").encode(str(rng.choice(["utf-16", "utf-16-be", "utf-32"])))


MUTATIONS: dict[str, Callable[[bytes, np.random.Generator], bytes]] = {
    "cut": lambda data, rng: data[: rng.integers(len(data))],
    **{one.__name__: one for one in (flip, flip_end, replace, repeat)},
    "empty": lambda data, rng: b"",
    "encode": encode,
    "end lines in CR": lambda data, rng: data.replace(b"\n", b"\r"),
}
#: After these a file is one record, which is set aside.
WHOLE = ("empty", "encode")


def count_lines(data: bytes) -> int:
    return sum(1 for line in data.split(b"\n") if line.strip())


def count_rows(data: bytes) -> int:
    return sum(1 for row in csv.reader(io.StringIO(data.decode(), newline=""), strict=True)) - 1


#: Samples in a container, by a reader of its own; an error: they cannot be counted.
COUNTS: dict[str, Callable[[bytes], int]] = {
    ".jsonl": count_lines,
    ".jsonl.gz": lambda data: count_lines(gzip.decompress(data)),
    ".json": lambda data: len([*json.loads(data)]) if data[:1] == b"[" else 1,
    ".csv": count_rows,
    ".parquet": lambda data: pq.read_table(pa.BufferReader(data)).num_rows,
    ".arrow": lambda data: pa.ipc.open_stream(data).read_all().num_rows,
}


def several(name: str, root: Path) -> dict[str, Any]:
    """A source of three files with samples, or more; in a dataset of one file, of that one."""
    if name in ("energon", "llama_factory"):
        return formats.WRITERS[name](root, formats.draw_samples(6, seed=2))
    configs = [formats.WRITERS[name](root / part, FIVE[:3]) for part in "xyz"]
    return {**configs[0], "path": str(root)}


def measured(config: dict[str, Any], out: Path) -> Counter[str]:
    """Records by what became of them."""
    return Counter(outcome for _, outcome, _ in account(open_one(config, out)))


@pytest.fixture(scope="module", params=formats.WRITERS)
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, Any], int]:
    """Name of a format, a source's folder, its configuration, and its number of samples."""
    root = tmp_path_factory.mktemp("whole") / "data"
    config = several(request.param, root)
    counts = measured(config, root.parent / "out")
    assert set(counts) == {"ok"}
    return request.param, root, config, counts["ok"]


def test_one_damaged_file_among_others(
    tmp_path: Path, whole: tuple[str, Path, dict[str, Any], int]
) -> None:
    """All samples of other files are there, and each that can be counted of the
    damaged one is measured or set aside; a refusal names the file and what to do."""
    name, folder, config, total = whole
    for case in range(-(-CASES // len(formats.WRITERS))):
        rng = np.random.default_rng([case, list(formats.WRITERS).index(name)])
        root = tmp_path / f"case{case}" / "data"
        shutil.copytree(folder, root)
        files = sorted(p for p in root.rglob("*") if p.is_file() and "images" not in p.parts)
        path = files[rng.integers(len(files))]
        was = path.read_bytes()
        mutation = str(rng.choice([*MUTATIONS, "replace", "replace", "replace"]))
        path.write_bytes(MUTATIONS[mutation](was or b"0", rng))
        what = f"{name} {case}: {mutation} {path.relative_to(root)}"
        own = {key: value.replace(str(folder), str(root)) for key, value in config.items()}
        try:
            found = measured(own, tmp_path / f"case{case}" / "out")
        except StageError as error:
            text = str(error)
            assert re.fullmatch(rf".*{path.name}.*; .+", text), f"{what}: {text}"
            assert name in ("energon", "llama_factory", "huggingface"), f"{what}: {text}"
            continue
        count = next((one for end, one in COUNTS.items() if path.name.endswith(end)), None)
        try:
            assert count is not None
            assert name != "raw_packing_data"
            lost, now = count(was), max(1, count(path.read_bytes()))
            is_cr = mutation == "end lines in CR" and b"\n" in was and path.suffix != ".json"
            now = 1 if mutation in WHOLE or is_cr else now
        except Exception:  # noqa: BLE001 - it cannot be counted
            continue
        assert found.total() == total - lost + now, f"{what}: {found}"

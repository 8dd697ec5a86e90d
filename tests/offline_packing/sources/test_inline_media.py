"""Media that stand in their records as `data:` URIs or as base64 alone."""

import base64
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offline_packing.errors import ChangedError, StageError
from offline_packing.verify.verify import verify
from tests.helpers import accounting
from tests.helpers.datasets import image_bytes, make_run, pack_all, packed_run
from tests.helpers.formats import lines, tar_bytes, write_file
from tests.helpers.videos import make_video

JPEG, PNG = image_bytes(), image_bytes(56, 84, "PNG")
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


def write_jsonl(root: Path, records: list[dict[str, Any]]) -> dict[str, Any]:
    write_file(root / "a.jsonl", lines(records))
    return {"format": "jsonl", "path": str(root)}


def write_csv(root: Path, records: list[dict[str, Any]]) -> dict[str, Any]:
    root.mkdir()
    with open(root / "a.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, sorted({name for record in records for name in record}))
        writer.writeheader()
        for record in records:
            writer.writerow(
                {k: v if isinstance(v, str) else json.dumps(v) for k, v in record.items()}
            )
    return {"format": "csv", "path": str(root)}


def write_tar(root: Path, records: list[dict[str, Any]]) -> dict[str, Any]:
    members = [(f"{record['id']}.json", json.dumps(record).encode()) for record in records]
    write_file(root / "a.tar", tar_bytes(members))
    return {"format": "webdataset", "path": str(root)}


def write_parquet(root: Path, records: list[dict[str, Any]]) -> dict[str, Any]:
    root.mkdir()
    flat = [record for record in records if isinstance(record.get("image"), str)]
    pq.write_table(pa.Table.from_pylist(flat), root / "a.parquet")
    return {"format": "parquet", "path": str(root)}


WRITERS = (write_jsonl, write_csv, write_tar, write_parquet)


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_they_are_read_again_from_their_locators(
    write: Callable[[Path, list[dict[str, Any]]], dict[str, Any]], tmp_path: Path
) -> None:
    records = [{"id": key, **record} for key, (record, _) in RECORDS.items()]
    source = accounting.open_one(write(tmp_path / "data", records), tmp_path)
    found = accounting.account(source)
    assert [outcome for _, outcome, _ in found if outcome != "ok"] == []
    for key, _, row in found:
        assert row is not None
        images = [source.read_media(locator) for locator in row.media]
        assert images == RECORDS[key.rpartition("/")[2]][1]
    assert len(found) == (3 if write is write_parquet else len(RECORDS))


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
    assert accounting.outcomes(write_jsonl(tmp_path / "data", [record]), tmp_path) == {"k": reason}


def test_packs_hold_the_bytes(tmp_path: Path) -> None:
    records = [{"id": key, **record} for key, (record, _) in RECORDS.items()]
    source = {**write_jsonl(tmp_path / "data", records), "task": "bmr"}
    run = packed_run(source, tmp_path / "out", pack={"seq_length": 512})
    assert verify(run, deep=True).ok
    with pytest.raises(StageError, match=r"references: Energon has no address .*: record"):
        pack_all(make_run(source, tmp_path / "b", output={"layout": "references"}))


def test_another_picture_of_the_same_size_is_noticed(tmp_path: Path) -> None:
    record = {"id": "k", "question": "?", "answer": "a", "image": uri(JPEG)}
    source = accounting.open_one(write_jsonl(tmp_path / "data", [record]), tmp_path)
    ((_, _, row),) = accounting.account(source)
    assert row is not None
    changed = JPEG[:-20] + bytes(20)
    write_jsonl(tmp_path / "data", [record | {"image": uri(changed)}])
    again = accounting.open_one({"format": "jsonl", "path": str(tmp_path / "data")}, tmp_path)
    with pytest.raises(ChangedError):
        again.read_media(row.media[0])

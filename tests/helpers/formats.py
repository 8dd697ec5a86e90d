"""The same samples in every format that a source can have."""

import csv
import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers.datasets import dialogue, image_bytes, write_json
from tests.helpers.videos import make_video

#: One sample: its name, its messages, its images and then its videos.
Sample = tuple[str, list[dict[str, str]], list[bytes]]
#: Writes samples below a folder; returns the source's configuration without its task.
Writer = Callable[[Path, list[Sample]], dict[str, Any]]


def draw_samples(count: int, seed: int = 0) -> list[Sample]:
    """Dialogues over one picture each, in JPEG and PNG, with text that needs escaping."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for i in range(count):
        words = " ".join(rng.choice(["red", 'the "left"', "a\\b", "é", "[1, 2}", "\n"], 8))
        image = image_bytes(28 * int(rng.integers(2, 6)), 56, ("JPEG", "PNG")[i % 2])
        samples.append((f"s{i:04d}", dialogue(f"<image>\nWhat {i}?", f"It is {words}."), [image]))
    return samples


def draw_video_samples(count: int, *, single: bool) -> list[Sample]:
    """Dialogues over videos in several containers; unless `single`, with images among them."""
    samples: list[Sample] = []
    for i in range(count):
        clip = make_video(4 + i, container=("mp4", "webm", "avi")[i % 3])
        text, media = "<video>\nWhat?", [clip]
        if not single and i % 3 == 1:
            text, media = "<video>\n<image>\nWhat?", [image_bytes(84, 56), clip]
        if not single and i % 3 == 2:
            text, media = "Which of these two?", [clip, make_video(5)]
        samples.append((f"s{i:04d}", dialogue(text, f"It is {i}."), media))
    return samples


def tar_bytes(members: Iterable[tuple[str | tarfile.TarInfo, bytes]]) -> bytes:
    """Return an uncompressed tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zstd(data: bytes) -> bytes:
    """A zstd file."""
    return pa.compress(data, "zstd", asbytes=True)


def write_file(path: Path, data: bytes) -> None:
    """Write a file, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def suffix_of(medium: bytes) -> str:
    """'png', 'jpg', 'mp4', 'webm' or 'avi'."""
    if medium[4:8] == b"ftyp":
        return "mp4"
    suffixes = {b"\x89PNG": "png", b"\x1aE\xdf\xa3": "webm", b"RIFF": "avi"}
    return suffixes.get(medium[:4], "jpg")


def field_of(name: str) -> str:
    """The field of a record that names a file: 'images' or 'videos'."""
    return "images" if name.endswith(("png", "jpg")) else "videos"


def media_fields(names: list[str]) -> dict[str, list[str]]:
    """Names by the field that they stand in; videos only where there are any."""
    fields: dict[str, list[str]] = {"images": []}
    for name in names:
        fields.setdefault(field_of(name), []).append(name)
    return fields


def sharegpt(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Messages as ShareGPT and LLaVA have them."""
    roles = {"user": "human", "assistant": "gpt"}
    return [{"from": roles[m["role"]], "value": m["content"]} for m in messages]


def with_files(root: Path, samples: list[Sample], field: str = "images") -> list[dict[str, Any]]:
    """Records that name image files, which are written."""
    records = []
    for key, messages, images in samples:
        names = [f"images/{key}_{i}.{suffix_of(image)}" for i, image in enumerate(images)]
        for name, image in zip(names, images, strict=True):
            write_file(root / name, image)
        named: dict[str, Any] = media_fields(names)
        if field == "image":  # one medium, in a field of LLaVA's
            named = {field_of(names[0]).removesuffix("s"): names[0]}
        records.append({"id": key, "messages": messages, **named})
    return records


def pairs(root: Path, samples: list[Sample]) -> dict[str, Any]:
    for key, messages, (image,) in samples:
        write_file(root / f"{key}.{suffix_of(image)}", image)
        write_json(root / f"{key}.json", {"messages": messages})
    return {"format": "pairs", "path": str(root)}


def lines(records: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def of_lines(path: Path, records: Iterable[Any], task: str = "bmr", **more: Any) -> dict[str, Any]:
    """Write records as lines, and return their source."""
    write_file(path, lines(records))
    return {"format": "jsonl", "path": str(path), "task": task, **more}


def jsonl(root: Path, samples: list[Sample]) -> dict[str, Any]:
    write_file(root / "chat.jsonl", lines(with_files(root, samples)))
    return {"format": "jsonl", "path": str(root / "chat.jsonl")}


def jsonl_gz(root: Path, samples: list[Sample]) -> dict[str, Any]:
    write_file(root / "chat.jsonl.gz", gzip.compress(lines(with_files(root, samples))))
    return {"format": "jsonl", "path": str(root)}


def jsonl_zst(root: Path, samples: list[Sample]) -> dict[str, Any]:
    write_file(root / "chat.jsonl.zst", zstd(lines(with_files(root, samples))))
    return {"format": "jsonl", "path": str(root)}


def csv_rows(root: Path, samples: list[Sample]) -> dict[str, Any]:
    write_file(root / "chat.csv", _rows(root, samples))
    return {"format": "csv", "path": str(root)}


def tsv_gz(root: Path, samples: list[Sample]) -> dict[str, Any]:
    content = _rows(root, samples, delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None)
    write_file(root / "chat.tsv.gz", gzip.compress(content))
    return {"format": "tsv", "path": str(root)}


def _rows(root: Path, samples: list[Sample], **dialect: Any) -> bytes:
    """Lists are JSON in their cells."""
    records, text = with_files(root, samples), io.StringIO()
    columns = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.writer(text, **dialect)
    writer.writerow(columns)
    for record in records:
        cells = (record.get(name, "") for name in columns)
        writer.writerow([one if isinstance(one, str) else json.dumps(one) for one in cells])
    return text.getvalue().encode()


def json_array(root: Path, samples: list[Sample]) -> dict[str, Any]:
    """LLaVA's form."""
    records = [
        {**r, "conversations": sharegpt(r.pop("messages"))}
        for r in with_files(root, samples, "image")
    ]
    write_file(root / "llava.json", json.dumps(records, indent=1).encode())
    return {"format": "json", "path": str(root / "llava.json")}


def llama_factory(root: Path, samples: list[Sample]) -> dict[str, Any]:
    write_file(root / "mllm.json", json.dumps(with_files(root, samples)).encode())
    entry = {
        "file_name": "mllm.json",
        "formatting": "sharegpt",
        "columns": {name: name for name in ("messages", "images", "videos")},
        "tags": {f"{name}_tag": name for name in ("role", "content", "user", "assistant")},
    }
    write_json(root / "dataset_info.json", {"mllm": entry, "other": {"hf_hub_url": "x/y"}})
    return {"format": "llama_factory", "path": str(root), "dataset": "mllm"}


def tar_members(samples: list[Sample]) -> list[tuple[str, bytes]]:
    members = []
    for key, messages, images in samples:
        names = [f"img{i}.{suffix_of(image)}" for i, image in enumerate(images)]
        members += [(f"{key}.{name}", image) for name, image in zip(names, images, strict=True)]
        record = json.dumps({"messages": messages, **media_fields(names)}).encode()
        members.append((f"{key}.json", record))
    return members


def webdataset(
    root: Path, samples: list[Sample], suffix: str = "", pack: Callable[[bytes], bytes] = bytes
) -> dict[str, Any]:
    half = len(samples) // 2
    for i, some in enumerate((samples[:half], samples[half:])):
        write_file(root / f"shard-{i:03d}.tar{suffix}", pack(tar_bytes(tar_members(some))))
    return {"format": "webdataset", "path": str(root)}


def webdataset_gz(root: Path, samples: list[Sample]) -> dict[str, Any]:
    return webdataset(root, samples, ".gz", gzip.compress)


def energon(root: Path, samples: list[Sample]) -> dict[str, Any]:
    """A crude dataset, as `energon prepare` describes it."""
    webdataset(root, samples)
    description = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    write_file(root / ".nv-meta" / "dataset.yaml", description.encode())
    split = "split_parts: {train: ['shard-{000..001}.tar'], val: []}\nexclude: []\n"
    write_file(root / ".nv-meta" / "split.yaml", split.encode())
    return {"format": "energon", "path": str(root)}


def table(samples: list[Sample]) -> pa.Table:
    """Rows with images as Hugging Face's Image feature stores them."""
    image = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])
    message = pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())])

    def column(field: str) -> pa.Array:
        cells = [
            [{"bytes": m, "path": None} for m in media if field_of(suffix_of(m)) == field]
            for *_, media in samples
        ]
        return pa.array(cells, pa.list_(image))

    keys, messages, _ = zip(*samples, strict=True)
    media = {name: column(name) for name in ("images", "videos")}
    said = pa.array(messages, pa.list_(message))
    return pa.table({"id": keys, "messages": said, **media, "unused": [1.5] * len(samples)})


def parquet(root: Path, samples: list[Sample]) -> dict[str, Any]:
    root.mkdir(parents=True, exist_ok=True)
    pq.write_table(table(samples), root / "train-00000.parquet", row_group_size=4)
    return {"format": "parquet", "path": str(root)}


def huggingface(root: Path, samples: list[Sample]) -> dict[str, Any]:
    """A folder as `datasets.DatasetDict.save_to_disk` writes it."""
    write_json(root / "dataset_dict.json", {"splits": ["train", "test"]})
    for split, some in (("train", samples), ("test", samples[:1])):
        path = root / split / "data-00000-of-00001.arrow"
        path.parent.mkdir()
        rows = table(some)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=5)
        write_json(root / split / "state.json", {"_data_files": [{"filename": path.name}]})
    return {"format": "huggingface", "path": str(root)}


def pack_members(samples: list[Sample]) -> list[tuple[str, bytes]]:
    """Multi-turn packs as others write them: without meta, images counted over the pack."""
    members: list[tuple[str, bytes]] = []
    for number, start in enumerate(range(0, len(samples), 3)):
        some, count = samples[start : start + 3], 0
        record: dict[str, Any] = {"images": [], "videos": []}
        for _, _, media in some:
            own = []
            for medium in media:
                kind = {"images": "img", "videos": "vid"}[field_of(suffix_of(medium))]
                own.append(f"{kind}{count:03d}.{suffix_of(medium)}")
                members.append((f"ps_{number:08d}.{own[-1]}", medium))
                count += 1
            for field, lists in record.items():
                lists.append([name for name in own if field_of(name) == field])
        if not any(record["videos"]):
            del record["videos"]
        for name, first in (("prompt", 0), ("captions", 1)):
            record[name] = [[m["content"] for m in said[first::2]] for _, said, _ in some]
        members.append((f"ps_{number:08d}.json", json.dumps(record).encode()))
    return members


def packs(root: Path, samples: list[Sample]) -> dict[str, Any]:
    write_file(root / "pretrain-0.tar", tar_bytes(pack_members(samples)))
    return {"format": "packs", "path": str(root)}


def raw_packing_data(root: Path, samples: list[Sample]) -> dict[str, Any]:
    for name, data in pack_members(samples):
        write_file(root / "raw_packing_data" / name, data)
    return {"format": "packs", "path": str(root / "raw_packing_data")}


WRITERS: Mapping[str, Writer] = {
    writer.__name__: writer
    for writer in (
        *(pairs, jsonl, jsonl_gz, jsonl_zst, csv_rows, tsv_gz, json_array, llama_factory),
        *(webdataset, webdataset_gz, energon, parquet, huggingface, packs, raw_packing_data),
    )
}

"""The same samples in every format that a source can have."""

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

from tests.offline_packing.datasets import dialogue, image_bytes, write_json

#: One sample: its name, its messages, its images.
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


def tar_bytes(members: Iterable[tuple[str, bytes]]) -> bytes:
    """An uncompressed tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
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


def suffix_of(image: bytes) -> str:
    """'png' or 'jpg'."""
    return "png" if image.startswith(b"\x89PNG") else "jpg"


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
        named: Any = names if field == "images" else names[0]
        records.append({"id": key, "messages": messages, field: named})
    return records


def pairs(root: Path, samples: list[Sample]) -> dict[str, Any]:
    for key, messages, (image,) in samples:
        write_file(root / f"{key}.{suffix_of(image)}", image)
        write_json(root / f"{key}.json", {"messages": messages})
    return {"format": "pairs", "path": str(root)}


def lines(records: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def jsonl(root: Path, samples: list[Sample]) -> dict[str, Any]:
    write_file(root / "chat.jsonl", lines(with_files(root, samples)))
    return {"format": "jsonl", "path": str(root / "chat.jsonl")}


def jsonl_gz(root: Path, samples: list[Sample]) -> dict[str, Any]:
    write_file(root / "chat.jsonl.gz", gzip.compress(lines(with_files(root, samples))))
    return {"format": "jsonl", "path": str(root)}


def jsonl_zst(root: Path, samples: list[Sample]) -> dict[str, Any]:
    write_file(root / "chat.jsonl.zst", zstd(lines(with_files(root, samples))))
    return {"format": "jsonl", "path": str(root)}


def json_array(root: Path, samples: list[Sample]) -> dict[str, Any]:
    """LLaVA's form."""
    records = [
        {"id": r["id"], "image": r["image"], "conversations": sharegpt(r["messages"])}
        for r in with_files(root, samples, "image")
    ]
    write_file(root / "llava.json", json.dumps(records, indent=1).encode())
    return {"format": "json", "path": str(root / "llava.json")}


def llama_factory(root: Path, samples: list[Sample]) -> dict[str, Any]:
    records = with_files(root, samples)
    write_file(root / "mllm.json", json.dumps(records).encode())
    entry = {
        "file_name": "mllm.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    }
    write_json(root / "dataset_info.json", {"mllm": entry, "other": {"hf_hub_url": "x/y"}})
    return {"format": "llama_factory", "path": str(root), "dataset": "mllm"}


def tar_members(samples: list[Sample]) -> list[tuple[str, bytes]]:
    members = []
    for key, messages, images in samples:
        names = [f"img{i}.{suffix_of(image)}" for i, image in enumerate(images)]
        members += [(f"{key}.{name}", image) for name, image in zip(names, images, strict=True)]
        record = json.dumps({"messages": messages, "images": names}).encode()
        members.append((f"{key}.json", record))
    return members


def _tars(root: Path, samples: list[Sample], suffix: str, pack: Callable[[bytes], bytes]) -> None:
    half = len(samples) // 2
    for i, some in enumerate((samples[:half], samples[half:])):
        write_file(root / f"shard-{i:03d}.tar{suffix}", pack(tar_bytes(tar_members(some))))


def webdataset(root: Path, samples: list[Sample]) -> dict[str, Any]:
    _tars(root, samples, "", bytes)
    return {"format": "webdataset", "path": str(root)}


def webdataset_gz(root: Path, samples: list[Sample]) -> dict[str, Any]:
    _tars(root, samples, ".gz", gzip.compress)
    return {"format": "webdataset", "path": str(root)}


def energon(root: Path, samples: list[Sample]) -> dict[str, Any]:
    """A crude dataset, as `energon prepare` describes it."""
    _tars(root, samples, "", bytes)
    description = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    write_file(root / ".nv-meta" / "dataset.yaml", description.encode())
    split = "split_parts: {train: ['shard-{000..001}.tar'], val: []}\nexclude: []\n"
    write_file(root / ".nv-meta" / "split.yaml", split.encode())
    return {"format": "energon", "path": str(root)}


def table(samples: list[Sample]) -> pa.Table:
    """Rows with images as Hugging Face's Image feature stores them."""
    image = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])
    message = pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())])
    return pa.table(
        {
            "id": [key for key, _, _ in samples],
            "messages": pa.array([messages for _, messages, _ in samples], pa.list_(message)),
            "images": pa.array(
                [[{"bytes": image, "path": None} for image in images] for *_, images in samples],
                pa.list_(image),
            ),
            "unused": [1.5] * len(samples),
        }
    )


def parquet(root: Path, samples: list[Sample]) -> dict[str, Any]:
    root.mkdir(parents=True, exist_ok=True)
    pq.write_table(table(samples), root / "train-00000.parquet", row_group_size=4)
    return {"format": "parquet", "path": str(root)}


def huggingface(root: Path, samples: list[Sample]) -> dict[str, Any]:
    """What `datasets.DatasetDict.save_to_disk` writes."""
    write_json(root / "dataset_dict.json", {"splits": ["train", "test"]})
    for split, some in (("train", samples), ("test", samples[:1])):
        path = root / split / "data-00000-of-00001.arrow"
        path.parent.mkdir()
        rows = table(some)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=5)
        write_json(root / split / "state.json", {"_data_files": [{"filename": path.name}]})
    return {"format": "huggingface", "path": str(root)}


def pack_members(samples: list[Sample], size: int = 3) -> list[tuple[str, bytes]]:
    """Multi-turn packs as others write them: without meta, images counted over the pack."""
    members: list[tuple[str, bytes]] = []
    for number, start in enumerate(range(0, len(samples), size)):
        some = samples[start : start + size]
        names, count = [], 0
        for _, _, images in some:
            own = [f"img{count + i:03d}.{suffix_of(image)}" for i, image in enumerate(images)]
            members += [
                (f"ps_{number:08d}.{name}", image) for name, image in zip(own, images, strict=True)
            ]
            names.append(own)
            count += len(images)
        record = {
            "images": names,
            "prompt": [[m["content"] for m in messages[::2]] for _, messages, _ in some],
            "captions": [[m["content"] for m in messages[1::2]] for _, messages, _ in some],
        }
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
        *(pairs, jsonl, jsonl_gz, jsonl_zst, json_array, llama_factory),
        *(webdataset, webdataset_gz, energon, parquet, huggingface, packs, raw_packing_data),
    )
}

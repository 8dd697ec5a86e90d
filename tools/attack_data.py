"""Damaged records in nine formats, and records and pictures that are meant to cost much; for
tools/attack.py."""

import io
import json
import random
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

#: Records that are as they should be, in each case.
GOOD = 4
Record = tuple[dict[str, Any] | bytes, bytes]  # JSON, or bytes in its place; and a picture


def picture(side: int = 56, image_format: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    """A picture file."""
    buffer = io.BytesIO()
    Image.new(mode, (side, side), 99).save(buffer, image_format, **options)
    return buffer.getvalue()


def good_record(number: int) -> dict[str, Any]:
    """A question and its answer."""
    asked = {"role": "user", "content": f"<image>What is on picture {number}?"}
    return {"messages": [asked, {"role": "assistant", "content": f"A square, {number}."}]}


# Damage of one record.

STRANGE: list[Any] = [
    *(
        None,
        7,
        -1,
        1e308,
        True,
        "",
        " ",
        [],
        {},
        [[]],
        [None],
        {"a": 1},
        "\0",
        "\x1b[31mred\x1b[0m",
    ),
    *(
        "a" * 100_000,
        " " * 300_000,
        "e" + "\u0301" * 3000,
        "<image>" * 50,
        "<|im_end|>",
        "😀" * 999,
    ),
    *("../../etc/passwd", "/dev/zero", "x" * 300, "http://[a.jpg", "data:image/png;base64,AAAA"),
    *(json.loads("[" * 200 + "]" * 200), {"path": {"path": {"url": []}}}, ["a.jpg"] * 5000),
]
FIELDS = "messages images image videos video system tools id text caption answer question extra"


def damage(number: int, rng: random.Random) -> Record:
    """A record with something wrong in its JSON, in its values or in its picture."""
    content, image = good_record(number), picture()
    kind = rng.randrange(5)
    if kind == 0:
        content[rng.choice(FIELDS.split())] = rng.choice(STRANGE)
    elif kind == 1:
        message = rng.choice(content["messages"])
        message[rng.choice(("role", "content", "from", "tool_calls", "weight"))] = rng.choice(
            STRANGE
        )
    elif kind == 2:
        parts = content["messages"]
        content["messages"] = rng.choices(parts, k=rng.randrange(8))
    elif kind == 3:
        return flip(json.dumps(content).encode(), rng), image
    else:
        image = flip(image, rng)
    return content, image


def flip(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut out, doubled or cut off; none of them ends a line."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 3, 30))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    begin, end = sorted((rng.randrange(len(changed)), rng.randrange(len(changed))))
    kind = rng.randrange(5)
    if kind == 0:
        del changed[begin:end]
    elif kind == 1:
        changed[begin:begin] = changed[begin:end]
    elif kind == 2:
        del changed[begin:]
    return bytes(changed).replace(b"\n", b"?").replace(b"\r", b"?")


def as_bytes(content: dict[str, Any] | bytes) -> bytes:
    """JSON, or what stands in its place."""
    return content if isinstance(content, bytes) else json.dumps(content).encode()


def as_value(content: dict[str, Any] | bytes) -> dict[str, Any]:
    """A JSON object also of damaged bytes, as a text, for files whose syntax must hold."""
    if isinstance(content, bytes):
        return {"messages": content.decode(errors="replace")}
    return content


# One writer for each format.


def write_pairs(root: Path, records: list[Record]) -> dict[str, Any]:
    for i, (content, image) in enumerate(records):
        (root / f"{i}.json").write_bytes(as_bytes(content))
        (root / f"{i}.jpg").write_bytes(image)
    return {"format": "pairs", "path": str(root)}


def named(root: Path, records: list[Record]) -> Iterator[dict[str, Any] | bytes]:
    """Records that name a file of their picture."""
    for i, (content, image) in enumerate(records):
        (root / f"{i}.jpg").write_bytes(image)
        yield content if isinstance(content, bytes) else {"images": [f"{i}.jpg"], **content}


def write_jsonl(root: Path, records: list[Record]) -> dict[str, Any]:
    lines = [as_bytes(content) or b"?" for content in named(root, records)]
    (root / "a.jsonl").write_bytes(b"\n".join(lines))
    return {"format": "jsonl", "path": str(root / "a.jsonl")}


def write_json(root: Path, records: list[Record]) -> dict[str, Any]:
    values = [as_value(content) for content in named(root, records)]
    (root / "a.json").write_text(json.dumps(values))
    return {"format": "json", "path": str(root / "a.json")}


def write_llama_factory(root: Path, records: list[Record]) -> dict[str, Any]:
    write_json(root, records)
    columns = {"messages": "messages", "images": "images"}
    entry = {"file_name": "a.json", "formatting": "openai", "columns": columns}
    (root / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    return {"format": "llama_factory", "path": str(root), "dataset": "mine"}


def write_webdataset(root: Path, records: list[Record]) -> dict[str, Any]:
    with tarfile.open(root / "a.tar", "w") as tar:
        for i, (content, image) in enumerate(records):
            for name, data in ((f"{i}.json", as_bytes(content)), (f"{i}.jpg", image)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return {"format": "webdataset", "path": str(root)}


def write_energon(root: Path, records: list[Record]) -> dict[str, Any]:
    write_webdataset(root, records)
    (root / ".nv-meta").mkdir()
    (root / ".nv-meta/dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    )
    (root / ".nv-meta/split.yaml").write_text("split_parts: {train: [a.tar]}\nexclude: []\n")
    return {"format": "energon", "path": str(root)}


def as_table(records: list[Record]) -> pa.Table:
    """Columns of one type each: what is not a text is written as JSON."""

    def text(value: Any) -> bytes:
        return value.encode(errors="replace") if isinstance(value, str) else as_bytes(value)

    asked = [text(as_value(content).get("messages", "")) for content, _ in records]
    answers = [text(as_value(content).get("answer", "A square.")) for content, _ in records]
    columns = {"image": [image for _, image in records], "question": asked, "answer": answers}
    return pa.table({name: pa.array(values, pa.binary()) for name, values in columns.items()})


def write_parquet(root: Path, records: list[Record]) -> dict[str, Any]:
    pq.write_table(as_table(records), root / "a.parquet", row_group_size=100)
    return {"format": "parquet", "path": str(root)}


def write_huggingface(root: Path, records: list[Record]) -> dict[str, Any]:
    table = as_table(records)
    with pa.ipc.new_stream(str(root / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return {"format": "huggingface", "path": str(root)}


def write_text(root: Path, records: list[Record]) -> dict[str, Any]:
    lines = [as_bytes(content).replace(b"\x1c", b"?").strip() or b"?" for content, _ in records]
    (root / "a.txt").write_bytes(b"\n".join(lines))
    return {"format": "text", "path": str(root), "task": "captioning"}


WRITERS: dict[str, Callable[[Path, list[Record]], dict[str, Any]]] = {
    function.__name__.removeprefix("write_"): function
    for function in (
        *(write_pairs, write_json, write_jsonl, write_webdataset, write_energon),
        *(write_llama_factory, write_parquet, write_huggingface, write_text),
    )
}


def damaged_records(name: str, number: int, seed: int) -> list[Record]:
    """Good records, then damaged ones."""
    rng = random.Random(f"{seed} {name}")
    records: list[Record] = [(good_record(i), picture()) for i in range(GOOD)]
    return records + [damage(GOOD + i, rng) for i in range(number)]


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of these chunks."""
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def jpeg_of_scans(side: int, scans: int) -> bytes:
    """A progressive JPEG whose last scan comes many times."""
    data = picture(side, progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * scans + data[-2:]


def image_bombs() -> dict[str, Callable[[], bytes]]:
    """Pictures that cost much more than their size."""
    header = (b"IHDR", struct.pack(">IIBBBBB", 10, 10, 8, 2, 0, 0, 0))
    bombs: dict[str, Callable[[], bytes]] = {}
    for n in (1, 10, 50):
        bombs[f"jpeg_fill_{n}MB"] = lambda n=n: b"\xff\xd8" + b"\xff" * (n << 20) + b"\xff\xd9"
        bombs[f"jpeg_segments_{n}M"] = lambda n=n: (
            b"\xff\xd8" + b"\xff\xe5\0\2" * (n * 160_000) + b"\xff\xd9"
        )
        bombs[f"png_chunks_{n}"] = lambda n=n: png(header) + png((b"abCd", b""))[8:] * (n * 40_000)
        bombs[f"gif_comments_{n}"] = lambda n=n: (
            b"GIF89a" + bytes(7) + b"\x21\xfe" + (b"\xff" + b"c" * 255) * (n * 4000)
        )
    for side in (2000, 4000, 7000):
        bombs[f"scans_300_of_{side}"] = lambda side=side: jpeg_of_scans(side, 300)
    for side in (5000, 9400):
        for image_format, mode in (
            *(("PNG", "RGBA"), ("PNG", "LA"), ("PNG", "P"), ("PNG", "I;16"), ("WEBP", "RGB")),
            *(("WEBP", "RGBA"), ("JPEG", "RGB"), ("JPEG", "CMYK"), ("GIF", "P"), ("TIFF", "RGB")),
        ):
            bombs[f"{image_format}_{mode.replace(';', '')}_{side}"] = (
                lambda f=image_format, m=mode, side=side: picture(
                    side, f, m, **({"lossless": True, "method": 0} if f == "WEBP" else {})
                )
            )
    huge = (b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    bombs["png_60000"] = lambda: png(huge, (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    for side in (7000, 9400):
        bombs[f"progressive_{side}"] = lambda side=side: picture(side, progressive=True)
    return bombs


def text_bombs() -> dict[str, Callable[[], dict[str, Any] | bytes]]:
    """Records that cost much more than their size."""
    bombs: dict[str, Callable[[], dict[str, Any] | bytes]] = {}
    for n in (1, 5, 31):
        m = n * 1_000_000
        for name, text in (("a", "a"), ("space", " "), ("punctuation", "!"), ("emoji", "😀")):
            bombs[f"text_{name}_{n}M"] = lambda t=text, m=m: {
                "text": f"a{t * (m // len(t.encode()))}x"
            }
        bombs[f"text_marks_{n}M"] = lambda m=m: {"text": "a" + "\u0301\u0323" * (m // 4)}
    for n in (40_000, 480_000):
        pair = good_record(0)["messages"]
        bombs[f"messages_{n}"] = lambda n=n, pair=pair: {"messages": pair * (n // 2), "images": []}
        bombs[f"one_picture_{n}"] = lambda n=n: {"images": ["0.jpg"] * n, **good_record(0)}
    bombs["objects"] = lambda: b'{"a": [' + b'{"":0},' * 4_700_000 + b"0]}"
    bombs["nested"] = lambda: b'{"image": ' + b"[" * 1000 + b"]" * 1000 + b', "text": "a"}'
    return bombs

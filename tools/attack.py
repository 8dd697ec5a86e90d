"""Pack damaged records, and files that are meant to cost much, each in a process of its own.

    python -m tools.attack [--records 600] [--seed 0] [--only NAME] [--folder FOLDER]

Each case is a folder with good records among bad ones, given to `run --deep`. A line tells how it
went: exit status, records, packed, set aside (and why, most often), the largest process in MiB,
seconds of CPU and on the clock. A case breaks a bound if its process ends otherwise than with 0 or
1, prints a traceback, loses or doubles a record, or takes more than 1 GiB (of a table: 4 GiB, the
least that a worker may) or 60 s of CPU; then the exit status is 1.
"""

import argparse
import gzip
import io
import json
import multiprocessing
import os
import random
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

MAX_MIB, MAX_TABLE_MIB, MAX_SECONDS = 1024, 4096, 60
#: After this a process is ended.
TIMEOUT = 600
#: Records that are as they should be, in each case.
GOOD = 4
Record = tuple[dict[str, Any] | bytes, bytes]  # JSON, or bytes in its place; and a picture
Options = dict[str, Any]

STRANGE: list[Any] = [
    *(None, 7, -1, 1e308, True, "", " ", [], {}, [[]], [None], {"a": 1}, "\0", "\x1b[31mred"),
    *("a" * 100_000, " " * 300_000, "e" + "\u0301" * 3000, "<image>" * 50, "<|im_end|>"),
    *("../../etc/passwd", "/dev/zero", "x" * 300, "http://[a.jpg", "data:image/png;base64,AAAA"),
    *(json.loads("[" * 200 + "]" * 200), {"path": {"path": {"url": []}}}, ["a.jpg"] * 5000),
]
FIELDS = "messages images image videos video system tools id text caption answer question extra"
MESSAGE_FIELDS = "role content from tool_calls weight"


def picture(side: int = 56, image_format: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    """A picture file."""
    buffer = io.BytesIO()
    Image.new(mode, (side, side), 99).save(buffer, image_format, **options)
    return buffer.getvalue()


def good_record(number: int) -> dict[str, Any]:
    """A question and its answer."""
    asked = {"role": "user", "content": f"<image>What is on picture {number}?"}
    return {"messages": [asked, {"role": "assistant", "content": f"A square, {number}."}]}


def damaged_records(name: str, number: int, seed: int) -> list[Record]:
    """Good records, then some with damage in their JSON, in their values or in their picture."""
    rng = random.Random(f"{seed} {name}")
    records: list[Record] = [(good_record(i), picture()) for i in range(GOOD)]
    for i in range(GOOD, GOOD + number):
        content, image = good_record(i), picture()
        kind = rng.randrange(5)
        if kind == 0:
            content[rng.choice(FIELDS.split())] = rng.choice(STRANGE)
        elif kind == 1:
            message = rng.choice(content["messages"])
            message[rng.choice(MESSAGE_FIELDS.split())] = rng.choice(STRANGE)
        elif kind == 2:
            content["messages"] = rng.choices(content["messages"], k=rng.randrange(8))
        flipped = flip(json.dumps(content).encode(), rng) if kind == 3 else content
        records.append((flipped, flip(image, rng) if kind == 4 else image))
    return records


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
    """JSON, or the bytes that replace it."""
    return content if isinstance(content, bytes) else json.dumps(content).encode()


def as_value(content: dict[str, Any] | bytes) -> dict[str, Any]:
    """A JSON object also of damaged bytes, as a text, for files whose syntax must hold."""
    if isinstance(content, bytes):
        return {"messages": content.decode(errors="replace")}
    return content


# One writer for each format; each returns the options of its source.


def write_pairs(root: Path, records: list[Record]) -> Options:
    for i, (content, image) in enumerate(records):
        (root / f"{i}.json").write_bytes(as_bytes(content))
        (root / f"{i}.jpg").write_bytes(image)
    return {"format": "pairs", "path": str(root)}


def named(root: Path, records: list[Record]) -> Iterator[dict[str, Any] | bytes]:
    """Records that name a file of their picture."""
    for i, (content, image) in enumerate(records):
        (root / f"{i}.jpg").write_bytes(image)
        yield content if isinstance(content, bytes) else {"images": [f"{i}.jpg"], **content}


def write_jsonl(root: Path, records: list[Record]) -> Options:
    lines = [as_bytes(content) or b"?" for content in named(root, records)]
    (root / "a.jsonl").write_bytes(b"\n".join(lines))
    return {"format": "jsonl", "path": str(root / "a.jsonl")}


def write_json(root: Path, records: list[Record]) -> Options:
    values = [as_value(content) for content in named(root, records)]
    (root / "a.json").write_text(json.dumps(values))
    return {"format": "json", "path": str(root / "a.json")}


def write_llama_factory(root: Path, records: list[Record]) -> Options:
    write_json(root, records)
    columns = {"messages": "messages", "images": "images"}
    entry = {"file_name": "a.json", "formatting": "openai", "columns": columns}
    (root / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    return {"format": "llama_factory", "path": str(root), "dataset": "mine"}


def write_webdataset(root: Path, records: list[Record]) -> Options:
    with tarfile.open(root / "a.tar", "w") as tar:
        for i, (content, image) in enumerate(records):
            for name, data in ((f"{i}.json", as_bytes(content)), (f"{i}.jpg", image)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return {"format": "webdataset", "path": str(root)}


def write_energon(root: Path, records: list[Record]) -> Options:
    write_webdataset(root, records)
    (root / ".nv-meta").mkdir()
    (root / ".nv-meta/dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    )
    (root / ".nv-meta/split.yaml").write_text("split_parts: {train: [a.tar]}\nexclude: []\n")
    return {"format": "energon", "path": str(root)}


def write_table(path: Path, columns: dict[str, Any], **options: Any) -> Options:
    """A Parquet file, or an Arrow stream."""
    table = pa.table(columns)
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path, **{"row_group_size": 100, **options})
        return {"format": "parquet", "path": str(path.parent)}
    with pa.ipc.new_stream(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=100)
    return {"format": "huggingface", "path": str(path.parent)}


def as_columns(records: list[Record]) -> dict[str, Any]:
    """Columns of one type each: values other than text are written as JSON."""

    def text(value: Any) -> bytes:
        return value.encode(errors="replace") if isinstance(value, str) else as_bytes(value)

    asked = [text(as_value(content).get("messages", "")) for content, _ in records]
    answers = [text(as_value(content).get("answer", "A square.")) for content, _ in records]
    return {"image": [image for _, image in records], "question": asked, "answer": answers}


def write_parquet(root: Path, records: list[Record]) -> Options:
    return write_table(root / "a.parquet", as_columns(records))


def write_huggingface(root: Path, records: list[Record]) -> Options:
    return write_table(root / "a.arrow", as_columns(records))


def write_text(root: Path, records: list[Record]) -> Options:
    # Without pictures there are no places for them.
    lines = [as_bytes(content).replace(b"<image>", b"(image)") for content, _ in records]
    lines = [line.replace(b"\x1c", b"?").strip() or b"?" for line in lines]
    (root / "a.txt").write_bytes(b"\n".join(lines))
    return {"format": "text", "path": str(root), "task": "captioning"}


WRITERS: dict[str, Callable[[Path, list[Record]], Options]] = {
    function.__name__.removeprefix("write_"): function
    for function in (
        *(write_pairs, write_json, write_jsonl, write_webdataset, write_energon),
        *(write_llama_factory, write_parquet, write_huggingface, write_text),
    )
}


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of these chunks."""
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def png_header(side: int) -> tuple[bytes, bytes]:
    return b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)


def jpeg_of_scans(side: int, scans: int) -> bytes:
    """A progressive JPEG whose last scan comes many times."""
    data = picture(side, progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * scans + data[-2:]


#: Pictures that cost much more than their size,
IMAGE_BOMBS: dict[str, Callable[[], bytes]] = {
    "jpeg_fill": lambda: b"\xff\xd8" + b"\xff" * (50 << 20) + b"\xff\xd9",
    "jpeg_segments": lambda: b"\xff\xd8" + b"\xff\xe5\0\2" * 8_000_000 + b"\xff\xd9",
    "png_chunks": lambda: png(png_header(10)) + png((b"abCd", b""))[8:] * 2_000_000,
    "png_60000": lambda: png(png_header(60_000), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")),
    "gif_comments": lambda: b"GIF89a" + bytes(7) + b"\x21\xfe" + (b"\xff" + b"c" * 255) * 200_000,
    "scans_300_of_7000": lambda: jpeg_of_scans(7000, 300),
    "progressive_9400": lambda: picture(9400, progressive=True),
    "PNG_RGBA_9400": lambda: picture(9400, "PNG", "RGBA"),
    "WEBP_RGBA_9400": lambda: picture(9400, "WEBP", "RGBA", lossless=True, method=0),
    "JPEG_CMYK_9400": lambda: picture(9400, "JPEG", "CMYK"),
    "GIF_P_9400": lambda: picture(9400, "GIF", "P"),
    "TIFF_RGB_9400": lambda: picture(9400, "TIFF", "RGB"),
}
#: and records.
TEXT_BOMBS: dict[str, Callable[[], dict[str, Any] | bytes]] = {
    **{
        f"text_{name}": lambda text=text: {"text": f"a{text * (31_000_000 // len(text.encode()))}x"}
        for name, text in (("a", "a"), ("space", " "), ("emoji", "😀"), ("marks", "\u0301\u0323"))
    },
    "messages": lambda: {"messages": good_record(0)["messages"] * 240_000, "images": []},
    "one_picture": lambda: {"images": ["0.jpg"] * 480_000, **good_record(0)},
    "objects": lambda: b'{"a": [' + b'{"":0},' * 4_700_000 + b"0]}",
    "nested": lambda: b'{"image": ' + b"[" * 1000 + b"]" * 1000 + b', "text": "a"}',
}


def write_lines(root: Path, line: bytes, *, packed: bool) -> Options:
    """500 MB of one line again and again, after good records; perhaps compressed."""
    said = [{"role": role, "content": "Hello"} for role in ("user", "assistant")]
    path = root / ("a.jsonl.gz" if packed else "a.jsonl")
    with gzip.open(path, "wb") if packed else open(path, "wb") as file:
        file.write(b"".join(as_bytes({"messages": said}) + b"\n" for _ in range(GOOD)))
        for _ in range(500):
            file.write(line * ((1 << 20) // len(line)))
    return {"format": "jsonl", "path": str(root)}


def write_cells(root: Path, ending: str, images: Any, **options: Any) -> Options:
    """A table of these pictures, and one of good ones."""
    for name, cells in (("good", [[picture()]] * GOOD), ("large", images)):
        texts = {"question": ["What?"] * len(cells), "answer": ["A square."] * len(cells)}
        source = write_table(root / f"{name}.{ending}", {"images": cells, **texts}, **options)
    return source


def large_cells(megabytes: int, number: int) -> list[list[bytes]]:
    """Rows with a large picture each."""
    return [[picture() + bytes(megabytes << 20)]] * number


def repeated(number: int) -> pa.Array:
    """A row that repeats one value of 1 MiB, which its dictionary holds once."""
    places, entry = pa.array([0] * number, pa.int32()), picture() + bytes(1 << 20)
    values = pa.DictionaryArray.from_arrays(places, pa.array([entry]))
    return pa.ListArray.from_arrays(pa.array([0, number], pa.int32()), values)


PLAIN_PAGES: Options = {"compression": "zstd", "use_dictionary": False}
ONE_DICTIONARY: Options = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30}
#: Tables that cost much more than their size.
TABLE_BOMBS: dict[str, Callable[[Path], Options]] = {
    "table_cells": lambda root: write_cells(root, "parquet", large_cells(100, 12)),
    "table_pages": lambda root: write_cells(root, "parquet", large_cells(10, 100), **PLAIN_PAGES),
    "table_arrow": lambda root: write_cells(root, "arrow", large_cells(100, 12)),
    "table_arrow_zstd": lambda root: write_cells(
        root, "arrow", large_cells(10, 100), compression="zstd"
    ),
    **{
        f"table_{ending}_{number}_same": lambda root, e=ending, n=number: write_cells(
            root, e, repeated(n), **(ONE_DICTIONARY if e == "parquet" else {})
        )
        for ending in ("parquet", "arrow")
        for number in (1000, 3000)
    },
}


def cases(num_records: int, seed: int) -> Iterator[tuple[str, Callable[[Path], Options]]]:
    """Names, and what writes a case into a folder and returns the options of its source."""
    for name, write in WRITERS.items():
        records = damaged_records(name, num_records, seed)
        yield name, lambda root, write=write, records=records: write(root, records)
    good: list[Record] = [(good_record(i), picture()) for i in range(GOOD)]
    for name, make in IMAGE_BOMBS.items():
        yield name, lambda root, make=make: write_pairs(root, [(good_record(0), make()), *good])
    for name, make_text in TEXT_BOMBS.items():
        yield name, lambda root, make=make_text: write_pairs(root, [(make(), picture()), *good])
    yield "gz_zeros", lambda root: write_lines(root, b"\0", packed=True)
    yield "gz_lines", lambda root: write_lines(root, b"\n", packed=True)
    yield "plain_lines", lambda root: write_lines(root, b"\n", packed=False)
    yield "plain_text", lambda root: write_lines(root, b"a" * 64, packed=False)
    yield from TABLE_BOMBS.items()


def attack(name: str, write: Callable[[Path], Options], expected: int | None, root: Path) -> bool:
    """Run one case by the command that people use; whether it keeps its bounds."""
    data, output, path = root / "data", root / "out", root / "run.yaml"
    data.mkdir()
    # In a process of its own: a process's peak memory is inherited by processes that it starts.
    writer = multiprocessing.get_context("fork").Process(
        target=lambda: path.write_text(json.dumps(write(data)))
    )
    writer.start()
    writer.join()
    config = {
        "source": {"task": "bmr", **json.loads(path.read_text())},
        "model": {"max_pixels": 800_000},
        "pack": {"seq_length": 4096, "max_set_aside": 1},
        "output": {"path": str(output)},
        "engine": {"workers": 2 if name in TABLE_BOMBS else int(name in WRITERS)},
    }
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "offline_packing", "run", "--deep", str(path)]
    begin = time.monotonic()
    with open(root / "log", "wb") as file:
        process = subprocess.Popen(["timeout", str(TIMEOUT), *command], stdout=file, stderr=file)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    clock, log = time.monotonic() - begin, (root / "log").read_text(errors="replace")
    manifest = output / "manifest.json"
    counts = json.loads(manifest.read_bytes())["counts"] if manifest.exists() else None
    found = counts or {"samples": 0, "packed": 0, "set_aside": {}}
    samples, packed, aside = found["samples"], found["packed"], sum(found["set_aside"].values())
    mib, cpu = usage.ru_maxrss >> 10, usage.ru_utime + usage.ru_stime
    max_mib = MAX_TABLE_MIB if name in TABLE_BOMBS else MAX_MIB
    checks = {
        f"exit status {process.returncode}": process.returncode not in (0, 1),
        "traceback": any(word in log for word in ("Traceback (most", "panicked")),
        "no manifest: " + " ".join(log.split())[-100:]: counts is None,
        "lost or doubled": samples != packed + aside,
        f"{expected} records were given": counts is not None and samples != (expected or samples),
        "none packed": counts is not None and not packed,
        f"> {max_mib} MiB": mib > max_mib,
        f"> {MAX_SECONDS} s": cpu > MAX_SECONDS,
    }
    broken = "; ".join(problem for problem, is_broken in checks.items() if is_broken)
    why = max(found["set_aside"], key=found["set_aside"].__getitem__, default="-")
    numbers = f"{process.returncode:>3} {samples:>7,} {packed:>7,} {aside:>9,} {why:<16}"
    print(f"{name:<24} {numbers} {mib:>6,} {cpu:>7.1f} {clock:>7.1f}  {broken or '-'}", flush=True)
    return not broken


HEADER = (
    f"{'case':<24} {'rc':>3} {'in':>7} {'packed':>7} {'set aside':>9} {'why':<16} {'MiB':>6} "
    + (f"{'cpu s':>7} {'clock s':>7}  broken")
)


def main(arguments: list[str] | None = None) -> int:
    """Run all cases; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--records", type=int, default=600, help="damaged ones in each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default="", help="cases whose names begin so, separated by commas"
    )
    parser.add_argument("--folder", type=Path, help="where data and outputs are written meanwhile")
    given = parser.parse_args(arguments)
    results: list[bool] = []
    print(HEADER, flush=True)
    for name, write in cases(given.records, given.seed):
        if name.startswith(tuple(given.only.split(","))):
            expected = GOOD + given.records if name in WRITERS else None
            with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
                results.append(attack(name, write, expected, Path(scratch)))
    print(f"{len(results)} cases, {results.count(False)} broke a bound")
    return int(False in results)


if __name__ == "__main__":
    sys.exit(main())

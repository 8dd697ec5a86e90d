"""Pack damaged records, and files that are meant to cost much, each in a process of its own.

    python -m tools.attack [--records 600] [--seed 0] [--only NAME] [--folder FOLDER]

Each case is a folder with good records among bad ones, given to `run --deep`. A line tells how it
went: exit status, records, packed, set aside, the largest process in MiB, seconds of CPU and on the
clock. A case breaks a bound if its process ends otherwise than with 0 or 1, prints a traceback,
loses or doubles a record, or takes more than 1 GiB or 60 s of CPU; then the exit status is 1.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tools.attack_data import (
    GOOD,
    WRITERS,
    as_bytes,
    damaged_records,
    good_record,
    image_bombs,
    picture,
    png,
    text_bombs,
    write_pairs,
)

MAX_MIB, MAX_SECONDS = 1024, 60
#: After this a process is ended.
TIMEOUT = 600
#: Case whose records are all good.
WHOLE_PAGE = "good_1024x300KB"


@dataclass(frozen=True)
class Outcome:
    """End of one process."""

    status: int
    samples: int
    packed: int
    set_aside: int
    mib: int
    cpu: float
    clock: float
    problems: tuple[str, ...]

    def line(self, name: str) -> str:
        """A row of the table."""
        counts = f"{self.samples:>7,} {self.packed:>7,} {self.set_aside:>9,}"
        seconds = f"{self.cpu:>7.1f} {self.clock:>7.1f}"
        problems = "; ".join(self.problems) or "-"
        return f"{name:<24} {self.status:>3} {counts} {self.mib:>6,} {seconds}  {problems}"


HEADER = f"{'case':<24} {'rc':>3} {'in':>7} {'packed':>7} {'set aside':>9} {'MiB':>6} " + (
    f"{'cpu s':>7} {'clock s':>7}  broken"
)


def write_bomb_stream(root: Path, line: bytes, megabytes: int, *, packed: bool) -> dict[str, Any]:
    """A file of one line again and again, after good records; perhaps compressed."""
    good = [as_bytes({**good_record(i), "images": [], "messages": TEXT}) for i in range(GOOD)]
    path = root / ("a.jsonl.gz" if packed else "a.jsonl")
    with gzip.open(path, "wb") if packed else open(path, "wb") as file:
        file.write(b"\n".join(good) + b"\n")
        block = line * ((1 << 20) // len(line))
        for _ in range(megabytes):
            file.write(block)
    return {"format": "jsonl", "path": str(root)}


TEXT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."}]


def write_large_cells(
    root: Path, kind: str, megabytes: int, number: int, *, dictionary: bool
) -> dict[str, Any]:
    """Cells of one row group, after good ones in another."""
    images = [picture() + bytes(megabytes << 20)] * number
    for name, cells in (("good", [picture()] * GOOD), ("large", images)):
        texts = {"question": ["What?"] * len(cells), "answer": ["A square."] * len(cells)}
        table = pa.table({"image": cells, **texts})
        if kind == "parquet":
            pq.write_table(
                table, root / f"{name}.parquet", compression="zstd", use_dictionary=dictionary
            )
        else:
            options = pa.ipc.IpcWriteOptions(compression="zstd" if dictionary else None)
            with pa.ipc.new_stream(root / f"{name}.arrow", table.schema, options=options) as writer:
                writer.write_table(table)
    return {"format": kind, "path": str(root)}


def write_repeated(root: Path, kind: str, form: str, number: int) -> dict[str, Any]:
    """A row with the same value of 1 MiB many times, which the file holds once, after good rows."""
    entry, place = picture() + bytes(1 << 20), pa.array([0] * number, pa.int32())
    values = pa.DictionaryArray.from_arrays(place, pa.array([entry]))
    if form == "view":
        length, prefix = len(entry).to_bytes(4, "little"), entry[:4]
        views = pa.py_buffer((length + prefix + bytes(8)) * number)
        values = pa.Array.from_buffers(pa.binary_view(), number, [None, views, pa.py_buffer(entry)])
    rows = pa.ListArray.from_arrays(pa.array([0, number], pa.int32()), values)
    for name, images in (("good", pa.array([[picture()]] * GOOD)), ("large", rows)):
        texts = {"question": ["What?"] * len(images), "answer": ["A square."] * len(images)}
        table = pa.table({"images": images, **texts})
        path = root / name / f"a.{'parquet' if kind == 'parquet' else 'arrow'}"
        path.parent.mkdir()
        if kind == "parquet":
            pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30)
        else:
            with pa.ipc.new_stream(path, table.schema) as writer:
                writer.write_table(table)
    return {"format": kind, "path": str(root)}


def write_whole_page(root: Path, kilobytes: int) -> dict[str, Any]:
    """Good pictures in a page of 1,024 values, as pyarrow makes them."""
    rng, plain = random.Random(0), picture(image_format="PNG")
    cells = [
        plain[:33] + png((b"abCd", rng.randbytes(kilobytes << 10)))[8:] + plain[33:]
        for _ in range(1024)
    ]
    texts = {"question": ["What?"] * len(cells), "answer": ["A square."] * len(cells)}
    pq.write_table(pa.table({"image": cells, **texts}), root / "good.parquet")
    return {"format": "parquet", "path": str(root)}


def cases(num_records: int, seed: int) -> Iterator[tuple[str, Callable[[Path], dict[str, Any]]]]:
    """Names, and what writes a case into a folder and returns the options of its source."""
    for name, write in WRITERS.items():
        yield (
            name,
            lambda root, name=name, write=write: write(
                root, damaged_records(name, num_records, seed)
            ),
        )
    good = [(good_record(i), picture()) for i in range(GOOD)]
    for name, make_image in image_bombs().items():
        yield (
            name,
            lambda root, make=make_image: write_pairs(root, [(good_record(0), make()), *good]),
        )
    for name, make_text in text_bombs().items():
        yield name, lambda root, make=make_text: write_pairs(root, [(make(), picture()), *good])
    for name, line in (("zeros", b"\0"), ("lines", b"\n"), ("spaces", b" "), ("text", b"a" * 64)):
        for case, packed in (("gz", True), ("plain", False)):
            yield (
                f"{case}_{name}",
                lambda root, line=line, p=packed: write_bomb_stream(root, line, 500, packed=p),
            )
    for megabytes, number in ((100, 3), (100, 12), (10, 100)):
        for kind, case, dictionary in (
            ("parquet", "cells", True),
            ("parquet", "pages", False),
            ("huggingface", "arrow", False),
            ("huggingface", "arrow_zstd", True),
        ):
            yield (
                f"{case}_{number}x{megabytes}MB",
                lambda root, k=kind, m=megabytes, n=number, d=dictionary: write_large_cells(
                    root, k, m, n, dictionary=d
                ),
            )
    for kind, form in (
        ("parquet", "dictionary"),
        ("huggingface", "dictionary"),
        ("huggingface", "view"),
    ):
        yield (
            f"same_{kind}_{form}",
            lambda root, k=kind, f=form: write_repeated(root, k, f, 2000),
        )
    yield WHOLE_PAGE, lambda root: write_whole_page(root, 300)


def write_apart(write: Callable[[Path], dict[str, Any]], root: Path) -> dict[str, Any]:
    """Write a case in a process of its own: a process's memory counts for those that it starts."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    writer = context.Process(target=lambda: sender.send(write(root)))
    writer.start()
    options: dict[str, Any] = receiver.recv()
    writer.join()
    return options


def attack(name: str, options: dict[str, Any], expected: int | None, output: Path) -> Outcome:
    """Run one case by the command that people use."""
    config = {
        "source": {"task": "bmr", **options},
        "model": {"max_pixels": 800_000},
        "pack": {"seq_length": 4096, "max_set_aside": 1},
        "output": {"path": str(output)},
        "engine": {"workers": 1 if name in WRITERS else 0},
    }
    path = output.with_suffix(".yaml")
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "offline_packing", "run", "--deep", str(path)]
    log = output.with_suffix(".log")
    begin = time.monotonic()
    with open(log, "wb") as file:
        bounded = ["timeout", str(TIMEOUT), *command]
        process = subprocess.Popen(bounded, stdout=file, stderr=file)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    clock = time.monotonic() - begin
    least = 1024 if name == WHOLE_PAGE else 1
    return judge(
        process.returncode, usage, clock, log.read_text(errors="replace"), expected, least, output
    )


def judge(
    status: int,
    usage: Any,
    clock: float,
    log: str,
    expected: int | None,
    least: int,
    output: Path,
) -> Outcome:
    """Compare how a process ended with the bounds."""
    manifest = output / "manifest.json"
    counts = json.loads(manifest.read_bytes())["counts"] if manifest.exists() else None
    samples = counts["samples"] if counts else 0
    packed = counts["packed"] if counts else 0
    aside = sum(counts["set_aside"].values()) if counts else 0
    mib, cpu = usage.ru_maxrss >> 10, usage.ru_utime + usage.ru_stime
    checks = {
        f"exit status {status}": status not in (0, 1),
        "traceback": any(word in log for word in ("Traceback (most", "panicked")),
        "no manifest: " + " ".join(log.split())[-100:]: counts is None,
        "lost or doubled": counts is not None and samples != packed + aside,
        f"{expected} records were given": counts is not None and samples != (expected or samples),
        f"fewer than {least} packed": counts is not None and packed < least,
        f"> {MAX_MIB} MiB": mib > MAX_MIB,
        f"> {MAX_SECONDS} s": cpu > MAX_SECONDS,
    }
    problems = tuple(problem for problem, is_broken in checks.items() if is_broken)
    return Outcome(status, samples, packed, aside, mib, cpu, clock, problems)


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
    num_broken = num_run = 0
    print(HEADER, flush=True)
    for name, write in cases(given.records, given.seed):
        if not name.startswith(tuple(given.only.split(","))):
            continue
        with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
            root = Path(scratch) / name
            root.mkdir()
            expected = GOOD + given.records if name in WRITERS else None
            options = write_apart(write, root)
            outcome = attack(name, options, expected, Path(scratch) / "out")
        print(outcome.line(name), flush=True)
        num_run += 1
        num_broken += bool(outcome.problems)
    print(f"{num_run} cases, {num_broken} broke a bound")
    return int(num_broken > 0)


if __name__ == "__main__":
    sys.exit(main())

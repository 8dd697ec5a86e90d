"""Damaged at random, every kind of source still accounts for every record: no crash, no hang, and
what is used can be read again from where the index says it lies."""

import csv
import gzip
import io
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offline_packing.errors import StageError
from tests.helpers import formats
from tests.helpers.accounting import account, open_one

SAMPLES = formats.draw_samples(5, seed=1)
#: damaged files among whole ones, of all formats: FUZZED_SAMPLES=400 takes two CPU minutes
CASES = int(os.environ.get("FUZZED_SAMPLES", "45"))


def cut(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: rng.integers(len(data))]


def flip(data: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(data)
    for place in rng.integers(0, len(data), rng.integers(1, 6)):
        changed[place] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def overwrite(data: bytes, rng: np.random.Generator) -> bytes:
    start = int(rng.integers(len(data)))
    junk = rng.choice([bytes(64), b"\xff" * 64, b'"' * 9, b"[{" * 50, b"\\", b"\n", rng.bytes(99)])
    return data[:start] + junk + data[start + len(junk) :]


def insert(data: bytes, rng: np.random.Generator) -> bytes:
    start = int(rng.integers(len(data)))
    return data[:start] + rng.bytes(int(rng.integers(1, 700))) + data[start:]


def remove(data: bytes, rng: np.random.Generator) -> bytes:
    start = int(rng.integers(len(data)))
    return data[:start] + data[start + int(rng.integers(1, 700)) :]


def repeat(data: bytes, rng: np.random.Generator) -> bytes:
    start, end = sorted(rng.integers(0, len(data), 2).tolist())
    return data[:end] + data[start:]


def zero(data: bytes, rng: np.random.Generator) -> bytes:
    start = int(rng.integers(len(data)))
    size = min(int(rng.integers(1, 5000)), len(data) - start)
    return data[:start] + bytes(size) + data[start + size :]


def flip_end(data: bytes, rng: np.random.Generator) -> bytes:
    """One bit of what may be a footer, an end mark or a checksum."""
    changed = bytearray(data)
    changed[-int(rng.integers(1, min(len(data), 2000) + 1))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def empty(data: bytes, rng: np.random.Generator) -> bytes:
    return b""


def encode(data: bytes, rng: np.random.Generator) -> bytes:
    return data.decode("latin-1").encode(str(rng.choice(["utf-16", "utf-16-be", "utf-32"])))


def end_lines_in_cr(data: bytes, rng: np.random.Generator) -> bytes:
    return data.replace(b"\n", b"\r")


MUTATIONS = (
    cut,
    flip,
    overwrite,
    insert,
    remove,
    repeat,
    zero,
    flip_end,
    empty,
    encode,
    end_lines_in_cr,
)


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
    configs = [formats.WRITERS[name](root / part, SAMPLES[:3]) for part in "xyz"]
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
        mutation = MUTATIONS[rng.integers(len(MUTATIONS))]
        path.write_bytes(mutation(was or b"0", rng))
        what = f"{name} {case}: {mutation.__name__} {path.relative_to(root)}"
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
            is_cr = mutation is end_lines_in_cr and b"\n" in was and path.suffix != ".json"
            if mutation in (empty, encode) or is_cr:
                now = 1  # the file itself
        except Exception:  # noqa: BLE001 - it cannot be counted
            continue
        assert found.total() == total - lost + now, f"{what}: {found}"

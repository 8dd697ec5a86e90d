"""Damaged at random, every kind of source still accounts for every record: no crash, no hang, and
what is used can be read again from where the index says it lies."""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from offline_packing.errors import StageError
from tests.helpers import formats
from tests.helpers.accounting import account, open_one

SAMPLES = formats.draw_samples(5, seed=1)
CASES_PER_FORMAT = 42


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


MUTATIONS = (cut, flip, overwrite, insert, remove, repeat)


def damaged(root: Path, seed: int) -> Iterator[str]:
    """Damage one file, or two; yields what was done."""
    rng = np.random.default_rng(seed)
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size)
    for path in rng.choice(np.array(files, dtype=object), rng.integers(1, 3)):
        mutation = MUTATIONS[rng.integers(len(MUTATIONS))]
        path.write_bytes(mutation(path.read_bytes() or b"0", rng))
        yield f"{mutation.__name__} {path.relative_to(root)}"


@pytest.mark.parametrize("name", formats.WRITERS)
def test_damaged_sources(tmp_path: Path, name: str) -> None:
    config = formats.WRITERS[name](tmp_path / "whole", SAMPLES)
    seen: Counter[str] = Counter()
    for seed in range(CASES_PER_FORMAT):
        root = tmp_path / f"case{seed}"
        shutil.copytree(tmp_path / "whole", root)
        path = config["path"].replace(str(tmp_path / "whole"), str(root))
        done = list(damaged(root, seed))
        try:
            found = account(open_one({**config, "path": path}, tmp_path / f"scratch{seed}"))
        except StageError as error:
            seen["refused: more than a line" if "\n" in str(error) else "refused"] += 1
            continue
        # A file that is one record stays one; of others, damage may make more or fewer.
        assert (len(found) == len(SAMPLES)) if name == "pairs" else found, done
        seen.update(outcome for _, outcome, _ in found)
    assert seen["ok"] > CASES_PER_FORMAT  # most of most datasets is left
    assert set(seen) - {"ok", "refused"}  # and not all that was damaged went unnoticed
    assert "refused: more than a line" not in seen

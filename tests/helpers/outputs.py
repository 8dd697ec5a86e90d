"""Read a packed folder, damage it, and repair it."""

import json
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from offline_packing.index.table import INDEX_VERSION
from offline_packing.runs.run import Run
from offline_packing.storage.files import write_atomically
from offline_packing.storage.receipts import Started, copy_path, load_receipt, receipt_path
from offline_packing.verify.verify import discard
from task_encoders.packs.pack import restore_pack
from task_encoders.samples import SourceSample
from tests.helpers.datasets import pack_all


def shard_files(run: Run) -> dict[str, bytes]:
    """Content of the tars, their indices and the manifest."""
    paths = [*run.workspace.root.glob("*.tar*"), run.workspace.manifest]
    return {path.name: path.read_bytes() for path in paths}


def flip_byte(path: Path, offset: int) -> None:
    """Turn all bits of one byte; a negative offset counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


def flip(path: Path) -> None:
    """Turn one bit of a file; of a database, in a row: its pages have bytes that nothing is read
    from."""
    data = bytearray(path.read_bytes())
    place = data.rindex(b"ps_0000") if path.suffix == ".sqlite" else len(data) // 2
    data[place] ^= 1
    write_atomically(path, bytes(data))


def cut(path: Path) -> None:
    """Leave the first half of a file."""
    data = path.read_bytes()
    write_atomically(path, data[: len(data) // 2])


def sqlite_rows(folder: Path, table: str) -> list[Any]:
    """All rows of a table of Energon's index, sorted."""
    with sqlite3.connect(folder / ".nv-meta" / "index.sqlite") as connection:
        rows = connection.execute(f"SELECT * FROM {table}").fetchall()
    return sorted(rows)


def copy_tars(source: Path, target: Path) -> list[str]:
    """Copy the tars of a folder into a new one; their names."""
    target.mkdir()
    for path in source.glob("*.tar"):
        (target / path.name).write_bytes(path.read_bytes())
    return sorted(path.name for path in target.iterdir())


def members_of(folder: Path, tars: str = "*.tar") -> dict[str, bytes]:
    """Content of the members of a folder's tars, by their names."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob(tars)):
        with tarfile.open(path) as tar:
            found |= {one.name: tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]
    return found


def files_of(folder: Path) -> dict[str, bytes]:
    """Content of all files but locks and verdicts, which hold times, by their paths in a folder."""
    apart = ("lock", "verify.json")
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in apart)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def packs_of(run: Run) -> list[tuple[str, list[str]]]:
    """(split, keys of the samples) of each pack, as the written tars say it."""
    return [
        (path.name.partition("-")[0], json.loads(data)["meta"]["keys"])
        for path in sorted(run.workspace.root.glob("*.tar"))
        for name, data in members_of(path.parent, path.name).items()
        if name.endswith(".json")
    ]


def samples_of(run: Run) -> list[tuple[str, SourceSample, list[bytes]]]:
    """(split, sample, bytes of its media) of each sample, as the written tars hold them."""
    found = []
    for path in sorted(run.workspace.root.glob("*.tar")):
        members = members_of(path.parent, path.name)
        for name in [name for name in members if name.endswith(".json")]:
            key = name.removesuffix(".json")
            for sub in restore_pack(members[name], key).sub_samples:
                assert isinstance(sub, SourceSample)
                media = [members[f"{key}.{one}"] for one in sub.media]
                found.append((path.name.partition("-")[0], sub, media))
    return found


def set_aside_in_plan(run: Run) -> list[dict[str, Any]]:
    """Rows of the plan's set-aside table."""
    return list(pq.read_table(run.workspace.plan / "set_aside.parquet").to_pylist())


def reopen(run: Run, stage: str = "measure") -> None:
    """Leave a stage as if the run had been killed before its receipt."""
    inputs = load_receipt(run.workspace.packing, stage).inputs
    if stage == "measure":
        size = run.config.engine.samples_per_part
        inputs |= {"index.version": INDEX_VERSION, "engine.samples_per_part": size}
    lose_receipt(run, stage)
    Started(inputs).save(run.workspace.packing, stage)


def lose_receipt(run: Run, stage: str = "measure") -> None:
    """Remove the receipt of a stage, and its copy."""
    receipt_path(run.workspace.packing, stage).unlink()
    copy_path(run.workspace.packing, stage).unlink()


def repair(run: Run) -> str:
    """Make again what is damaged or lost; returns what was."""
    found = discard(run)
    pack_all(run)
    return found

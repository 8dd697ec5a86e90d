"""What a packed folder holds, and ways to damage it."""

import sqlite3
from pathlib import Path
from typing import Any

from offline_packing.runs.run import Run


def shard_files(run: Run) -> dict[str, bytes]:
    """Content of the tars, their indices and the manifest."""
    paths = [*run.workspace.root.glob("*.tar*"), run.workspace.manifest]
    return {path.name: path.read_bytes() for path in paths}


def flip_byte(path: Path, offset: int) -> None:
    """Turn all bits of one byte; a negative offset counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


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

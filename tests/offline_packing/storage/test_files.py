"""Files are complete or absent, and reads notice a changed file."""

from pathlib import Path

import pytest

from offline_packing.errors import StageError
from offline_packing.storage.files import (
    atomic_file,
    read_range,
    write_atomically,
)


def test_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomically(path, b"old")

    def interrupted() -> None:
        with atomic_file(path) as file:
            file.write(b"new, but only half of")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_read_range(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    assert read_range(path, 2, 3, whole=False) == b"234"
    assert read_range(path, 0, 10, whole=True) == b"0123456789"
    for size, whole in ((9, True), (11, True), (11, False)):
        with pytest.raises(StageError, match="changed since it was measured: it has 10 bytes"):
            read_range(path, 0, size, whole=whole)
    with pytest.raises(StageError, match="cannot be read: No such file"):
        read_range(tmp_path / "b", 0, 1, whole=False)

"""Files that are complete or absent, local copies, and scratch folders."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from offline_packing.errors import StageError
from offline_packing.storage.files import (
    atomic_file,
    read_each,
    read_range,
    temporary_folder,
    write_atomically,
)
from task_encoders.storage.paths import path_of


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


NAMES = [str(number) for number in range(40)]


def test_objects_are_read_at_the_same_time(tmp_path: Path) -> None:
    """In order, and no more than 16 ahead of their use."""
    folder = path_of(f"memory://{tmp_path.name}")
    for name in NAMES:
        write_atomically(folder / name, name.encode())
    meet, begun = threading.Barrier(16), []

    def read(name: str) -> bytes:
        begun.append(name)
        if len(begun) <= 16:
            meet.wait(60)
        return bytes((folder / name).read_bytes())

    found = read_each(folder, read, NAMES)
    assert next(found) == b"0"
    assert len(begun) <= 17
    assert [b"0", *found] == [name.encode() for name in NAMES]


def test_a_missing_object_is_an_error(tmp_path: Path) -> None:
    folder = path_of(f"memory://{tmp_path.name}")
    write_atomically(folder / "0", b"0")
    found = read_each(folder, lambda name: (folder / name).read_bytes(), NAMES)
    assert next(found) == b"0"
    with pytest.raises(FileNotFoundError):
        next(found)


def test_temporary_folders_of_others_vanish_while_one_is_made() -> None:
    """Threads and processes share the folder they lie in, and each removes its own."""

    def use(number: int) -> None:
        for _ in range(200):
            with temporary_folder() as folder:
                (folder / str(number)).touch()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(use, range(4))) == [None] * 4

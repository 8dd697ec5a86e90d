"""Local copies of files without random access, scratch folders, and parallel reads, for outputs
on a disk or in object storage."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import xxhash

from task_encoders.storage.paths import as_remote
from task_encoders.threads import in_threads

#: Objects that are read at the same time: each takes some 30 ms before its first byte comes.
_AT_ONCE: Final = 16

Item = TypeVar("Item")
Result = TypeVar("Result")


def is_remote(path: Path) -> bool:
    """Whether a path is one of an object storage."""
    return as_remote(path) is not None


def scratch_folder(folder: Path) -> Path:
    """A local folder for what belongs to a folder of an output: itself, or one below TMPDIR. Those
    of folders in `_packing` lie in that of `_packing`, and are removed with it."""
    if not is_remote(folder):
        return folder
    own = Path(tempfile.gettempdir()) / f"offline-packing-{os.getuid()}"
    output, _, below = f"{folder}/".rpartition("/_packing/")
    names = [xxhash.xxh3_64_hexdigest(name.encode()) for name in (output, below) if name]
    return own.joinpath(*names)


@contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """The file itself; of an object a copy of the same name, while the block runs."""
    remote = as_remote(path)
    if remote is None:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        with copy.open("wb") as target:
            remote.download(target)
        yield copy


def read_each(
    folder: Path, read: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[Result]:
    """`map(read, items)`, where each is read from a file in the folder: in object storage, the next
    ones are read meanwhile, in threads."""
    if not is_remote(folder):
        yield from map(read, items)
        return
    yield from in_threads(read, items, _AT_ONCE, ahead=_AT_ONCE)


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it is there, with all that is in it."""
    remote = as_remote(folder)
    if remote is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        remote.remove_tree()

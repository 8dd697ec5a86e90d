"""Local copies of files without random access, scratch folders, and parallel reads, for outputs
on a disk or in object storage."""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
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
    """A local folder for what belongs to a folder of an output: itself, or one in `private_folder`,
    the same for all processes. Those of folders in `_packing` lie in that of `_packing`, and are
    removed with it."""
    if not is_remote(folder):
        return folder
    output, _, below = f"{folder}/".rpartition("/_packing/")
    names = [xxhash.xxh3_64_hexdigest(name.encode()) for name in (output, below) if name]
    return private_folder().joinpath(*names)


def private_folder() -> Path:
    """The user's folder below TMPDIR, made if there is none: its name cannot be guessed, so that
    nobody can make it first, and only the user may enter it."""
    parent, prefix = Path(tempfile.gettempdir()), f"offline-packing-{os.getuid()}-"

    def find() -> list[Path]:
        return sorted(path for path in parent.glob(f"{prefix}*") if _is_private(path))

    found = find()
    if not found:
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        found = find()
        if found[0] != made:  # another process made one meanwhile
            made.rmdir()
    return found[0]


def _is_private(path: Path) -> bool:
    try:
        info = path.lstat()
    except FileNotFoundError:
        return False
    is_own = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()
    return is_own and not stat.S_IMODE(info.st_mode) & 0o077


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder in `private_folder` while the block runs. Folders that killed processes left are
    removed when the next one is made."""
    parent = private_folder()
    with ExitStack() as held:
        with _locked(parent, fcntl.LOCK_EX):
            for left in parent.glob("copy-*"):
                # The lock of a process that died is released. A folder that is in use may be
                # removed meanwhile: whoever made it removes it without the parent's lock.
                with (
                    suppress(BlockingIOError, FileNotFoundError),
                    _locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB),
                ):
                    shutil.rmtree(left)
            folder = Path(tempfile.mkdtemp(prefix="copy-", dir=parent))
            held.enter_context(_locked(folder, fcntl.LOCK_EX))
        held.callback(remove_folder, folder)
        yield folder


@contextmanager
def _locked(folder: Path, operation: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """The file itself; of an object a copy of the same name, while the block runs."""
    remote = as_remote(path)
    if remote is None:
        yield path
        return
    with temporary_folder() as folder:
        copy = folder / path.name
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

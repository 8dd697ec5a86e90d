"""What must be local wherever an output lies: copies of what has no random access, scratch."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from task_encoders.storage.paths import as_remote


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


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it is there, with all that is in it."""
    remote = as_remote(folder)
    if remote is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        remote.remove_tree()

"""Paths of outputs: local, or of an object storage, which have the same methods. And what must be
local wherever an output lies: copies of what has no random access, scratch files."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

from offline_packing.errors import ConfigError
from task_encoders.storage_paths import is_url

if TYPE_CHECKING:
    from offline_packing.storage.remote_paths import RemotePath

#: A URL that lacks a slash, which would be a folder here.
_HALF_URL: Final = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)")


def open_path(text: str) -> Path:
    """A local path; of a URL one with pathlib's methods, see remote_paths.py. Raises ConfigError if
    there is no such storage, its package is not installed, or the URL lacks a slash."""
    half = _HALF_URL.match(text)
    if half:
        raise ConfigError(f"{text!r} lacks a slash; write {half[1]}://{text[half.end() :]}")
    if not is_url(text):
        return Path(text)
    from offline_packing.storage.remote_paths import open_remote

    return open_remote(text)


def as_remote(path: Path) -> "RemotePath | None":
    """The path, if it is one of an object storage."""
    return None if isinstance(path, Path) else path


def is_remote(path: Path) -> bool:
    """Whether a path is one of an object storage."""
    return as_remote(path) is not None


def scratch_folder(folder: Path) -> Path:
    """A local folder for what belongs to a folder of an output: itself, or one below TMPDIR."""
    if not is_remote(folder):
        return folder
    own = Path(tempfile.gettempdir()) / f"offline-packing-{os.getuid()}"
    return own / xxhash.xxh3_64_hexdigest(str(folder).encode())


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

"""Files that are either complete or absent, and reads that notice a changed file."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import xxhash

from offline_packing.errors import StageError

TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when the block ends well: written beside it, synced, renamed."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a whole file, as `atomic_file`."""
    with atomic_file(path) as file:
        file.write(data)


def to_json(content: Any) -> bytes:
    """Readable JSON that is the same for equal content."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(content, option=options | orjson.OPT_SERIALIZE_NUMPY)


def read_json(path: Path) -> Any:
    """The content of one of our JSON files, or None where there is none.

    Raises:
        StageError: it cannot be parsed.
    """
    try:
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except orjson.JSONDecodeError as error:
        raise StageError(f"{path} is damaged: {error}; remove it and run again") from error


def read_range(path: str | Path, offset: int, size: int, *, whole: bool) -> bytes:
    """`size` bytes at `offset`; with `whole`, the file must have exactly that size.

    Raises:
        StageError: the file is gone, shorter, or has another size than when it was measured.
    """
    remedy = "restore it, or measure again with output.overwrite=true"
    try:
        with open(path, "rb", buffering=0) as file:
            actual = os.fstat(file.fileno()).st_size
            if actual < offset + size or (whole and actual != size):
                raise StageError(
                    f"{path} changed since it was measured: it has {actual} bytes, "
                    f"{offset + size} were expected; {remedy}"
                )
            data = os.pread(file.fileno(), size, offset)
    except OSError as error:
        raise StageError(f"{path} cannot be read: {error.strerror}; {remedy}") from error
    if len(data) != size:
        raise StageError(f"{path} became shorter while it was read; {remedy}")
    return data


def hash_bytes(data: bytes) -> str:
    """xxh3_128 in hexadecimal: 33 GB/s, made to find damage, not malice."""
    return xxhash.xxh3_128_hexdigest(data)


def hash_file(path: Path) -> str:
    """xxh3_128 of a file's content."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def remove_temporaries(folder: Path) -> None:
    """Remove what a killed run left half-written in a folder."""
    for path in folder.glob(f"*{TEMPORARY_SUFFIX}"):
        path.unlink()


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file while the block runs. Raises StageError if another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StageError(f"another run is working on {what}; wait for it to end") from error
        yield


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

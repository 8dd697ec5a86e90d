"""Ranges of files; and compressed files, read front to back, or unpacked once for random reads.

A compressed file that is damaged, cut off, or unpacks to an absurd size gives the bytes before
that, and then raises `DamagedStreamError`.
"""

import contextlib
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final

import xxhash

from offline_packing.errors import DiskFullError
from offline_packing.storage.files import atomic_file, remove_temporaries, wait_for_lock
from task_encoders.storage.ranges import RangeFile

#: Suffixes of compressed files to pyarrow's names of the codecs.
CODECS: Final = {"gz": "gzip", "tgz": "gzip", "zst": "zstd"}

#: Suffixes of other compressed files: they are refused, not skipped.
UNREAD_SUFFIXES: Final = (".xz", ".lzma", ".bz2", ".lz4", ".br", ".z")

#: A file may unpack to `_FREE_BYTES` and this many times its size: text has 5 to 50, a bomb 1,000.
MAX_EXPANSION: Final = 200
_FREE_BYTES: Final = 64 << 20
_BLOCK: Final = 1 << 16


class DamagedStreamError(ValueError):
    """A file cannot be read, or not to its end; the text says why and what to do."""


def open_range(file: BinaryIO, begin: int, size: int, *, keep_open: bool = False) -> BinaryIO:
    """Open bytes begin to begin + size of a file as a file, buffered for the many small reads of
    image headers. Closing it closes the file, unless `keep_open`."""

    def read(start: int, end: int) -> bytes:
        file.seek(begin + start)
        return file.read(end - start)

    own = RangeFile(read, size, None if keep_open else file.close)
    return io.BufferedReader(own, 4096)


def size_of(file: BinaryIO) -> int:
    """Return the size of an open file, and keep its position."""
    position, size = file.tell(), file.seek(0, io.SEEK_END)
    file.seek(position)
    return size


def codec_of(name: str) -> str | None:
    """Return the codec of a file by its suffix; None for a plain file."""
    return CODECS.get(name.rpartition(".")[2].lower())


def open_unpacked(file: BinaryIO, name: str) -> BinaryIO:
    """Open a file's content, unpacked if its suffix is in CODECS; closing it closes both."""
    codec = codec_of(name)
    if codec is None:
        return file
    return io.BufferedReader(_UnpackedStream(file, codec), _BLOCK)


class _UnpackedStream(io.RawIOBase):
    """Content in blocks of one size: a damaged file always gives the same bytes before it fails."""

    def __init__(self, file: BinaryIO, codec: str) -> None:
        import pyarrow as pa

        self._file, self._packed_size = file, size_of(file)
        self._stream: Any = pa.CompressedInputStream(pa.PythonFile(file, "r"), codec)
        self._unpacked = 0
        #: the rest of the last block
        self._block = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._block:
            try:
                self._block = memoryview(self._stream.read(_BLOCK))
            except OSError as error:
                raise DamagedStreamError(" ".join(str(error).split())[:200]) from error
            self._unpacked += len(self._block)
            limit = _FREE_BYTES + MAX_EXPANSION * self._packed_size
            if self._unpacked > limit:
                raise DamagedStreamError(
                    f"its {self._packed_size} bytes unpack to more than {limit}; "
                    "if that is meant, unpack it yourself"
                )
        data, self._block = self._block[: len(buffer)], self._block[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._file.close()
        super().close()


def unpack(file: BinaryIO, name: str, target: BinaryIO) -> None:
    """Write the content of a compressed file, of a damaged one the bytes before the damage."""
    with open_unpacked(file, name) as content, contextlib.suppress(DamagedStreamError):
        shutil.copyfileobj(content, target, _BLOCK)


def unpacked_copy(name: str, what: str, folder: Path, write: Callable[[BinaryIO], None]) -> Path:
    """Return a file in `folder` that the first process that needs it writes; others wait, and the
    next one begins again if that is killed. Where there are no locks, several processes may write
    it at once, each to its own temporary file, and rename the same content to the same name.
    `name` is its source with the source's state, `what` the source in messages. Raises
    DiskFullError if the disk is full."""
    path = folder / f"{xxhash.xxh3_128_hexdigest(name.encode(errors='surrogateescape'))}.unpacked"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(path.with_suffix(".lock")):
        if path.exists():
            return path
        remove_temporaries(folder)  # of processes that were killed: they may be large
        try:
            with atomic_file(path) as copy:
                write(copy)
        except DiskFullError as error:
            free = shutil.disk_usage(folder).free
            raise DiskFullError(
                f"no room to unpack {what} to {folder}, {free:,} bytes are free: compressed files "
                "and large row groups are unpacked while packs are written; free some space and "
                "run again, unpack the source yourself, or choose an output.path on another disk"
            ) from error
    return path

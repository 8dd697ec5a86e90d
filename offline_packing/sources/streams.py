"""Compressed files: read from front to back, or unpacked once to be read at any place.

A file that is damaged, cut off, or unpacks beyond all measure gives what lies before that, and then
raises `DamagedStreamError`.
"""

import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final

import xxhash

from offline_packing.files import atomic_file

#: Suffixes of compressed files, and pyarrow's names of the codecs.
CODECS: Final = {"gz": "gzip", "tgz": "gzip", "zst": "zstd"}

#: Suffixes of files that are compressed otherwise: they are refused, not passed over.
UNREAD_SUFFIXES: Final = (".xz", ".lzma", ".bz2", ".lz4", ".br", ".z")

#: Beyond `_FREE_BYTES` a file may unpack to this many times its size: text takes 5 to 50, a bomb
#: 1,000 and more.
MAX_EXPANSION: Final = 200
_FREE_BYTES: Final = 64 << 20
_BLOCK: Final = 1 << 16


class DamagedStreamError(ValueError):
    """What follows in a compressed file or a tar cannot be read."""


def codec_of(name: str) -> str | None:
    """The codec that a file's name tells; None for a plain file."""
    return CODECS.get(name.rpartition(".")[2].lower())


def find_unread(names: Iterable[str], endings: tuple[str, ...]) -> str | None:
    """Why a source cannot be read that has a file with one of these (lower-case) endings."""
    name = next((name for name in names if name.lower().endswith(endings)), None)
    if name is None:
        return None
    return (
        f"holds {name}, compressed in a way that is not read; unpack it, compress it as .gz or "
        ".zst, or move it out of source.path"
    )


def open_unpacked(file: BinaryIO, name: str, packed_size: int) -> BinaryIO:
    """The content of an open file, unpacked if its name says that it is compressed; closing it
    closes the file."""
    codec = codec_of(name)
    if codec is None:
        return file
    return io.BufferedReader(_UnpackedStream(file, codec, packed_size), _BLOCK)


class _UnpackedStream(io.RawIOBase):
    """Unpacks in blocks of one size, so that every reading of a damaged file gives the same bytes
    before it fails, however it is read."""

    def __init__(self, file: BinaryIO, codec: str, packed_size: int) -> None:
        import pyarrow as pa

        self._file = file
        self._stream: Any = pa.CompressedInputStream(pa.PythonFile(file, "r"), codec)
        self._limit = _FREE_BYTES + MAX_EXPANSION * packed_size
        self._packed_size = packed_size
        self._block = b""
        self._position = 0
        self._unpacked = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._position == len(self._block):
            self._next_block()
        data = self._block[self._position : self._position + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _next_block(self) -> None:
        try:
            self._block = self._stream.read(_BLOCK)
        except OSError as error:
            raise DamagedStreamError(" ".join(str(error).split())[:200]) from error
        self._position = 0
        self._unpacked += len(self._block)
        if self._unpacked > self._limit:
            raise DamagedStreamError(
                f"its {self._packed_size} bytes unpack to more than {self._limit}; "
                "if that is meant, unpack it yourself"
            )

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._file.close()
        super().close()


def unpacked_copy(name: str, open_packed: Callable[[], BinaryIO], folder: Path) -> Path:
    """The unpacked content of a compressed file, as a file in `folder`.

    Made where it is missing. Several processes may make it at once: each writes a file of its own,
    and all rename the same content to the same name.

    Args:
        name: of the compressed file, with its suffix; made with another size, it is made anew.
    """
    with open_packed() as file:
        size = file.seek(0, os.SEEK_END)
        path = folder / f"{xxhash.xxh3_64_hexdigest(f'{name}:{size}'.encode())}.unpacked"
        if path.exists():
            return path
        file.seek(0)
        folder.mkdir(parents=True, exist_ok=True)
        with open_unpacked(file, name, size) as content, atomic_file(path) as copy:
            try:
                while block := content.read(_BLOCK):
                    copy.write(block)
            except DamagedStreamError:
                copy.flush()  # what lies before the damage is all that was measured
    return path

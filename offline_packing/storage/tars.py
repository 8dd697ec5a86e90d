"""Shards that are tars, written so that the same packs give the same bytes.

train-000000.tar        one WebDataset sample per pack
train-000000.tar.idx    uint64 little-endian: offset of each pack's first header, and the end
"""

import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import xxhash

from offline_packing.errors import StageError
from offline_packing.storage.files import start_writeback
from offline_packing.storage.tar_members import TarReader
from task_encoders.packs.pack_format import index_of_key
from task_encoders.storage.paths import REMEDY, read_indexed, read_range

_BLOCK: Final = tarfile.BLOCKSIZE
_END: Final = bytes(2 * _BLOCK)
#: Bytes after which those written so far are sent to the disk.
_WRITEBACK_BYTES: Final = 8 << 20

#: Fields of a header that are the same in all: uid and gid, mtime, and what follows the checksum.
_IDS: Final = b"0000000\0" * 2
_TIME: Final = b"00000000000\0"
_FIXED: Final = (b"0" + bytes(100) + b"ustar\x0000").ljust(_BLOCK - 156, b"\0")
_FIXED_SUM: Final = sum(_FIXED) + 8 * ord(" ")

#: Key and part of a member, parted at the first dot of the file name as by WebDataset readers.
_MEMBER: Final = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)")


@dataclass(frozen=True, slots=True)
class Part:
    """One member of a pack: 'img000.jpg', and where its content lies in the tar."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class PackEntry:
    """One pack in a tar: from the header of its first member, padding of its last included."""

    key: str
    offset: int
    size: int
    parts: tuple[Part, ...]


class TarShardWriter:
    """Writes packs to a file: ustar headers without time, owner or permissions of their own."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        #: bytes written
        self.size = 0
        self._sent = 0
        self.entries: list[PackEntry] = []

    def add(self, key: str, members: Sequence[tuple[str, bytes]]) -> None:
        """Append a pack: names of its parts and their content, in order."""
        start = self.size
        parts = []
        for name, data in members:
            self._write(_header(f"{key}.{name}", len(data)))
            parts.append(Part(name, self.size, len(data)))
            self._write(data)
            self._write(bytes(-len(data) % _BLOCK))
        self.entries.append(PackEntry(key, start, self.size - start, tuple(parts)))
        if self.size - self._sent >= _WRITEBACK_BYTES:
            start_writeback(self._file, self._sent, self.size)
            self._sent = self.size

    def finish(self) -> str:
        """Write the end of the archive; returns the xxh3_128 of all bytes."""
        self._write(_END)
        self._write(bytes(-self.size % tarfile.RECORDSIZE))
        return self._digest.hexdigest()

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)


def _header(name: str, size: int) -> bytes:
    """A ustar header without time, owner or permissions of its own: 2 µs, tarfile takes 33,
    which is left the names and sizes that packs do not have."""
    encoded = name.encode()
    if len(encoded) > 100 or size >= 8**11:
        info = tarfile.TarInfo(name)
        info.size, info.mode = size, 0o644
        return info.tobuf(tarfile.USTAR_FORMAT)
    filled = b"%b0000644\0%b%011o\0%b" % (encoded.ljust(100, b"\0"), _IDS, size, _TIME)
    # The checksum counts its own field as eight blanks.
    checksum = sum(filled) + _FIXED_SUM
    return b"%b%06o\0 %b" % (filled, checksum, _FIXED)


def member_size(size: int) -> int:
    """Bytes that a member of this content size takes in a tar."""
    return _BLOCK + size + -size % _BLOCK


def tar_size(content: int) -> int:
    """Bytes of a tar whose members take `content` bytes: end marker and padding included."""
    return -(-(content + len(_END)) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE


def index_bytes(entries: Sequence[PackEntry]) -> bytes:
    """Content of the `.tar.idx` beside a tar."""
    end = entries[-1].offset + entries[-1].size if entries else 0
    return np.array([*(entry.offset for entry in entries), end], dtype="<u8").tobytes()


def scan_tar(path: Path) -> Iterator[PackEntry]:
    """The packs of a tar, in order, by its headers. Raises StageError if it is damaged, or cut."""
    with _damage_named(path), path.open("rb") as file:
        yield from _scan(path, file)


def read_pack(path: Path, key: str) -> tuple[PackEntry, bytes]:
    """A pack of a tar whose packs' keys count up, without reading those before it: its bytes, and
    where they hold what. Raises StageError as `scan_tar`, or if it is not there."""
    with _damage_named(path):
        first = tarfile.TarInfo.frombuf(read_range(path, 0, _BLOCK), "utf-8", "surrogateescape")
        place = index_of_key(key) - index_of_key(first.name.partition(".")[0])
        data = read_indexed(path, path.with_suffix(".tar.idx"), place, 1)
        found = list(_scan(path, io.BytesIO(data + _END)))
    if [entry.key for entry in found] != [key]:
        raise StageError(f"{path} holds no pack {key!r}; {REMEDY}")
    return found[0], data


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, tarfile.TarError) as error:
        raise StageError(f"{path} cannot be read: {error}; write it again") from error


def _scan(path: Path, file: BinaryIO) -> Iterator[PackEntry]:
    key, start, end, parts = "", 0, 0, list[Part]()
    for member in TarReader(file):
        match = _MEMBER.fullmatch(member.name)
        if not member.is_file or match is None:
            raise StageError(f"{path}: member {member.name!r} is no file KEY.PART")
        if match[1] != key and parts:
            yield PackEntry(key, start, end - start, tuple(parts))
            parts = []
        if not parts:
            key, start = match[1], member.header_offset
        parts.append(Part(match[2], member.offset, member.size))
        end = member.offset + member.size + -member.size % _BLOCK
    if parts:
        yield PackEntry(key, start, end - start, tuple(parts))

"""Tar shards, written so that the same packs give the same bytes; and the members of any tar, read
from its headers alone.

train-000000.tar        one WebDataset sample per pack
train-000000.tar.idx    uint64 little-endian: offset of each pack's first header, and the end

Python's tarfile stops silently at a damaged header, or at a tar that was cut at a member's
boundary, keeps every member in memory, and takes three times as long.
"""

import io
import os
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
from offline_packing.storage.streams import DamagedStreamError, size_of
from task_encoders.packs.pack_format import index_of_key
from task_encoders.storage.paths import REMEDY, plain_name, read_range

_BLOCK: Final = tarfile.BLOCKSIZE
_REGULAR: Final = frozenset((b"0", b"\0", b"7"))
#: Kinds of headers before a member's own: a long name, a link's long name, PAX and global fields.
_EXTENSIONS: Final = frozenset((b"L", b"K", b"x", b"g"))
#: The most bytes of a long name or PAX header; more are taken for damage.
_MAX_EXTENSION_BYTES: Final = 1 << 20
_SKIP: Final = 1 << 20
_HEADER: Final = "a header"
_END: Final = bytes(2 * _BLOCK)
#: The number of finished bytes that are sent to the disk at a time.
_WRITEBACK_BYTES: Final = 8 << 20

#: Fields that are the same in all headers: uid and gid, mtime, and what follows the checksum.
_IDS: Final = b"0000000\0" * 2
_TIME: Final = b"00000000000\0"
_FIXED: Final = (b"0" + bytes(100) + b"ustar\x0000").ljust(_BLOCK - 156, b"\0")
_FIXED_SUM: Final = sum(_FIXED) + 8 * ord(" ")

#: Key and part of a member, split at the first dot of the file name as by WebDataset readers.
_MEMBER: Final = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)")


@dataclass(frozen=True, slots=True)
class TarMember:
    """Offsets of one member's header and content, and whether it is a file."""

    name: str
    header_offset: int
    offset: int
    size: int
    is_file: bool


class TarReader:
    """Iterator over the members of a tar, once. Content that `read` does not ask for is skipped, by
    seeking where the file can."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._end = size_of(file) if file.seekable() else None
        self._position = 0
        #: whether the last yielded member was complete
        self.member_complete = True

    def __iter__(self) -> Iterator[TarMember]:
        """Yield the members in order. Raises DamagedStreamError if a header is damaged, or the tar
        ends without its end marker, within a header or within the last yielded member."""
        while True:
            header = self._take(_BLOCK, _HEADER)
            if header == bytes(_BLOCK) and not (header := self._after_end_marker()):
                return
            begin = self._position - _BLOCK
            fields: dict[bytes, bytes] = {}
            while (kind := header[156:157]) in _EXTENSIONS:
                length = self._checked_size(header)
                if length > _MAX_EXTENSION_BYTES:
                    where = f"the header at byte {self._position}"
                    raise DamagedStreamError(f"{where} claims a name of {length} bytes")
                data = self._take(length + -length % _BLOCK, "a long name")[:length]
                if kind == b"L":
                    fields[b"path"] = data.rstrip(b"\0")
                elif kind == b"x":
                    fields |= _pax_fields(data)
                elif kind == b"g":
                    begin = self._position
                header = self._take(_BLOCK, _HEADER)
            size = self._checked_size(header)
            if fields.get(b"size", b"").isdigit():
                size = int(fields[b"size"])
            name = fields.get(b"path", _name(header)).decode("utf-8", "backslashreplace")
            member = TarMember(name, begin, self._position, size, kind in _REGULAR)
            self.member_complete = False
            yield member
            end = member.offset + size
            self._skip_to(end, "a member")
            self.member_complete = True
            self._skip_to(end + -size % _BLOCK, "padding")

    def read(self, member: TarMember) -> bytes:
        """Read the last yielded member. Raises DamagedStreamError if the tar ends before."""
        return self._take(member.size, f"member {member.name!r}")

    def _after_end_marker(self) -> bytes:
        """Read the first header of a tar that was appended (`cat a.tar b.tar`); empty: padding."""
        while block := self._file.read(_BLOCK):
            self._position += len(block)
            if block != bytes(len(block)):
                if len(block) < _BLOCK:
                    raise DamagedStreamError(f"the tar ends with {len(block)} bytes of no member")
                return block
        return b""

    def _take(self, size: int, what: str) -> bytes:
        data = self._file.read(size)
        self._position += len(data)
        if len(data) < size:
            where = f"within {what}" if data or what != _HEADER else "without its end marker"
            raise DamagedStreamError(f"the tar ends {where}, after {self._position} bytes")
        return data

    def _skip_to(self, position: int, what: str) -> None:
        """Skip to a position, which may be after the end."""
        if self._end is not None:
            if position > self._end:
                raise DamagedStreamError(f"the tar ends within {what}, after {self._end} bytes")
            self._file.seek(position)
            self._position = position
        while self._position < position:
            self._take(min(_SKIP, position - self._position), what)

    def _checked_size(self, header: bytes) -> int:
        """Check the checksum of the last header, and return its size."""
        try:
            expected, size = _number(header[148:156]), _number(header[124:136])
        except ValueError:
            expected = size = -1
        if size < 0 or expected != sum(header) - sum(header[148:156]) + 8 * ord(" "):
            raise DamagedStreamError(f"the header at byte {self._position - _BLOCK} is damaged")
        return size


def _number(field: bytes) -> int:
    """Parse octal text, or base 256 where the first bit is set (GNU, for sizes from 8 GiB)."""
    if field[0] & 0x80:
        return int.from_bytes(field, "big") & ~(1 << (8 * len(field) - 1))
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _pax_fields(data: bytes) -> dict[bytes, bytes]:
    """Parse '20 path=a/b.jpg\\n...' to {b'path': b'a/b.jpg'}, up to a malformed record."""
    fields: dict[bytes, bytes] = {}
    while data:
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(data):
            break
        entry, data = data[: int(length)], data[int(length) :]
        name, _, value = entry[len(length) + 1 : -1].partition(b"=")
        fields[name] = value
    return fields


@dataclass(frozen=True, slots=True)
class Part:
    """One member of a pack: 'img000.jpg', and where its content is in the tar."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class PackEntry:
    """One pack in a tar, from its first member's header to its last member's padding."""

    key: str
    offset: int
    size: int
    parts: tuple[Part, ...]


class TarShardWriter:
    """Writer of packs to a file, with ustar headers whose time, owner and permissions are fixed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        #: the number of bytes written
        self.size = 0
        self._sent = 0
        self.entries: list[PackEntry] = []

    def add(self, key: str, members: Sequence[tuple[str, bytes]]) -> None:
        """Append a pack, given the names and content of its parts in order."""
        start = self.size
        parts = []
        for name, data in members:
            self._write(_header(f"{key}.{name}", len(data)))
            parts.append(Part(name, self.size, len(data)))
            self._write(data)
            self._write(bytes(-len(data) % _BLOCK))
        self.entries.append(PackEntry(key, start, self.size - start, tuple(parts)))
        if (unsent := self.size - self._sent) >= _WRITEBACK_BYTES:
            self._file.flush()
            # Linux sends bytes to the disk that are no longer needed; the last sync is then short.
            os.posix_fadvise(self._file.fileno(), self._sent, unsent, os.POSIX_FADV_DONTNEED)
            self._sent = self.size

    def finish(self) -> str:
        """Write the end of the archive, and return the xxh3_128 of all bytes."""
        self._write(_END)
        self._write(bytes(-self.size % tarfile.RECORDSIZE))
        return self._digest.hexdigest()

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)


def _header(name: str, size: int) -> bytes:
    """Return a ustar header with fixed time, owner and permissions, in 2 µs where tarfile takes 33;
    tarfile makes those of long names and of sizes from 8 GiB."""
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
    """Return the bytes that a member with content of `size` bytes takes in a tar."""
    return _BLOCK + size + -size % _BLOCK


def tar_size(content: int) -> int:
    """Return the bytes of a tar whose members take `content` bytes."""
    return -(-(content + len(_END)) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE


def index_bytes(entries: Sequence[PackEntry]) -> bytes:
    """Return the content of a tar's `.tar.idx`."""
    end = entries[-1].offset + entries[-1].size if entries else 0
    return np.array([*(entry.offset for entry in entries), end], dtype="<u8").tobytes()


def scan_tar(path: Path) -> Iterator[PackEntry]:
    """Yield the packs of a tar from its headers. Raises StageError if it is damaged or cut off."""
    with _damage_named(path), path.open("rb") as file:
        yield from _scan(path, file)


def read_pack_entry(path: Path, key: str) -> tuple[PackEntry, bytes]:
    """Return one pack of a tar and its bytes, without reading earlier packs: their keys count up.
    Raises StageError as `scan_tar`, or if the pack is missing."""
    with _damage_named(path):
        first = tarfile.TarInfo.frombuf(read_range(path, 0, _BLOCK), "utf-8", "surrogateescape")
        place = index_of_key(key) - index_of_key(first.name.partition(".")[0])
        index = path.with_suffix(".tar.idx")
        found = read_range(index, 8 * place, 8 * place + 16) if place >= 0 else b""
        if len(found) < 16:
            raise ValueError(f"{index.name} has no place {place}")
        start, end = np.frombuffer(found, "<u8").tolist()
        data = read_range(path, start, end) if start < end else b""
        if not data or len(data) != end - start:
            raise ValueError(f"it has no bytes {start} to {end}, which {index.name} names")
        entries = list(_scan(path, io.BytesIO(data + _END)))
    if [entry.key for entry in entries] != [key]:
        raise StageError(f"{path} holds no pack {key!r}; {REMEDY}")
    return entries[0], data


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, tarfile.TarError) as error:
        raise StageError(f"{path} cannot be read: {error}; write it again") from error


def _scan(path: Path, file: BinaryIO) -> Iterator[PackEntry]:
    key, start, end, parts = "", 0, 0, list[Part]()
    for member in TarReader(file):
        plain_name(member.name.removeprefix("./"))
        match = _MEMBER.fullmatch(member.name)
        if not member.is_file or match is None:
            raise StageError(f"{path}: member {member.name!r} is not a file KEY.PART")
        if match[1] != key and parts:
            yield PackEntry(key, start, end - start, tuple(parts))
            parts = []
        if not parts:
            key, start = match[1], member.header_offset
        parts.append(Part(match[2], member.offset, member.size))
        end = member.offset + member.size + -member.size % _BLOCK
    if parts:
        yield PackEntry(key, start, end - start, tuple(parts))

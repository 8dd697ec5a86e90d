"""The members of any tar, from their headers alone; nothing of a tar is ever extracted.

Python's tarfile stops silently at a damaged header, or at a tar that was cut at a member's
boundary, keeps every member in memory, and takes three times as long.
"""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from offline_packing.storage.streams import DamagedStreamError

_BLOCK: Final = tarfile.BLOCKSIZE
_REGULAR: Final = frozenset((b"0", b"\0", b"7"))
#: Kinds of headers before a member's own: a long name, that of a link, PAX fields, global ones.
_EXTENSIONS: Final = frozenset((b"L", b"K", b"x", b"g"))
#: A longer name or PAX header than this is taken for damage.
_MAX_EXTENSION_BYTES: Final = 1 << 20
_SKIP: Final = 1 << 20
_HEADER: Final = "a header"


@dataclass(frozen=True, slots=True)
class TarMember:
    """One member: where its header begins, where its content lies, and whether it is a file."""

    name: str
    header_offset: int
    offset: int
    size: int
    is_file: bool


class TarReader:
    """Goes through a tar once. A file that can seek is read by its headers; of any other, what
    `read` does not ask for is skipped."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._end = file.seek(0, 2) if file.seekable() else None
        if self._end is not None:
            file.seek(0)
        self._position = 0
        #: whether the member given last was there to its end
        self.member_complete = True

    def __iter__(self) -> Iterator[TarMember]:
        """The members in order. Raises DamagedStreamError if a header is damaged, or the tar ends
        without its end marker, within a header or within the member that was given last."""
        while True:
            header = self._take(_BLOCK, _HEADER)
            if header == bytes(_BLOCK) and not (header := self._behind_end_marker()):
                return
            begin = self._position - _BLOCK
            fields: dict[bytes, bytes] = {}
            while (kind := header[156:157]) in _EXTENSIONS:
                data = self._extension(self._checked_size(header))
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
        """Content of the member given last. Raises DamagedStreamError if the tar ends before."""
        return self._take(member.size, f"member {member.name!r}")

    def _behind_end_marker(self) -> bytes:
        """The first header of a tar joined to this one (`cat a.tar b.tar`); empty: only padding."""
        while block := self._file.read(_BLOCK):
            self._position += len(block)
            if block.strip(b"\0"):
                if len(block) < _BLOCK:
                    raise DamagedStreamError(f"the tar ends with {len(block)} bytes of no member")
                return block
        return b""

    def _extension(self, size: int) -> bytes:
        if size > _MAX_EXTENSION_BYTES:
            raise DamagedStreamError(
                f"the header at byte {self._position} claims a name of {size} bytes"
            )
        return self._take(size + -size % _BLOCK, "a long name")[:size]

    def _take(self, size: int, what: str) -> bytes:
        data = self._file.read(size)
        self._position += len(data)
        if len(data) < size:
            where = f"within {what}" if data or what != _HEADER else "without its end marker"
            raise DamagedStreamError(f"the tar ends {where}, after {self._position} bytes")
        return data

    def _skip_to(self, position: int, what: str) -> None:
        """Skip to a position, which may lie after the end."""
        if self._end is not None:
            if position > self._end:
                raise DamagedStreamError(f"the tar ends within {what}, after {self._end} bytes")
            self._file.seek(position)
            self._position = position
        while self._position < position:
            self._take(min(_SKIP, position - self._position), what)

    def _checked_size(self, header: bytes) -> int:
        """Size in the header read last, whose checksum is right."""
        try:
            expected, size = _number(header[148:156]), _number(header[124:136])
        except ValueError:
            expected = size = -1
        if size < 0 or expected != sum(header) - sum(header[148:156]) + 8 * ord(" "):
            raise DamagedStreamError(f"the header at byte {self._position - _BLOCK} is damaged")
        return size


def _number(field: bytes) -> int:
    """Octal text, or base 256 where the first bit is set (GNU, for sizes from 8 GiB on)."""
    if field[0] & 0x80:
        return int.from_bytes(field, "big") & ~(1 << (8 * len(field) - 1))
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _pax_fields(data: bytes) -> dict[bytes, bytes]:
    """'20 path=a/b.jpg\\n...' -> {b'path': b'a/b.jpg'}; what is malformed ends the reading."""
    fields: dict[bytes, bytes] = {}
    while data:
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(data):
            break
        entry, data = data[: int(length)], data[int(length) :]
        name, _, value = entry[len(length) + 1 : -1].partition(b"=")
        fields[name] = value
    return fields

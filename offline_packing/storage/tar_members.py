"""The members of a tar, from their headers alone; nothing of a tar is ever extracted.

Python's tarfile stops silently at a damaged header, or at a tar that was cut at a member's
boundary, keeps every member in memory, and takes three times as long.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from offline_packing.storage.streams import DamagedStreamError

_BLOCK: Final = 512
_REGULAR: Final = frozenset((b"0", b"\0", b"7"))
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
        self._seekable = file.seekable()
        self._end = file.seek(0, 2) if self._seekable else None
        if self._seekable:
            file.seek(0)
        self._position = 0
        #: whether the member given last was there to its end
        self.member_complete = True

    def __iter__(self) -> Iterator[TarMember]:
        """The members in order.

        Raises:
            DamagedStreamError: a header is damaged, or the tar ends without its end marker, within
                a header or within the content of the member that was given last.
        """
        name: bytes | None = None
        size: int | None = None
        header_offset = 0
        while True:
            if name is None and size is None:
                header_offset = self._position
            header = self._take(_BLOCK, _HEADER)
            if header == bytes(_BLOCK):
                header = self._behind_end_marker()
                if not header:
                    return
                name = size = None
                header_offset = self._position - _BLOCK
            kind, stored = header[156:157], _checked_size(header, self._position - _BLOCK)
            if kind in (b"L", b"x"):
                data = self._extension(stored)
                if kind == b"L":
                    name = data.rstrip(b"\0")
                else:
                    fields = _pax_fields(data)
                    name = fields.get(b"path", name)
                    size = int(fields[b"size"]) if fields.get(b"size", b"").isdigit() else size
                continue
            if kind in (b"K", b"g"):
                self._extension(stored)
                continue
            content = stored if size is None else size
            found = (_name(header) if name is None else name).decode("utf-8", "backslashreplace")
            member = TarMember(found, header_offset, self._position, content, kind in _REGULAR)
            self.member_complete = False
            yield member
            self._skip_over(member)
            name = size = None

    def read(self, member: TarMember) -> bytes:
        """Content of the member given last.

        Raises:
            DamagedStreamError: the tar ends before it does.
        """
        return self._take(member.size, f"member {member.name!r}")

    def _skip_over(self, member: TarMember) -> None:
        end = member.offset + member.size
        self._skip_to(end, "a member")
        self.member_complete = True
        self._skip_to(end + -member.size % _BLOCK, "padding")

    def _behind_end_marker(self) -> bytes:
        """The first header of a tar that was joined to this one (`cat a.tar b.tar`); empty where
        only padding follows."""
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
        data = self._take(size, "a long name")
        self._take(-size % _BLOCK, "a long name")
        return data

    def _take(self, size: int, what: str) -> bytes:
        data = self._file.read(size)
        self._position += len(data)
        if len(data) < size:
            where = f"within {what}" if data or what != _HEADER else "without its end marker"
            raise DamagedStreamError(f"the tar ends {where}, after {self._position} bytes")
        return data

    def _skip_to(self, position: int, what: str) -> None:
        """Go on to a position that may lie behind the end."""
        if self._end is not None:
            if position > self._end:
                raise DamagedStreamError(f"the tar ends within {what}, after {self._end} bytes")
            self._file.seek(position)
            self._position = position
        while self._position < position:
            self._take(min(_SKIP, position - self._position), what)


def _checked_size(header: bytes, offset: int) -> int:
    """Size in a header whose checksum is right."""
    try:
        expected = _number(header[148:156])
        size = _number(header[124:136])
    except ValueError:
        expected = size = -1
    if size < 0 or expected != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise DamagedStreamError(f"the header at byte {offset} is damaged")
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

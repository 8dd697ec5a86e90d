"""Where bytes lie, and reading them there: one function for each kind of place.

kind         container                     offset                           size
file         a file                        0                                of the whole file
bytes        a file                        first byte                       bytes
stream       a .gz or .zst file            first byte, when unpacked        bytes
parquet_row  a Parquet file, `column`      row                              bytes of the value
arrow_row    an Arrow file, `column`       row                              bytes of the value
sub_sample   a tar, or a pack's JSON       first byte of the pack's JSON    bytes of the value
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from offline_packing.errors import StageError
from offline_packing.storage.streams import unpack, unpacked_copy


@dataclass(frozen=True, slots=True)
class Locator:
    """`size` bytes at `offset` of `container`, a POSIX path relative to a root.

    `column` says what of it is meant: of a row, the columns (row_files.py); of a tar's sample, the
    part (webdataset.py); of a pack, "TASK.NUMBER.BYTES": a sub-sample, and the size of the pack's
    JSON. A `stream_sub_sample` is one in a compressed tar.
    """

    kind: str
    container: str
    offset: int
    size: int
    column: str = ""


class Root(Protocol):
    """What reading needs from a root: a folder here or elsewhere."""

    def path(self, container: str) -> str:
        """Path of a file for messages and, where it is local, for opening it."""

    def read_range(self, container: str, offset: int, size: int, *, whole: bool) -> bytes:
        """`size` bytes at `offset`; with `whole`, of a file that has exactly that size.

        Raises:
            StageError: they are not there.
        """

    def open(self, container: str, *, sequential: bool = False) -> BinaryIO:
        """Open a file for reading, perhaps from front to back. Raises SampleError if it may not be
        read."""

    def size(self, file: BinaryIO) -> int:
        """Bytes of an open file."""

    def stamp(self, container: str) -> str:
        """Changes when a file is replaced or written to."""


Reader = Callable[[Root, Locator, Path | None], bytes]


def read_locator(root: Root, locator: Locator, unpack_folder: Path | None = None) -> bytes:
    """The bytes at a locator.

    Args:
        unpack_folder: where a compressed container is unpacked, once, to be read at any place.

    Raises:
        StageError: they are not there, or not as many as there were.
    """
    return READERS[locator.kind](root, locator, unpack_folder)


def _read_file(root: Root, at: Locator, _: Path | None) -> bytes:
    return root.read_range(at.container, 0, at.size, whole=True)


def _read_bytes(root: Root, at: Locator, _: Path | None) -> bytes:
    return root.read_range(at.container, at.offset, at.size, whole=False)


def _read_stream(root: Root, at: Locator, unpack_folder: Path | None) -> bytes:
    if unpack_folder is None:
        raise StageError(f"{root.path(at.container)} is compressed and no unpack_folder is set")
    path = unpacked_file(root, at.container, unpack_folder)
    with open(path, "rb", buffering=0) as file:
        data = os.pread(file.fileno(), at.size, at.offset)
    if len(data) != at.size:
        raise StageError(
            f"{root.path(at.container)} changed since it was measured: it unpacks to less than "
            f"{at.offset + at.size} bytes; measure again with output.overwrite=true"
        )
    return data


def unpacked_file(root: Root, container: str, folder: Path) -> Path:
    """The unpacked content of a compressed file, as a file in `folder`; see `unpacked_copy`."""
    path = root.path(container)

    def write(copy: BinaryIO) -> None:
        with root.open(container, sequential=True) as file:
            unpack(file, container, root.size(file), copy)

    return unpacked_copy(f"{path}\0{root.stamp(container)}", path, folder, write)


def _read_row(root: Root, at: Locator, _: Path | None) -> bytes:
    from offline_packing.sources.reading.row_reader import read_value

    return read_value(root, at.kind, at.container, at.offset, at.column, at.size)


def _read_sub_sample(root: Root, at: Locator, unpack_folder: Path | None) -> bytes:
    from offline_packing.sources.formats.packs import sub_sample_json

    task, number, size = at.column.split(".")
    kind = "stream" if at.kind.startswith("stream") else "bytes"
    pack = read_locator(root, Locator(kind, at.container, at.offset, int(size)), unpack_folder)
    return sub_sample_json(pack, task, int(number), at.size)


READERS: Final[Mapping[str, Reader]] = {
    "file": _read_file,
    "bytes": _read_bytes,
    "stream": _read_stream,
    "parquet_row": _read_row,
    "arrow_row": _read_row,
    "sub_sample": _read_sub_sample,
    "stream_sub_sample": _read_sub_sample,
}

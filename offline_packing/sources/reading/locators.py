"""Where bytes are stored; read.py reads them there.

kind         container                     offset                           size
file         a file                        0                                of the whole file
bytes        a file                        first byte                       bytes
stream       a .gz or .zst file            first byte, when unpacked        bytes
parquet_row  a Parquet file, `column`      row                              bytes of the value
arrow_row    an Arrow file, `column`       row                              bytes of the value
sub_sample   a tar, or a pack's JSON       first byte of the pack's JSON    bytes of the value
"""

from dataclasses import dataclass
from typing import BinaryIO, Protocol


@dataclass(frozen=True, slots=True)
class Locator:
    """`size` bytes at `offset` of `container`, a POSIX path relative to a root.

    `column` says which part is meant: of a row, the columns (row_files.py); of a tar's sample, the
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
            StageError: they do not exist.
        """

    def open(self, container: str, *, sequential: bool = False) -> BinaryIO:
        """Open a file for reading, perhaps sequentially. Raises SampleError if it may not be
        read."""

    def size(self, file: BinaryIO) -> int:
        """Bytes of an open file."""

    def stamp(self, container: str) -> str:
        """Changes when a file is replaced or written to."""

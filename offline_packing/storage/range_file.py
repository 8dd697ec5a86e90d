"""A range of a file, as a file."""

import io
import os
from typing import BinaryIO


class RangeFile(io.RawIOBase):
    """Bytes begin to begin + size of a file, as a file; closing it closes that file, unless it is
    to be kept open."""

    def __init__(self, file: BinaryIO, begin: int, size: int, *, keep_open: bool = False) -> None:
        self._file, self._begin, self._size = file, begin, size
        self._keep_open = keep_open
        self._position = 0

    @classmethod
    def open(cls, file: BinaryIO, begin: int, size: int, *, keep_open: bool = False) -> BinaryIO:
        """A buffered file of the range; image headers are read in many small pieces."""
        return io.BufferedReader(cls(file, begin, size, keep_open=keep_open), 4096)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = min(len(buffer), max(0, self._size - self._position))
        self._file.seek(self._begin + self._position)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self._keep_open:
            self._file.close()
        super().close()

"""Files that are read in parts."""

import io
import os
from collections.abc import Callable


class RangeFile(io.RawIOBase):
    """A file of `size` bytes for reading; `read_range(begin, end)` returns part of them."""

    def __init__(
        self,
        read_range: Callable[[int, int], bytes],
        size: int,
        close: Callable[[], object] | None = None,
    ) -> None:
        self._read_range, self._size, self._close = read_range, size, close
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._take(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return self._take(self._size)

    def close(self) -> None:
        if self._close is not None and not self.closed:
            self._close()
        super().close()

    def _take(self, count: int) -> bytes:
        end = min(self._size, self._position + count)
        if end <= self._position:
            return b""
        data = self._read_range(self._position, end)
        self._position += len(data)
        return data

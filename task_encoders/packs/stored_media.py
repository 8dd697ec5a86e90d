"""Media that stay where they are, which packs refer to by a root's name and a file under the root.

An output keeps the roots apart from its packs, in one small file, so that its data can move.
"""

import os
from typing import NamedTuple

from task_encoders.packs.pack import PackFormatError


class MovedMediumError(PackFormatError):
    """A medium that cannot be read, or is not the one that was packed."""

    @classmethod
    def gone(cls, path: str, why: object) -> "MovedMediumError":
        """It cannot be read."""
        return cls(
            f"{path} cannot be read: {why}; restore it, or if the data moved, say where they are: "
            "offline-packing write CONFIG source.path=NEW (or source.image_root)"
        )

    @classmethod
    def changed(cls, path: str, what: str) -> "MovedMediumError":
        """It has another size or time."""
        return cls(
            f"{path} changed since it was packed ({what}); restore it (cp -a and rsync -t keep "
            "times), or pack again with another output.path"
        )


class StoredMedium(NamedTuple):
    """Address of the bytes of an image or a video."""

    #: absolute, or a URL of fsspec
    path: str
    #: None: it is the whole file
    offset: int | None
    size: int
    #: modification time of the file; 0 of a remote one
    mtime_ns: int

    def read(self) -> bytes:
        """The bytes. Raises MovedMediumError if they no longer exist, or the file has another size
        or was written to."""
        return self._read(self.size)

    def check(self) -> None:
        """Open the file and raise as `read`, by its size and time alone."""
        self._read(0)

    def _read(self, count: int) -> bytes:
        """The first `count` bytes."""
        begin, mtime_ns = self.offset or 0, 0
        try:
            if "://" in self.path:
                data, file_size = _read_remote(self.path, begin, count)
            else:
                with open(self.path, "rb", buffering=0) as file:
                    data = os.pread(file.fileno(), count, begin)
                    found = os.fstat(file.fileno())
                file_size, mtime_ns = found.st_size, found.st_mtime_ns
        except OSError as error:
            raise MovedMediumError.gone(self.path, error.strerror or error) from error
        end = begin + self.size
        if file_size < end or len(data) < count or (self.offset is None and file_size != end):
            raise MovedMediumError.changed(self.path, f"{file_size} bytes, were {end}")
        if mtime_ns != self.mtime_ns:
            raise MovedMediumError.changed(self.path, "another time")
        return data


def _read_remote(url: str, begin: int, count: int) -> tuple[bytes, int]:
    """Bytes of a remote file, and its size."""
    from fsspec.core import url_to_fs

    filesystem, path = url_to_fs(url)
    data = filesystem.cat_file(path, start=begin, end=begin + count) if count else b""
    return data, filesystem.size(path)

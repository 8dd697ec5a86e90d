"""Files under a remote folder, through fsspec: s3://bucket/data, gs://..., memory://...

The packages of the storage (s3fs, gcsfs, ...) and its credentials are fsspec's own affair.
"""

import posixpath
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

from offline_packing.errors import ConfigError, StageError
from task_encoders.samples import SampleError

#: Read ahead of image headers: they lie in the first kilobytes, so more would be read in vain.
_BLOCK: Final = 1 << 16


def is_remote(path: str) -> bool:
    """Whether a path names a storage of fsspec."""
    return "://" in path


class RemoteRoot:
    """A remote folder whose files may be read; the counterpart of MediaRoot."""

    def __init__(self, filesystem: Any, folder: str) -> None:
        self._filesystem = filesystem
        self.folder = folder.rstrip("/")

    @classmethod
    def at(cls, url: str) -> tuple["RemoteRoot", str | None]:
        """The root of a URL; of a file, its folder and its name.

        Raises:
            ConfigError: no such storage, or its package is missing.
            StageError: there is nothing at the URL.
        """
        try:
            from fsspec.core import url_to_fs

            filesystem, path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"source path {url!r} cannot be opened: {error}; install fsspec and the package of "
                "this storage (s3fs, gcsfs, ...)"
            ) from error
        if filesystem.isdir(path):
            return cls(filesystem, path), None
        if not filesystem.isfile(path):
            raise StageError(f"source path {url!r} does not exist; set source.path")
        folder, _, name = path.rpartition("/")
        return cls(filesystem, folder), name

    def path(self, container: str) -> str:
        """URL of a file."""
        return str(self._filesystem.unstrip_protocol(f"{self.folder}/{container}"))

    def locate(self, folder: str, name: str) -> str:
        """Container that `name` means in `folder`. Raises SampleError as MediaRoot.locate does."""
        if not name or "\0" in name:
            raise SampleError("missing_image", f"{name!r} is no file name")
        path = posixpath.normpath(posixpath.join("/", folder, name))
        depth = posixpath.normpath(posixpath.join(folder, name))
        if name.startswith("/") or depth.startswith(".."):
            raise SampleError("path_outside_root", f"{name!r} leads outside {self.folder!r}")
        return path.lstrip("/")

    def open(self, container: str) -> BinaryIO:
        """Open a file for reading. Raises SampleError (missing_image) if there is none."""
        try:
            path = f"{self.folder}/{container}"
            return self._filesystem.open(path, "rb", block_size=_BLOCK)
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            raise SampleError("missing_image", f"{container!r}: {type(error).__name__}") from error

    def size(self, file: BinaryIO) -> int:
        """Bytes of an open file."""
        position = file.tell()
        size = file.seek(0, 2)
        file.seek(position)
        return size

    def stamp(self, container: str) -> str:
        """Changes when a file is replaced or written to."""
        return str(self._filesystem.ukey(f"{self.folder}/{container}"))

    def read(self, container: str, limit: int) -> bytes:
        """A whole file. Raises SampleError as MediaRoot.read does."""
        with self.open(container) as file:
            if self.size(file) > limit:
                raise SampleError("bad_record", f"the JSON is larger than {limit} bytes")
            return file.read()

    def read_range(self, container: str, offset: int, size: int, *, whole: bool) -> bytes:
        """`size` bytes at `offset`. Raises StageError as MediaRoot.read_range does."""
        path = f"{self.folder}/{container}"
        remedy = "restore it, or measure again with output.overwrite=true"
        try:
            data: bytes = self._filesystem.cat_file(path, start=offset, end=offset + size)
            actual = self._filesystem.size(path) if whole else None
        except OSError as error:
            raise StageError(f"{self.path(container)} cannot be read: {error}; {remedy}") from error
        if len(data) != size or (whole and actual != size):
            raise StageError(f"{self.path(container)} changed since it was measured; {remedy}")
        return data

    def entries(self, folder: bytes = b"") -> Iterator[tuple[bytes, int | None]]:
        """(name, size) of what is in a folder (b"" or b"a/b/"); None is the size of a folder. What
        begins with a dot is left out."""
        path = f"{self.folder}/{folder.decode()}".rstrip("/")
        for info in self._filesystem.ls(path, detail=True):
            name = info["name"].rstrip("/").rpartition("/")[2]
            if info["name"].rstrip("/") == path or name.startswith("."):
                continue  # some storages list a folder as its own first entry
            yield name.encode(), None if info["type"] == "directory" else int(info["size"])

    def walk(self) -> Iterator[tuple[str, int]]:
        """(container, size) of every file but those that begin with a dot."""
        for path, info in sorted(self._filesystem.find(self.folder, detail=True).items()):
            container = path[len(self.folder) :].lstrip("/")
            if not any(part.startswith(".") for part in container.split("/")):
                yield container, int(info["size"])

"""Files under a root, and never a file outside it."""

import functools
import io
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import unquote, urlsplit

from offline_packing.storage.files import read_range
from offline_packing.storage.streams import RangeFile
from task_encoders.samples import SampleError

#: Enough for most image headers, in one read.
_BUFFER_BYTES: Final = 4096
#: Components without a dot in front, none of them empty.
_PLAIN_NAME: Final = re.compile(r"[^./][^/]*(?:/[^./][^/]*)*")
_real_folder = functools.lru_cache(maxsize=1024)(os.path.realpath)


class MediaRoot:
    """A folder whose files may be read. Names are POSIX paths; symlinks may not lead outside."""

    def __init__(self, folder: Path) -> None:
        self.folder = os.path.realpath(folder)
        self._inside = self.folder.rstrip("/") + "/"
        #: the folder as it was named, which may lead through links
        self._given = os.path.abspath(folder).rstrip("/") + "/"

    def path(self, container: str) -> str:
        """Path of a file for opening it and for messages."""
        return self._inside + container

    def locate(self, folder: str, name: str) -> str:
        """Container (path relative to the root) of the file that `name` means in `folder`. Raises
        SampleError: path_outside_root, or missing_image for what cannot be a file name."""
        check_name(name)
        if _PLAIN_NAME.fullmatch(name):  # as for most; the rest takes 5 µs
            return f"{folder}/{name}" if folder else name
        if name.startswith("file://"):
            name = unquote(urlsplit(name).path)
        elif "://" in name:
            raise SampleError("missing_image", f"{name[:200]!r} is an address; download it first")
        path = os.path.normpath(os.path.join(self.folder, folder, name))
        if path.startswith(self._given):
            path = self._inside + path[len(self._given) :]
        if not self._holds(path):
            raise SampleError(
                "path_outside_root",
                f"{name!r} leads outside {self.folder!r}; set source.image_root to a folder above",
            )
        return path[len(self.folder) :].lstrip("/")

    def open(self, container: str, *, sequential: bool = False) -> BinaryIO:
        """Open a file for reading; the system itself detects sequential reading. Raises
        SampleError: path_outside_root if a symlink leads outside; missing_image if there is no such
        file, or it is a folder, a pipe or a device, or may not be read."""
        return io.BufferedReader(io.FileIO(self._open(container)), _BUFFER_BYTES)

    def open_range(self, container: str, offset: int, size: int) -> BinaryIO:
        """A file of `size` bytes at `offset` of a file. Raises SampleError as `open`."""
        return RangeFile.open(self.open(container), offset, size)

    def size(self, file: BinaryIO) -> int:
        """Bytes of an open file."""
        return os.fstat(file.fileno()).st_size

    def stamp(self, container: str) -> str:
        """Changes when a file is replaced or written to."""
        found = os.stat(self.path(container))
        return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"

    def read(self, container: str, limit: int) -> bytes:
        """A whole file with a record. Raises SampleError as `open`, but bad_json for missing_image;
        bad_record if it is larger than `limit` bytes."""
        with io.FileIO(self._open(container, "bad_json")) as file:
            if os.fstat(file.fileno()).st_size > limit:
                raise SampleError("bad_record", f"the JSON is larger than {limit} bytes")
            return file.readall()

    def read_range(self, container: str, offset: int, size: int, *, whole: bool) -> bytes:
        """`size` bytes at `offset`; with `whole`, the file must have exactly that size. Raises
        StageError if the file is gone, shorter, or has another size than when it was measured."""
        return read_range(self.path(container), offset, size, whole=whole)

    def list_folder(self, folder: bytes) -> Iterator[tuple[bytes, int | None, int]]:
        """(name, size, modification time in ns) of what is in a folder (b"" or b"a/b/"); None is
        the size of a folder, and those that are links are files. What begins with a dot is left
        out; the order is the file system's own."""
        with os.scandir(os.fsencode(self._inside) + folder) as found:
            for entry in found:
                if entry.name[:1] == b".":
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield entry.name, None, 0
                else:
                    status = _stat(entry)
                    yield entry.name, status.st_size, status.st_mtime_ns

    def entry(self, container: str) -> tuple[str, int, int]:
        """(container, size, modification time in ns) of a file."""
        found = os.stat(self.path(container))
        return container, found.st_size, found.st_mtime_ns

    def _open(self, container: str, missing: str = "missing_image") -> int:
        """A descriptor of a regular file under the root. Raises SampleError as `open`."""
        path = self.path(container)
        try:
            if not self._holds(_real_folder(path.rpartition("/")[0])):
                raise self._outside(path, container, "behind a link")
            descriptor = self._open_here(path, container)
        except OSError as error:
            raise _as_sample_error(container, error, missing) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise SampleError(missing, f"{container!r} is not a regular file")
        return descriptor

    def _open_here(self, path: str, container: str) -> int:
        # Non-blocking: opening a named pipe would wait for a writer.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            return os.open(path, flags | os.O_NOFOLLOW)
        except OSError:
            if not os.path.islink(path):
                raise
        if not self._holds(os.path.realpath(path)):
            raise self._outside(path, container, "a link")
        return os.open(path, flags)

    def _outside(self, path: str, container: str, what: str) -> SampleError:
        target = os.path.realpath(path)
        detail = f"{container!r} is {what} to {target!r}, outside {self.folder!r}"
        return SampleError("path_outside_root", detail)

    def _holds(self, path: str) -> bool:
        return path.startswith(self._inside) or path == self.folder


def check_name(name: str) -> None:
    """Raise SampleError (missing_image) for what cannot be a file name."""
    if not name or "\0" in name:
        raise SampleError("missing_image", f"{name[:60]!r} is no file name")


def _stat(entry: os.DirEntry[bytes]) -> os.stat_result:
    """Status of the file that a link leads to; of the link itself if it is broken."""
    try:
        return entry.stat()
    except OSError:
        return entry.stat(follow_symlinks=False)


def _as_sample_error(container: str, error: OSError, missing: str) -> Exception:
    """Errors of a file: a missing one is the sample's fault, a failing disk is not."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError) or (
        error.strerror in ("File name too long", "Too many levels of symbolic links")
    ):
        return SampleError(missing, f"{container[:300]!r}: {error.strerror}")
    return error

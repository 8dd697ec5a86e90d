"""Files under a root, here or remote, and never a file outside it; and how they are listed.

A `Root` is a folder here, or a RemotePath there: both offer the same. A request takes some 30 ms
however little it asks for, in which a connection brings megabytes. Ranges that are known to be
needed are therefore read ahead, in few requests, several at a time.
"""

import bisect
import errno
import functools
import io
import itertools
import os
import posixpath
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from offline_packing.errors import ChangedError, ConfigError, StageError
from offline_packing.storage.files import read_range, unreadable
from offline_packing.storage.streams import open_range, size_of
from task_encoders.samples import SampleError
from task_encoders.samples.limits import MAX_JSON_BYTES
from task_encoders.storage.paths import StorageError, is_url, open_url, unreachable
from task_encoders.storage.remote_requests import make_request
from task_encoders.threads import in_threads

if TYPE_CHECKING:
    from task_encoders.storage.remote_paths import RemotePath

#: Enough for most image headers, in one read.
_BUFFER_BYTES: Final = 4096
#: Components without a dot in front, none of them empty.
_PLAIN_NAME: Final = re.compile(r"[^./][^/]*(?:/[^./][^/]*)*")
_ABSENT: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_real_folder = functools.lru_cache(maxsize=1024)(os.path.realpath)


class MediaRoot:
    """A folder whose files may be read. Names are POSIX paths; symlinks may not lead outside."""

    def __init__(self, folder: Path) -> None:
        self.folder = os.path.realpath(folder)
        self._inside = self.folder.rstrip("/") + "/"
        #: the folder as it was named, which may lead through links
        self._given = os.path.abspath(folder).rstrip("/") + "/"

    def path(self, container: str) -> str:
        """Return the path of a file, to open it and for messages."""
        return self._inside + container

    def locate(self, folder: str, name: str) -> str:
        """Return the container (path relative to the root) of the file that `name` means in
        `folder`. Raises SampleError: path_outside_root, or missing_image if it cannot be a file
        name."""
        check_name(name)
        if _PLAIN_NAME.fullmatch(name):  # as for most; the rest takes 5 µs
            return f"{folder}/{name}" if folder else name
        if name.startswith("file://"):
            name = unquote(urlsplit(name).path)
        elif "://" in name:
            raise SampleError(
                "missing_image",
                f"{name[:200]!r} is an address; download it first, for example with img2dataset, "
                "and name the file",
            )
        path = os.path.normpath(os.path.join(self.folder, folder, name))
        if path.startswith(self._given):
            path = self._inside + path[len(self._given) :]
        if not self._holds(path):
            raise SampleError("path_outside_root", f"{name!r} leads outside {self.folder!r}")
        return path[len(self.folder) :].lstrip("/")

    def open(self, container: str, *, sequential: bool = False) -> BinaryIO:
        """Open a file for reading; the system itself detects sequential reading. Raises
        SampleError: path_outside_root if a symlink leads outside; missing_image if there is no such
        file, or it is a folder, a pipe or a device, or may not be read."""
        return io.BufferedReader(io.FileIO(self._open(container)), _BUFFER_BYTES)

    def open_range(self, container: str, offset: int, size: int) -> BinaryIO:
        """Open `size` bytes at `offset` of a file. Raises SampleError as `open`."""
        return open_range(self.open(container), offset, size)

    def version(self, container: str) -> str:
        """Return the path of a file with what changes when it is replaced or written to."""
        path = self.path(container)
        found = os.stat(path)
        return f"{path}\0{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"

    def read(self, container: str) -> bytes:
        """Read a whole file with a record. Raises SampleError as `open`, but bad_json for
        missing_image; bad_record if it is larger than MAX_JSON_BYTES."""
        with io.FileIO(self._open(container, "bad_json")) as file:
            if os.fstat(file.fileno()).st_size > MAX_JSON_BYTES:
                raise SampleError("bad_record", f"the JSON is larger than {MAX_JSON_BYTES} bytes")
            return file.readall()

    def read_range(self, container: str, offset: int, size: int, *, whole: bool) -> bytes:
        """Read `size` bytes at `offset`; with `whole`, the file must have exactly that size. Raises
        StageError if the file is gone, shorter, or has another size than when it was measured."""
        return read_range(self.path(container), offset, size, whole=whole)

    def list_folder(self, folder: bytes) -> Iterator[tuple[bytes, int | None, int]]:
        """Yield (name, size, modification time in ns) of the entries of a folder (b"" or b"a/b/");
        folders have size None, and links count as files. Names that begin with a dot are left out;
        the order is the file system's."""
        with os.scandir(os.fsencode(self._inside) + folder) as found:
            for entry in found:
                if entry.name[:1] == b".":
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield entry.name, None, 0
                    continue
                try:
                    status = entry.stat()
                except OSError:  # a broken link
                    status = entry.stat(follow_symlinks=False)
                yield entry.name, status.st_size, status.st_mtime_ns

    def entry(self, container: str) -> tuple[str, int, int]:
        """Return (container, size, modification time in ns) of a file."""
        found = os.stat(self.path(container))
        return container, found.st_size, found.st_mtime_ns

    def _open(self, container: str, missing: str = "missing_image") -> int:
        """Open a regular file under the root, and return its descriptor. Raises SampleError as
        `open`."""
        path = self.path(container)
        # Non-blocking: opening a named pipe would wait for a writer.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        with _missing(container, missing):
            if not self._holds(_real_folder(path.rpartition("/")[0])):
                raise self._outside(path, container, "behind a link")
            try:
                descriptor = os.open(path, flags | os.O_NOFOLLOW)
            except OSError:
                if not os.path.islink(path):
                    raise
                if not self._holds(os.path.realpath(path)):
                    raise self._outside(path, container, "a link") from None
                descriptor = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise SampleError(missing, f"{container!r} is not a regular file")
        return descriptor

    def _outside(self, path: str, container: str, what: str) -> SampleError:
        target = os.path.realpath(path)
        detail = f"{container!r} is {what} to {target!r}, outside {self.folder!r}"
        return SampleError("path_outside_root", detail)

    def _holds(self, path: str) -> bool:
        return path.startswith(self._inside) or path == self.folder


def check_name(name: str) -> None:
    """Raise SampleError (missing_image) for a text that cannot be a file name."""
    if not name or "\0" in name:
        raise SampleError("missing_image", f"{name[:60]!r} is no file name")


@contextmanager
def _missing(container: str, reason: str = "missing_image") -> Iterator[None]:
    """Raise the sample's error where a file is missing; a failing disk or storage is not its
    fault."""
    try:
        yield
    except OSError as error:
        if not (isinstance(error, _ABSENT) or error.errno in (errno.ENAMETOOLONG, errno.ELOOP)):
            raise
        why = error.strerror or type(error).__name__
        raise SampleError(reason, f"{container[:300]!r}: {why}") from error


#: Bytes per request: image headers are in the first kilobytes, so more would be wasted.
_BLOCK: Final = 1 << 14
#: Options to read a file sequentially; two blocks are kept, as members of tars are read
#: again after the next one's header.
_SEQUENTIAL: Final = {
    "block_size": 4 << 20,
    "cache_type": "blockcache",
    "cache_options": {"maxblocks": 2},
}
#: Bytes between two ranges up to which one request reads both. Of ten requests at a time each costs
#: some 3 ms of waiting and 2 ms of processor; at 50 MB/s these bytes take as long.
_MAX_GAP: Final = 1 << 18
#: Bytes that one request reads, unless one range has more.
_MAX_REQUEST: Final = 4 << 20
#: Requests at a time: the number of connections that botocore keeps.
_AT_ONCE: Final = 10


class FileRange(NamedTuple):
    """`size` bytes at `offset` of a file; with `whole`, the file must have exactly that size."""

    container: str
    offset: int
    size: int
    whole: bool

    @property
    def end(self) -> int:
        """End of the requested range: one byte more tells whether the file has grown."""
        return self.offset + self.size + self.whole


class RemoteRoot:
    """A remote folder whose files may be read; the counterpart of MediaRoot."""

    def __init__(self, folder: "RemotePath") -> None:
        self._at = folder
        self.folder = folder.path.rstrip("/")
        self._versions: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._open_file: tuple[str, BinaryIO] | None = None
        #: bytes that were read ahead
        self._held: dict[FileRange, bytes] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave connections out: another process opens its own."""
        return {**self.__dict__, "_versions": {}, "_sizes": {}, "_open_file": None, "_held": {}}

    def path(self, container: str) -> str:
        """Return the URL of a file."""
        return str(self._at.fs.unstrip_protocol(self._path(container)))

    def locate(self, folder: str, name: str) -> str:
        """Return the container that `name` means in `folder`. Raises SampleError as
        MediaRoot.locate does."""
        check_name(name)
        if name.startswith(self.path("")):
            return name.removeprefix(self.path(""))
        path = posixpath.normpath(posixpath.join(folder, name))
        if path.startswith(("/", "..")):
            raise SampleError("path_outside_root", f"{name!r} leads outside {self.folder!r}")
        return path

    def open(self, container: str, *, sequential: bool = False) -> BinaryIO:
        """Open a file for reading. One that is read sequentially is kept open for `open_range`.
        Raises SampleError (missing_image) if there is none."""
        options = _SEQUENTIAL if sequential else {"block_size": _BLOCK}
        options = {} if self._at.protocol == "msc" else options  # it decides itself what to read
        with _missing(container):
            file: BinaryIO = self._at.fs.open(self._path(container), "rb", **options)
        if not sequential:
            return file
        self._open_file = (container, file)
        return self.open_range(container, 0, size_of(file))

    def open_range(self, container: str, offset: int, size: int) -> BinaryIO:
        """Open `size` bytes at `offset` of a file, which is opened once for its ranges in
        succession. Raises SampleError as `open`."""
        if self._open_file is None or self._open_file[0] != container:
            self._open_file = (container, self.open(container))
        return open_range(self._open_file[1], offset, size, keep_open=True)

    def version(self, container: str) -> str:
        """Return the URL of a file as MediaRoot.version does; asked for once per task."""
        if container not in self._versions:
            tag = self._at.fs.ukey(self._path(container))
            self._versions[container] = f"{self.path(container)}\0{tag}"
        return self._versions[container]

    def read(self, container: str) -> bytes:
        """Read a whole file. Raises SampleError as MediaRoot.read does."""
        path = self._path(container)
        with _missing(container, "bad_json"):
            data: bytes = self._at.fs.cat_file(path, start=0, end=MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise SampleError("bad_record", f"the JSON is larger than {MAX_JSON_BYTES} bytes")
        return data

    def read_range(self, container: str, offset: int, size: int, *, whole: bool) -> bytes:
        """Read `size` bytes at `offset`. Raises StageError as MediaRoot.read_range does,
        RemoteError as `make_request` does."""
        wanted = FileRange(container, offset, size, whole)
        if (held := self._held.get(wanted)) is not None:
            return held
        try:
            data = self._fetch(container, offset, wanted.end)
        except OSError as error:
            raise unreadable(self.path(container), error) from error
        if len(data) != size:
            raise ChangedError(self.path(container))
        return data

    def read_ahead(self, ranges: Iterable[FileRange]) -> None:
        """Read ranges for `read_range`, and hold them in place of the last call's. If a range is
        missing or not whole, `read_range` reads it again and fails. Raises RemoteError."""
        self._held = {}
        for found in in_threads(self._fetch_group, neighbors(ranges), _AT_ONCE):
            self._held.update(found)

    def _fetch_group(self, group: list[FileRange]) -> Mapping[FileRange, bytes]:
        """Read neighboring ranges by one request; returns the whole ones."""
        container, start, end = group[0].container, group[0].offset, max(one.end for one in group)
        try:
            data = self._fetch(container, start, end)
        except OSError:
            return {}
        if len(data) > end - start:  # the whole file, from a web server that knows no ranges
            return {}
        parts = {one: data[one.offset - start : one.end - start] for one in group}
        return {one: part for one, part in parts.items() if len(part) == one.size}

    def _fetch(self, container: str, start: int, end: int) -> bytes:
        request = partial(self._at.fs.cat_file, self._path(container), start=start, end=end)
        return bytes(make_request(self.path(container), "read", request))

    def list_folder(self, folder: bytes) -> Iterator[tuple[bytes, int | None, int]]:
        """Yield (name, size, 0) of the entries of a folder (b"" or b"a/b/"); folders have size
        None, and storages do not agree on a modification time. Names that begin with a dot are left
        out. Raises StageError if the storage does not report the size of a file."""
        for name, info in self._at.listing(folder.decode()):
            if not name.startswith("."):
                is_file = info["type"] != "directory"
                yield name.encode(), self._size(info["name"], info["size"]) if is_file else None, 0

    def entry(self, container: str) -> tuple[str, int, int]:
        """Return (container, size, 0) of a file. Raises StageError as `list_folder`."""
        return container, self._size(self._path(container)), 0

    def _size(self, path: str, listed: int | None = None) -> int:
        """Return the size of a file; a plain web server lists names only, and is asked once per
        file."""
        if listed is not None:
            return int(listed)
        if path not in self._sizes:
            if (size := self._at.fs.size(path)) is None:
                raise StageError(
                    f"{self._at.fs.unstrip_protocol(path)}: its server does not report the size of "
                    "the file (Content-Length); download the source, and set source.path to it"
                )
            self._sizes[path] = int(size)
        return self._sizes[path]

    def _path(self, container: str) -> str:
        return f"{self.folder}/{container}"


Root = MediaRoot | RemoteRoot


def neighbors(ranges: Iterable[FileRange]) -> list[list[FileRange]]:
    """Group ranges for one request each: of one file, with small gaps, and not too many bytes."""
    from fsspec.utils import merge_offset_ranges

    wanted = sorted(set(ranges))
    columns = [[getattr(one, name) for one in wanted] for name in ("container", "offset", "end")]
    files, begins, _ = merge_offset_ranges(*columns, max_gap=_MAX_GAP, max_block=_MAX_REQUEST)
    blocks = list(zip(files, begins, strict=True))
    of_block = itertools.groupby(wanted, key=lambda one: bisect.bisect_right(blocks, one[:2]))
    return [list(own) for _, own in of_block]


def open_root(path: str) -> tuple[Root, str | None]:
    """Open the root at a path or URL; of a file, its folder and name. Raises ConfigError if
    its storage is unknown or lacks its package, StageError if it does not exist, or RemoteError."""
    root: type[Root] = RemoteRoot if is_url(path) else MediaRoot
    if not is_url(path):
        at: Any = Path(path)
        is_folder, is_there = at.is_dir(), at.exists()
    else:
        try:
            at = open_url(path)
        except StorageError as error:
            raise ConfigError(f"source path {error}") from error
        try:
            is_folder = at.fs.isdir(at.path)
            is_there = is_folder or at.fs.isfile(at.path)
        except Exception as error:  # every storage has its own: botocore's, google's, aiohttp's
            raise StageError(f"source path {unreachable(path, error)}") from error
    if not is_there:
        raise StageError(f"source path {path!r} does not exist; set source.path")
    return (root(at), None) if is_folder else (root(at.parent), at.name)

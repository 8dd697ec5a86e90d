"""Paths of an object storage, through fsspec: s3://bucket/folder, gs://..., msc://..., memory://...

`RemotePath` has pathlib's methods, so that an output is written and read by one code wherever it
is. An object appears whole or not at all: it is uploaded when it is complete. Requests that fail
are repeated after growing waits, and counted; those that are refused are not.
"""

import errno
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, BinaryIO, Final, cast

import fsspec
from upath.extensions import ProxyUPath

from task_encoders.storage.ranges import RangeFile
from task_encoders.storage.remote_requests import MUST_EXIST, count_attempt, make_request

#: Bytes of a request, unless more are asked for at once.
_BLOCK: Final = 1 << 20
_COPIED: Final = 8 << 20
_S3: Final = ("s3", "s3a")
#: Connections by protocol, options and process. Those that a worker inherits are kept as well: it
#: would close them, and complain.
_FILESYSTEMS: Final[dict[tuple[str, str, int], Any]] = {}


class RemotePath(ProxyUPath):
    """A path of an object storage. Folders are not objects: a folder exists as long as there is an
    object under it, and a missing folder is empty. All methods raise RemoteError if the storage
    refuses a request, or goes on failing it."""

    @property
    def fs(self) -> Any:
        """This process's file system of fsspec, with the options in the URL."""
        key = (self.protocol, str(self.storage_options), os.getpid())
        if key not in _FILESYSTEMS:
            # Listings that are kept would hide what other processes write.
            options = {**self.storage_options, "use_listings_cache": False}
            filesystem = fsspec.filesystem(self.protocol, **options)
            if self.protocol in _S3:
                filesystem.s3.meta.events.register("needs-retry.s3", count_attempt)
            _FILESYSTEMS[key] = filesystem
        return _FILESYSTEMS[key]

    def exists(self, **options: Any) -> bool:
        return bool(self._info())

    def is_file(self, **options: Any) -> bool:
        return self._info().get("type") == "file"

    def is_dir(self, **options: Any) -> bool:
        return self._info().get("type") == "directory"

    def stat(self, **options: Any) -> Any:
        if not (info := self._info()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return os.stat_result((0, 0, 0, 0, 0, 0, int(info["size"]), 0, 0, 0))

    def iterdir(self) -> Iterator[Any]:
        """List the entries of the folder, by name, from one listing."""
        return (self / name for name in sorted({name for name, _ in self.listing()}))

    def listing(self, below: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield (name, what the storage tells) of the entries of the folder, or one below it, from
        one listing."""
        path = f"{self.path.rstrip('/')}/{below}".rstrip("/")
        for one in self._request("listed", lambda: self.fs.ls(path, detail=True), default=()):
            if one["name"].strip("/") != path.strip("/"):  # as some storages list the folder itself
                yield one["name"].rstrip("/").rpartition("/")[2], one

    def tags(self) -> Iterator[tuple[str, int, str]]:
        """Yield (name, size, ETag) of the objects in the folder itself, from one listing; the ETag
        is empty if the storage gives none."""
        for name, one in self.listing():
            if one["type"] == "file":
                tag = one.get("ETag") or one.get("etag") or ""  # s3fs and msc, or others
                yield name, int(one["size"]), str(tag)

    def glob(self, pattern: str, **options: Any) -> Iterator[Any]:
        """Find entries of the folder itself that have such a name."""
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def rglob(self, pattern: str, **options: Any) -> Iterator[Any]:
        """Find the objects under the folder that have such a name."""
        found = self._request("listed", lambda: self.fs.find(self.path), default=())
        start = len(self.path.rstrip("/")) + 1
        paths = (self / name[start:] for name in sorted(found) if name[start:])
        return (path for path in paths if fnmatchcase(path.name, pattern))

    def open(self, mode: str = "r", buffering: int = -1, *arguments: Any, **options: Any) -> Any:
        """Open the object as a file for reading."""
        if mode != "rb":
            raise NotImplementedError(f"{self} is written whole, by atomic_file")
        size = self.stat().st_size
        if size <= _BLOCK:  # without a range, s3fs would ask for the size again
            return io.BytesIO(self.read_range(0, size) if size else b"")
        return io.BufferedReader(
            RangeFile(self.read_range, size), buffering if buffering > 0 else _BLOCK
        )

    def read_bytes(self) -> bytes:
        return bytes(self._request("read", lambda: self.fs.cat_file(self.path)))

    def read_text(self, *arguments: Any, **options: Any) -> str:
        return self.read_bytes().decode()

    def read_range(self, begin: int, end: int) -> bytes:
        """Read the bytes [begin, end), fewer if the object ends before."""
        fetched = self._request("read", lambda: self.fs.cat_file(self.path, start=begin, end=end))
        return bytes(fetched)

    def mkdir(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: a folder comes with its first object."""

    def rmdir(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: a folder goes with its last object."""

    def unlink(self, missing_ok: bool = False) -> None:
        self._request("removed", lambda: self.fs.rm_file(self.path), default=missing_ok)

    def remove_tree(self) -> None:
        """Remove all that is under it."""
        self._request("removed", lambda: self.fs.rm(self.path, recursive=True), default=True)

    @contextmanager
    def uploaded(self) -> Iterator[BinaryIO]:
        """Open a local file without a name, which becomes the object if the block succeeds. A large
        one is sent in parts, of which the storage makes the object when it has all of them."""
        with tempfile.TemporaryFile() as file:
            yield cast(BinaryIO, file)
            file.flush()
            options: dict[str, Any] = {}  # which differ between storages
            if self.protocol in _S3:
                # 50 MiB, or as the variable FSSPEC_S3 says; S3 takes 10,000 parts.
                size = os.fstat(file.fileno()).st_size
                options = {"chunksize": max(self.fs.default_block_size, -(-size // 10_000))}
            elif self.protocol in ("abfs", "abfss", "az"):
                options = {"overwrite": True}
            name = f"/proc/self/fd/{file.fileno()}"
            self._request("written", lambda: self.fs.put_file(name, self.path, **options))

    def download(self, target: BinaryIO) -> None:
        """Copy the object to a file."""
        with self.open("rb", _COPIED) as source:
            shutil.copyfileobj(source, target, _COPIED)

    def replace(self, target: Any) -> Any:
        """Rename the object, which another of that name gives way to."""
        self._request("copied", lambda: self.fs.cp_file(self.path, target.path))
        self.unlink()
        return target

    def abort_uploads(self) -> int:
        """Abort the uploads under this folder that killed runs left; returns their number. Nobody
        else may be writing there. Storages other than S3 do so themselves."""
        if self.protocol not in _S3:
            return 0
        bucket, _, folder = self.path.partition("/")

        def call(method: str, **asked: str) -> Mapping[str, Any]:
            """Ask S3; returns an empty answer if the upload does not exist any more."""
            request = partial(self.fs.call_s3, method, Bucket=bucket, **asked)
            return cast(Mapping[str, Any], self._request("cleaned", request, default={}))

        count, asked = 0, {"Prefix": f"{folder}/"} if folder else {}
        while True:
            page = call("list_multipart_uploads", **asked)
            for one in page.get("Uploads", ()):
                call("abort_multipart_upload", Key=one["Key"], UploadId=one["UploadId"])
                count += 1
            if not page.get("IsTruncated"):
                return count
            asked |= {name: page[f"Next{name}"] for name in ("KeyMarker", "UploadIdMarker")}

    def _info(self) -> Mapping[str, Any]:
        """Ask what the storage tells of an object or a folder; nothing if there is none."""
        request = partial(self.fs.info, self.path)
        return cast(Mapping[str, Any], self._request("read", request, default={}))

    def _request(self, done: str, request: Callable[[], Any], default: Any = MUST_EXIST) -> Any:
        return make_request(str(self), done, request, default)

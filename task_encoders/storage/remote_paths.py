"""Paths of an object storage, through fsspec: s3://bucket/folder, gs://..., msc://..., memory://...

`RemotePath` has pathlib's methods, so that an output is written and read by one code wherever it
lies. An object appears whole or not at all: it is uploaded when it is complete. Requests that fail
are repeated after growing waits, and counted; those that are refused are not.
"""

import errno
import functools
import io
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import fsspec
from upath.extensions import ProxyUPath

from task_encoders.storage.ranges import RangeFile
from task_encoders.storage.remote_requests import MUST_EXIST, count_attempt, make_request

#: Bytes of a request, unless more are asked for at once.
_BLOCK: Final = 1 << 20
_COPIED: Final = 8 << 20
_S3: Final = ("s3", "s3a")


class RemotePath(ProxyUPath):
    """A path of an object storage. Folders are not objects: a folder exists as long as there is an
    object under it, and a missing folder is empty. All methods raise RemoteError if the storage
    refuses a request, or goes on failing it."""

    @property
    def fs(self) -> Any:
        return _filesystem(self.protocol, os.getpid())

    def exists(self, **options: Any) -> bool:
        return self._info() is not None

    def is_file(self, **options: Any) -> bool:
        info = self._info()
        return info is not None and info["type"] == "file"

    def is_dir(self, **options: Any) -> bool:
        info = self._info()
        return info is not None and info["type"] == "directory"

    def stat(self, **options: Any) -> Any:
        info = self._info()
        if info is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return os.stat_result((0, 0, 0, 0, 0, 0, int(info["size"]), 0, 0, 0))

    def iterdir(self) -> Iterator[Any]:
        """Entries of the folder, by name, from one listing."""
        found = self._request("listed", lambda: self.fs.ls(self.path, detail=False), default=())
        names = {name.rstrip("/").rpartition("/")[2] for name in found if not self._is_self(name)}
        return (self / name for name in sorted(names))

    def tags(self) -> Iterator[tuple[str, int, str]]:
        """(name, size, ETag) of the objects in the folder itself, from one listing; the ETag is
        empty if the storage gives none."""
        for one in self._request("listed", lambda: self.fs.ls(self.path, detail=True), default=()):
            if one["type"] == "file" and not self._is_self(one["name"]):
                tag = one.get("ETag") or one.get("etag") or ""  # s3fs and msc, or others
                yield one["name"].rpartition("/")[2], int(one["size"]), str(tag)

    def glob(self, pattern: str, **options: Any) -> Iterator[Any]:
        """Entries of the folder itself that have such a name."""
        return (path for path in self.iterdir() if fnmatchcase(path.name, pattern))

    def rglob(self, pattern: str, **options: Any) -> Iterator[Any]:
        """The objects under the folder that have such a name."""
        found = self._request("listed", lambda: self.fs.find(self.path), default=())
        start = len(self.path.rstrip("/")) + 1
        paths = (self / name[start:] for name in sorted(found) if not self._is_self(name))
        return (path for path in paths if fnmatchcase(path.name, pattern))

    def open(self, mode: str = "r", buffering: int = -1, *arguments: Any, **options: Any) -> Any:
        """The object as a file for reading."""
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
        """Bytes begin to end, fewer if the object ends before."""
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

    def upload(self, data: bytes) -> None:
        """Write a small object."""
        options = _upload_options(self.fs, self.protocol, len(data))
        options.pop("overwrite", None)  # always does
        self._request("written", lambda: self.fs.pipe_file(self.path, data, **options))

    @contextmanager
    def uploaded(self) -> Iterator[BinaryIO]:
        """A local file without a name, which becomes the object if the block succeeds. A large one
        is sent in parts, of which the storage makes the object when it has all of them."""
        with tempfile.TemporaryFile() as file:
            yield cast(BinaryIO, file)
            file.flush()
            options = _upload_options(self.fs, self.protocol, os.fstat(file.fileno()).st_size)
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
        asked = {"Bucket": bucket, **({"Prefix": f"{folder}/"} if folder else {})}
        count = 0
        while True:
            page = self._call_s3("list_multipart_uploads", asked)
            for one in page.get("Uploads", ()):
                upload = {"Bucket": bucket, "Key": one["Key"], "UploadId": one["UploadId"]}
                self._call_s3("abort_multipart_upload", upload)
                count += 1
            if not page.get("IsTruncated"):
                return count
            for marker in ("KeyMarker", "UploadIdMarker"):
                asked[marker] = page[f"Next{marker}"]

    def _call_s3(self, method: str, asked: Mapping[str, str]) -> Mapping[str, Any]:
        """An answer of S3; an empty one if the upload does not exist any more."""
        answer = self._request("cleaned", lambda: self.fs.call_s3(method, **asked), default={})
        return cast(Mapping[str, Any], answer)

    def _info(self) -> Mapping[str, Any] | None:
        answer = self._request("read", lambda: self.fs.info(self.path), default=None)
        return cast("Mapping[str, Any] | None", answer)

    def _is_self(self, name: str) -> bool:
        """Whether an entry of a listing is the folder itself, as some storages list it."""
        return name.strip("/") == self.path.strip("/")

    def _request(self, done: str, request: Callable[[], Any], default: Any = MUST_EXIST) -> Any:
        return make_request(str(self), done, request, default)


def open_remote(url: str) -> Path:
    """The path of a URL. Raises ImportError or ValueError if there is no such storage, or its
    package is missing; RemoteError if credentials are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it does not know msc, whose paths are plain
        path = RemotePath(url.rstrip("/"))
    filesystem = make_request(url, "opened", lambda: path.fs)
    if path.protocol == "msc":
        filesystem.resolve_path_and_storage_client(url)  # there may be no such profile
    # Annotations say Path everywhere: only methods that both have are used.
    return cast(Path, path)


@functools.cache
def _filesystem(protocol: str, process: int) -> Any:
    """A process's own connections. Those that a worker inherits are kept as well: it would close
    them, and complain."""
    # Listings that are kept would hide what other processes write.
    filesystem = fsspec.filesystem(protocol, use_listings_cache=False)
    if protocol in _S3:
        filesystem.s3.meta.events.register("needs-retry.s3", count_attempt)
    return filesystem


def _upload_options(filesystem: Any, protocol: str, size: int) -> dict[str, Any]:
    """Arguments of fsspec's put_file, which differ between storages."""
    if protocol in _S3:
        # 50 MiB, or as the variable FSSPEC_S3 says; S3 takes 10,000 parts.
        return {"chunksize": max(filesystem.default_block_size, -(-size // 10_000))}
    return {"overwrite": True} if protocol in ("abfs", "abfss", "az") else {}

"""Paths that may be URLs of object storage: s3://bucket/packs, gs://bucket/packs, msc://PROFILE/packs.

Credentials are found where the storage's own tools find them. No package of a storage is imported
before there is a URL.
"""

import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from task_encoders.storage.remote_requests import CHECK, in_a_line, make_request

if TYPE_CHECKING:
    from task_encoders.storage.remote_paths import RemotePath

#: The profile that multi-storage-client has for each bucket without being configured.
BUCKET_PROFILE: Final = "msc://_{}-"
#: Storages that have such profiles.
PROFILED: Final = ("s3", "gs")

#: Remedy for a damaged or lost file of an output: damaged files are moved away, and made again.
REMEDY: Final = "offline-packing verify --discard, then run"

#: A URL that lacks a slash, which would be a folder here.
_HALF_URL: Final = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)")
#: A URL without a bucket (or host, or profile); the storages named first have none.
_NO_BUCKET: Final = re.compile(r"(?!file:|local:|memory:)([a-z][a-z0-9+.-]+)://(/.*)?")


class StorageError(ValueError):
    """A URL that cannot be used, or leads nowhere."""


def is_url(path: object) -> bool:
    """Tell whether a path is a URL."""
    return "://" in str(path)


def check_url(text: str) -> str:
    """Return the same path. Raises StorageError if it is a URL that lacks a slash or a bucket."""
    half = _HALF_URL.match(text)
    if half:
        raise StorageError(f"{text!r} lacks a slash; write {half[1]}://{text[half.end() :]}")
    if _NO_BUCKET.fullmatch(text):
        protocol = text.partition(":")[0]
        raise StorageError(f"{text!r} names no bucket; write {protocol}://BUCKET/FOLDER")
    return text


def path_of(path: object) -> Path:
    """Return a local path, or for a URL a path with pathlib's methods (remote_paths.py). Takes
    Energon's paths as well. Raises StorageError as `check_url` does, and if the storage is unknown
    or a package is missing."""
    text = check_url(str(path))
    if not is_url(text):
        return Path(text)
    for protocol in PROFILED:
        text = text.replace(BUCKET_PROFILE.format(protocol), f"{protocol}://")
    # Annotations say Path everywhere: only methods that both have are used.
    return cast(Path, open_url(text))


def open_url(url: str) -> "RemotePath":
    """Open the path of a URL as it is given. Raises StorageError if the storage is unknown or a
    package is missing; RemoteError if credentials are."""
    try:
        from task_encoders.storage.remote_paths import RemotePath

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it does not know msc, with plain paths
            path = RemotePath(url.rstrip("/"))
        filesystem = make_request(url, "opened", lambda: path.fs)
        if path.protocol == "msc":
            filesystem.resolve_path_and_storage_client(url)  # there may be no such profile
        return path
    except (ImportError, ValueError) as error:
        raise StorageError(
            f"{url!r} cannot be opened: {error}; correct it, or pip install fsspec "
            "universal_pathlib and its package (s3fs, gcsfs, adlfs, multi-storage-client, ...)"
        ) from error


def unreachable(path: object, error: Exception) -> StorageError:
    """Return the error of a URL whose storage does not answer, or refuses to."""
    if isinstance(error, FileNotFoundError):
        return StorageError(f"{path} does not exist; check the address")
    remedy = "pip install the package of the storage (multi-storage-client[boto3], ...)"
    remedy = remedy if isinstance(error, ImportError) else CHECK
    return StorageError(f"{path} cannot be reached: {in_a_line(error)}; {remedy}")


def plain_name(name: str) -> str:
    """Return a file's name as a manifest, an index or a tar gives it. Raises ValueError if it does
    not name a file in the same folder: it is absolute, leads up, or is too long."""
    parts = name.split("/")
    is_fit = "\0" not in name and all(len(os.fsencode(part)) < 256 for part in parts)
    if not is_fit or not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"{name[:60]!r} is not the name of a file in its folder")
    return name


def as_remote(path: Path) -> "RemotePath | None":
    """Return the path if it is one of an object storage, else None."""
    return None if isinstance(path, Path) else path


def check_exists(path: Path) -> None:
    """Raise StorageError if a URL leads nowhere: neither to a file nor to a folder."""
    if as_remote(path) and not path.exists():
        raise unreachable(path, FileNotFoundError())


def read_range(path: Path, start: int, end: int) -> bytes:
    """Read the bytes [start, end) of a file, fewer if it ends before: of a URL in one request.
    Raises OSError."""
    if remote := as_remote(path):
        return remote.read_range(start, end)
    with open(path, "rb", buffering=0) as file:
        return read_at(file.fileno(), end - start, start)


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Read bytes of an open file, fewer if it ends before. Raises OSError."""
    data = os.pread(descriptor, size, offset)
    while len(data) < size and (more := os.pread(descriptor, size - len(data), offset + len(data))):
        data += more  # Linux reads 2 GiB at a time
    return data

"""Paths that may be URLs of object storage: s3://bucket/packs, gs://bucket/packs, msc://PROFILE/packs.

Files are read through fsspec, shards through Energon, which knows only multi-storage-client: both
find credentials where the storage's own tools do. Neither is imported before there is a URL.
"""

import copy
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from megatron.energon.epathlib import EPath

#: The profile that multi-storage-client has for each bucket without being configured.
_BUCKET: Final = "msc://_{}-"
_PROTOCOLS: Final = ("s3", "gs")

_REMEDY: Final = (
    "check the address, and that the credentials may list and read there (of S3 AWS_ACCESS_KEY_ID, "
    "AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL in the environment; of msc:// the profile in the "
    "file that MSC_CONFIG names)"
)


class StorageError(ValueError):
    """A URL that cannot be read."""


def is_url(path: object) -> bool:
    """Whether a path is a URL."""
    return "://" in str(path)


def path_of(path: object) -> Any:
    """A pathlib.Path, or of a URL universal_pathlib's, which has the same methods. Energon's paths
    are taken as well. Raises StorageError if packages are missing."""
    text = str(path)
    if not is_url(text):
        return Path(text)
    for protocol in _PROTOCOLS:
        text = text.replace(_BUCKET.format(protocol), f"{protocol}://")
    try:
        from fsspec import get_filesystem_class
        from upath import UPath
        from upath.registry import register_implementation

        protocol = text.partition("://")[0]
        get_filesystem_class(protocol)
        if protocol == "msc":
            register_implementation("msc", UPath, clobber=True)
        return UPath(text.rstrip("/"))
    except (ImportError, ValueError) as error:
        raise StorageError(
            f"{path} cannot be opened: {error}; install offline-packing[remote] and the package of "
            "the storage (s3fs, gcsfs, ...)"
        ) from error


def check_reachable(path: Any) -> None:
    """Raise StorageError if a URL leads nowhere: neither to a file nor to a folder."""
    if not is_url(path):
        return
    try:
        filesystem, inside = _open(path)
        filesystem.info(inside)
    except Exception as error:  # every storage has its own: botocore's, google's, aiohttp's
        raise _unreachable(path, error) from error


def read_range(path: Any, start: int, end: int) -> bytes:
    """The bytes [start, end) of a file, fewer if it ends before: of a URL in one request. Raises
    OSError."""
    if not is_url(path):
        with open(path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), end - start, start)
    try:
        filesystem, inside = _open(path)
        return bytes(filesystem.cat_file(inside, start=start, end=end))
    except OSError:
        raise
    except Exception as error:
        raise OSError(_in_a_line(error)) from error


def _open(url: object) -> tuple[Any, str]:
    """The filesystem of a URL, and the path in it."""
    filesystem = _filesystem(str(url).partition("://")[0], os.getpid())
    return filesystem, filesystem._strip_protocol(str(url))  # fsspec has no public name for it


@functools.cache
def _filesystem(protocol: str, process: int) -> Any:
    """A process's own connections. Those that a worker inherits are kept as well: it would close
    them, and complain."""
    import fsspec

    return fsspec.filesystem(protocol)


def energon_url(path: object) -> str:
    """A path as Energon takes it: s3://bucket/packs is msc://_s3-bucket/packs."""
    protocol, _, rest = str(path).partition("://")
    return f"{_BUCKET.format(protocol)}{rest}" if protocol in _PROTOCOLS else str(path)


def energon_path(path: object) -> "EPath":
    """Energon's path. Raises StorageError for a URL that leads nowhere."""
    from megatron.energon.epathlib import EPath

    if not is_url(path):
        return EPath(str(path))
    try:
        found = EPath(energon_url(path))
        found.fs.info(f"{found.internal_path}")
    except Exception as error:  # AssertionError, RuntimeError and those of the storages
        raise _unreachable(path, error) from error
    return found


@functools.cache
def renew_clients_after_fork() -> None:
    """Give forked workers connections of their own: Energon's paths keep their parent's, and
    workers would read each other's answers."""
    from multistorageclient import shortcuts

    clients: list[Any] = []
    cache = vars(shortcuts)["_STORAGE_CLIENT_CACHE"]  # emptied in the child, without public name

    def remember() -> None:
        clients[:] = [one for one in cache.values() if not one.is_default_profile()]

    def renew() -> None:
        for client in clients:
            client.__setstate__(copy.deepcopy(client.__getstate__()))

    os.register_at_fork(before=remember, after_in_child=renew)


def _unreachable(path: object, error: Exception) -> StorageError:
    if isinstance(error, ImportError):
        remedy = "install the package of the storage (s3fs and multi-storage-client[boto3], ...)"
    else:
        remedy = _REMEDY
    what = "does not exist" if isinstance(error, FileNotFoundError) else "cannot be reached"
    return StorageError(f"{path} {what} ({_in_a_line(error)}); {remedy}")


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

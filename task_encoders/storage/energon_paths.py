"""Paths as Energon takes them, which reads object storage through multi-storage-client alone."""

import copy
import functools
import os
from typing import TYPE_CHECKING, Any

from task_encoders.storage.paths import BUCKET_PROFILE, PROFILED, StorageError, is_url, unreachable
from task_encoders.storage.remote_requests import in_a_line

if TYPE_CHECKING:
    from megatron.energon.epathlib import EPath


def energon_url(path: object) -> str:
    """Return a path as Energon takes it: s3://bucket/packs is msc://_s3-bucket/packs. Raises
    StorageError for a storage that needs a profile."""
    protocol, _, rest = str(path).partition("://")
    if protocol in PROFILED:
        return f"{BUCKET_PROFILE.format(protocol)}{rest}"
    if is_url(path) and protocol != "msc":
        raise StorageError(
            f"Energon reads {protocol}:// by a profile of multi-storage-client: write {path} as "
            "msc://PROFILE/..., with PROFILE in the file that MSC_CONFIG names"
        )
    return str(path)


def energon_path(path: object) -> "EPath":
    """Open Energon's path. Raises StorageError for a URL that leads nowhere."""
    from megatron.energon.epathlib import EPath

    if not is_url(path):
        return EPath(str(path))
    try:
        found = EPath(energon_url(path))
        found.fs.info(f"{found.internal_path}")
    except StorageError:
        raise
    except Exception as error:  # AssertionError, RuntimeError and those of the storages
        raise unreachable(path, error) from error
    return found


def explain(error: Exception) -> str:
    """Write an error of Energon in a line; of a URL that a metadataset names, with the remedy."""
    text = in_a_line(error)
    if "Unknown protocol" in text or "s3:/" in text:  # to Energon, a folder below the metadataset
        text += "; Energon reads s3://BUCKET/... as msc://_s3-BUCKET/..."
    return text


@functools.cache
def renew_clients_after_fork() -> None:
    """Give forked workers their own connections: Energon's paths keep their parent's, and workers
    would read each other's answers."""
    from multistorageclient import shortcuts

    clients: list[Any] = []
    cache = vars(shortcuts)["_STORAGE_CLIENT_CACHE"]  # emptied in the child, without public name

    def remember() -> None:
        clients[:] = [one for one in cache.values() if not one.is_default_profile()]

    def renew() -> None:
        for client in clients:
            client.__setstate__(copy.deepcopy(client.__getstate__()))

    os.register_at_fork(before=remember, after_in_child=renew)

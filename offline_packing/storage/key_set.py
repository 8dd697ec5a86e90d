"""A set of keys on disk, for all samples of a dataset.

The sorted xxh3_128 of the keys are in a file that all processes map into memory: 1.6 GB for 10⁸
keys. The probability that any of 10⁸ other keys has the hash of one of them is 3e-23.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from offline_packing.storage.files import atomic_file, scratch_folder
from offline_packing.storage.streams import unpacked_copy
from task_encoders.storage.paths import as_remote

_HASH: Final = np.dtype("S16")

#: Sorted hashes, without repeats; NumPy compares them as bytes.
Hashes = npt.NDArray[np.bytes_]


def hash_keys(keys: Iterable[str]) -> Hashes:
    """Return (num_keys,) hashes, in the order of the keys."""
    # Tables hold keys that are not UTF-8 in this form.
    encoded = (key.encode("utf-8", "backslashreplace") for key in keys)
    digests = b"".join(map(xxhash.xxh3_128_digest, encoded))
    return np.frombuffer(digests, _HASH) if digests else np.empty(0, _HASH)


def sort_hashes(parts: Iterable[Hashes]) -> Hashes:
    """Join several arrays, sorted, each hash once."""
    return np.unique(np.concatenate([np.empty(0, _HASH), *parts]))


class KeySet:
    """Keys in a file; pickled, it is only the path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hashes: Hashes | None = None

    def save(self, hashes: Hashes) -> None:
        """Write the hashes that `sort_hashes` gave."""
        with atomic_file(self._path) as file:
            np.save(file, hashes)

    def __contains__(self, key: str) -> bool:
        return bool(self.find([key])[0])

    def find(self, keys: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Return (num_keys,) whether each key is in the set."""
        if self._hashes is None:
            path = self._path
            if remote := as_remote(path):  # the processes of a machine share a copy
                folder, what = scratch_folder(path.parent), "the keys of source.skip"
                path = unpacked_copy(str(path), what, folder, remote.download)
            self._hashes = np.load(path, mmap_mode="r")
        hashes, wanted = self._hashes, hash_keys(keys)
        if not len(hashes):
            return np.zeros(len(wanted), bool)
        places = np.minimum(hashes.searchsorted(wanted), len(hashes) - 1)
        return np.asarray(hashes[places] == wanted)

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_hashes": None}

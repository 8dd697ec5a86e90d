"""A set of keys on disk, for as many as a dataset has samples.

A key is kept as its xxh3_128: 16 bytes, sorted, in a file that all processes map into memory. 10⁸
keys are 1.6 GB; that one of 10⁸ further keys has the hash of another one, and would be taken for
it, has a probability of 3e-23.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from offline_packing.storage.files import atomic_file

_HASH: Final = np.dtype("S16")

#: Sorted hashes, without repeats; NumPy compares them as bytes.
Hashes = npt.NDArray[np.bytes_]


def hash_keys(keys: Iterable[str]) -> Hashes:
    """(num_keys,) hashes, in the order of the keys."""
    digests = b"".join(map(_digest, keys))
    return np.frombuffer(digests, _HASH) if digests else np.empty(0, _HASH)


def _digest(key: str) -> bytes:
    # Tables hold keys that are not UTF-8 in this form.
    return xxhash.xxh3_128_digest(key.encode("utf-8", "backslashreplace"))


def sort_hashes(parts: Iterable[Hashes]) -> Hashes:
    """All of several arrays, sorted, each once."""
    hashes = np.concatenate([np.empty(0, _HASH), *parts])
    hashes.sort()
    is_first = np.ones(len(hashes), bool)
    is_first[1:] = hashes[1:] != hashes[:-1]
    return hashes[is_first]


class KeySet:
    """Keys in a file that `save` wrote. Sent to another process, it is no more than a path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hashes: Hashes | None = None

    @classmethod
    def save(cls, path: Path, hashes: Hashes) -> "KeySet":
        """Write what `sort_hashes` gave."""
        with atomic_file(path) as file:
            np.save(file, hashes)
        return cls(path)

    def __contains__(self, key: str) -> bool:
        return bool(self.find([key])[0])

    def find(self, keys: Sequence[str]) -> npt.NDArray[np.bool_]:
        """(num_keys,): which of the keys are in the set."""
        hashes, wanted = self._map(), hash_keys(keys)
        if not len(hashes):
            return np.zeros(len(wanted), bool)
        places = np.minimum(hashes.searchsorted(wanted), len(hashes) - 1)
        return np.asarray(hashes[places] == wanted)

    def __len__(self) -> int:
        return len(self._map())

    def _map(self) -> Hashes:
        if self._hashes is None:
            self._hashes = np.load(self._path, mmap_mode="r")
        return self._hashes

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_hashes": None}

"""The files of a folder and all below it, folder after folder, as arrays.

10⁷ names are 1.5 GB as Python objects and 0.5 GB in one buffer; only those of one folder are held
at a time. Files come in the order of their stem, then of their suffix; folders in the order of
their names, behind the files beside them.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

_CHUNK: Final = 1 << 16

#: Stands in a key for the last dot of a file's name. It sorts before all that can be in a name, so
#: that keys in order are files in the order of stem and suffix.
DOT: Final = b"\0"


class Listable(Protocol):
    """What a listing needs from a root."""

    def entries(self, folder: bytes) -> Iterator[tuple[bytes, int | None]]:
        """(name, size) of what is in a folder; None is the size of a folder."""


@dataclass(frozen=True, slots=True)
class Files:
    """Some files of one folder (b"" or b"a/b/"): keys and sizes, in order."""

    folder: bytes
    keys: list[bytes]
    sizes: npt.NDArray[np.int64]


class _Names:
    """Keys of a folder in one buffer, as they come."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._sizes: list[npt.NDArray[np.int64]] = []

    def add(self, names: list[bytes], sizes: list[int]) -> None:
        """Add files by name."""
        keys = list(map(to_key, names))
        self._data += b"".join(keys)
        self._lengths.append(np.fromiter(map(len, keys), np.int64, len(keys)))
        self._sizes.append(np.array(sizes, np.int64))

    def in_order(self) -> Iterator[tuple[list[bytes], npt.NDArray[np.int64]]]:
        """Keys and sizes, some at a time; a stem is never cut."""
        offsets = np.concatenate([[0], *self._lengths])
        np.cumsum(offsets, out=offsets)
        sizes = np.concatenate([*self._sizes, np.empty(0, np.int64)])
        self._lengths, self._sizes = [], []
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self._data)]
        keys = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
        order = pc.array_sort_indices(keys)
        held: list[bytes] = []
        first = 0
        for start in range(0, len(keys), _CHUNK):
            held += keys.take(order[start : start + _CHUNK]).to_pylist()
            last = start + _CHUNK >= len(keys)
            end = len(held) if last else _last_stem(held)
            yield held[:end], sizes[order[first : first + end].to_numpy()]
            held, first = held[end:], first + end


def list_files(root: Listable, folder: bytes = b"") -> Iterator[Files]:
    """All files; those of a large folder in several pieces."""
    folders: list[bytes] = []
    names = _Names()
    files = root.entries(folder)
    while chunk := list(itertools.islice(files, _CHUNK)):
        found = [(name, size) for name, size in chunk if size is not None]
        names.add([name for name, _ in found], [size for _, size in found])
        folders += [name for name, size in chunk if size is None]
    for keys, sizes in names.in_order():
        yield Files(folder, keys, sizes)
    del names
    for name in sorted(folders):
        yield from list_files(root, folder + name + b"/")


def _last_stem(keys: list[bytes]) -> int:
    """Where the keys of the last stem begin."""
    stem = keys[-1].partition(DOT)[0]
    begin = len(keys) - 1
    while begin and keys[begin - 1].partition(DOT)[0] == stem:
        begin -= 1
    return begin


def to_key(name: bytes) -> bytes:
    """b'a.b.json' -> b'a.b\\0json'."""
    stem, _, suffix = name.rpartition(b".")
    return stem + DOT + suffix if stem else name


def to_name(key: bytes) -> str:
    """b'a.b\\0json' -> 'a.b.json'."""
    return os.fsdecode(key.replace(DOT, b"."))


def hash_files(digest: "xxhash.xxh3_128", files: Files) -> None:
    """Put names and sizes into a digest."""
    digest.update(files.folder + b"\0/" + b"/".join(files.keys) + b"\0/")
    digest.update(files.sizes.tobytes())


def container_hash(container: bytes) -> int:
    """What tells a file from others in 8 bytes."""
    return xxhash.xxh3_64_intdigest(container)


@dataclass(frozen=True, slots=True)
class PackedKeys:
    """Keys by folder, in as few bytes as a part of 10⁷ files may have: names in order are alike."""

    size: int
    data: bytes

    @classmethod
    def of(cls, folders: list[tuple[bytes, list[bytes]]]) -> "PackedKeys":
        """Pack keys that have a suffix. No name holds a slash, and no key two zeros in a row."""
        blocks = [folder + DOT + b"/".join(keys) for folder, keys in folders]
        data = (DOT + DOT).join(blocks)
        return cls(len(data), pa.Codec("zstd").compress(data, asbytes=True))

    def unpack(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """(folder, keys), in order."""
        data = pa.Codec("zstd").decompress(self.data, self.size, asbytes=True)
        for block in data.split(DOT + DOT):
            folder, _, keys = block.partition(DOT)
            yield folder, keys.split(b"/")

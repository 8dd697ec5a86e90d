"""The files of a folder and all below it, folder after folder, as arrays.

10⁷ names are 1.5 GB as Python objects and 0.5 GB in one buffer; only one folder's names are held at
a time. Files come in the order of their stem, then of their suffix; folders in the order of their
names, after the files next to them.
"""

import bisect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from offline_packing.sources.roots.roots import Root

_CHUNK: Final = 1 << 16

#: Takes the place of the last dot of a file's name in its key. It sorts before all that can be in a
#: name, so that keys in order are files in the order of stem and suffix.
DOT: Final = b"\0"

#: One row per file, in the order of a listing.
FILES_SCHEMA: Final = pa.schema(
    [
        pa.field("container", pa.large_binary()),  # names need not be UTF-8
        pa.field("size", pa.int64()),
        pa.field("modified", pa.int64()),  # ns; 0 of remote files
    ]
)

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Files:
    """Some files of one folder (b"" or b"a/b/"), in order: keys, sizes, modification times (ns)."""

    folder: bytes
    keys: list[bytes]
    sizes: Numbers
    times: Numbers


class _Names:
    """Keys of a folder in one buffer, as they come."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._numbers = tuple(bytearray() for _ in range(3))  # lengths, sizes, times: int64

    def add(self, files: list[tuple[bytes, int, int]]) -> None:
        """Add files by name, size and time."""
        keys = [to_key(name) for name, _, _ in files]
        self._data += b"".join(keys)
        columns = (map(len, keys), (size for _, size, _ in files), (time for *_, time in files))
        for numbers, column in zip(self._numbers, columns, strict=True):
            numbers += np.fromiter(column, np.int64, len(keys)).tobytes()

    def in_order(self) -> Iterator[tuple[list[bytes], Numbers, Numbers]]:
        """Yield keys, sizes and times in order, some at a time; a stem is never cut."""
        lengths, sizes, times = (np.frombuffer(numbers, np.int64) for numbers in self._numbers)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        del lengths
        self._numbers = ()
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self._data)]
        keys = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
        order = pc.array_sort_indices(keys)
        held: list[bytes] = []
        first = 0
        for start in range(0, len(keys), _CHUNK):
            held += keys.take(order[start : start + _CHUNK]).to_pylist()
            last = start + _CHUNK >= len(keys)
            end = len(held) if last else bisect.bisect_left(held, held[-1].partition(DOT)[0])
            if end:
                places = order[first : first + end].to_numpy()
                yield held[:end], sizes[places], times[places]
                held, first = held[end:], first + end


def list_files(root: Root, folder: bytes = b"") -> Iterator[Files]:
    """Yield all files; a large folder in several pieces."""
    folders: list[bytes] = []
    names = _Names()
    found = root.list_folder(folder)
    while chunk := list(itertools.islice(found, _CHUNK)):
        folders += [name for name, size, _ in chunk if size is None]
        names.add([(name, size, time) for name, size, time in chunk if size is not None])
    for keys, sizes, times in names.in_order():
        yield Files(folder, keys, sizes, times)
    del names
    for name in sorted(folders):
        yield from list_files(root, folder + name + b"/")


def walk(root: Root) -> Iterator[tuple[str, int, int]]:
    """Yield (container, size, modification time in ns) of all files, in order."""
    for files in list_files(root):
        folder = os.fsdecode(files.folder)
        numbers = (files.sizes.tolist(), files.times.tolist())
        names = to_name(b"/".join(files.keys)).split("/")  # no name holds a slash
        for name, size, time in zip(names, *numbers, strict=True):
            yield folder + name, size, time


def to_key(name: bytes) -> bytes:
    r"""Turn a file's name into its key: b'a.b.json' -> b'a.b\0json'."""
    stem, _, suffix = name.rpartition(b".")
    return stem + DOT + suffix if stem else name


def to_name(key: bytes) -> str:
    r"""Turn a key into the file's name: b'a.b\0json' -> 'a.b.json'."""
    return os.fsdecode(key.replace(DOT, b"."))


def hash_files(files: Iterable[tuple[str, int]]) -> str:
    """Hash some containers and their sizes."""
    lines = (os.fsencode(container) + b"\0%d\n" % size for container, size in files)
    return xxhash.xxh3_128_hexdigest(b"".join(lines))


def container_hash(container: bytes) -> int:
    """Hash a file's name to its identity in 8 bytes."""
    return xxhash.xxh3_64_intdigest(container)


class FileTable:
    """Files of a listing, collected as a packed table of FILES_SCHEMA."""

    def __init__(self, is_read: Callable[[bytes], bool]) -> None:
        """Start a table. `is_read` tells whether files of a suffix belong to it."""
        self._is_read = is_read
        self._sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        self._writer = pa.ipc.new_stream(self._sink, FILES_SCHEMA, options=options)

    def add(self, files: Files) -> None:
        """Add the files that the source reads."""
        is_read = [self._is_read(key.partition(DOT)[2]) for key in files.keys]
        names = b"/".join(files.keys).replace(DOT, b".").split(b"/")
        containers = [files.folder + name for name in itertools.compress(names, is_read)]
        mask = np.array(is_read, bool)
        numbers = {"size": files.sizes[mask], "modified": files.times[mask]}
        columns = {"container": containers, **numbers}
        self._writer.write_batch(pa.record_batch(columns, FILES_SCHEMA))

    def finish(self) -> bytes:
        """Return the table, as an Arrow stream."""
        self._writer.close()
        return bytes(self._sink.getvalue())


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
        """Yield (folder, keys), in order."""
        data = pa.Codec("zstd").decompress(self.data, self.size, asbytes=True)
        for block in data.split(DOT + DOT):
            folder, _, keys = block.partition(DOT)
            yield folder, keys.split(b"/")

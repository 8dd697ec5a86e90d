"""The files of a folder and all below it, folder after folder, as arrays.

10⁷ names are 1.5 GB as Python objects and 0.5 GB in one buffer; only one folder's names are held at
a time. Files come in the order of their stem, then of their suffix; folders in the order of their
names, after the files next to them.
"""

import bisect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

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

    def names(self) -> list[bytes]:
        """Return the names of the files in the folder."""
        return b"/".join(self.keys).replace(DOT, b".").split(b"/")  # no name holds a slash

    def table(self, is_read: Callable[[bytes], bool]) -> pa.RecordBatch:
        """Return the files whose suffix a source reads, as rows of FILES_SCHEMA."""
        chosen = np.array([is_read(key.partition(DOT)[2]) for key in self.keys], bool)
        containers = [self.folder + name for name in itertools.compress(self.names(), chosen)]
        return pa.record_batch([containers, self.sizes[chosen], self.times[chosen]], FILES_SCHEMA)


def list_files(root: Root, folder: bytes = b"") -> Iterator[Files]:
    """Yield all files; a large folder in several pieces."""
    folders: list[bytes] = []
    # All keys, one after another; and as int64 a 0 with the ends of the keys, sizes, times.
    keys, numbers = bytearray(), (bytearray(8), bytearray(), bytearray())
    found = root.list_folder(folder)
    while chunk := list(itertools.islice(found, _CHUNK)):
        folders += [name for name, size, _ in chunk if size is None]
        _append(keys, numbers, [one for one in chunk if one[1] is not None])
    for own, sizes, times in _in_order(keys, *numbers):
        yield Files(folder, own, sizes, times)
    del keys, numbers
    for name in sorted(folders):
        yield from list_files(root, folder + name + b"/")


def _append(
    data: bytearray, numbers: Iterable[bytearray], files: Sequence[tuple[bytes, Any, int]]
) -> None:
    """Append the keys of files to `data`, and where these end, sizes and times to `numbers`."""
    keys = [to_key(name) for name, _, _ in files]
    ends = len(data) + np.cumsum([len(key) for key in keys], dtype=np.int64)
    data += b"".join(keys)
    columns = (ends, [size for _, size, _ in files], [time for *_, time in files])
    for column, values in zip(numbers, columns, strict=True):
        column += np.array(values, np.int64).tobytes()


def _in_order(
    data: bytearray, ends: bytearray, sizes: bytearray, times: bytearray
) -> Iterator[tuple[list[bytes], Numbers, Numbers]]:
    """Yield the keys of a folder in order, some at a time, with the files' sizes and times; a stem
    is never cut."""
    numbers = [np.frombuffer(column, np.int64) for column in (sizes, times)]
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
    keys = pa.Array.from_buffers(pa.large_binary(), len(numbers[0]), buffers)
    order = pc.array_sort_indices(keys)
    held: list[bytes] = []
    first = 0
    for start in range(0, len(keys), _CHUNK):
        held += keys.take(order[start : start + _CHUNK]).to_pylist()
        last = start + _CHUNK >= len(keys)
        end = len(held) if last else bisect.bisect_left(held, held[-1].partition(DOT)[0])
        if end:
            places = order[first : first + end].to_numpy()
            yield held[:end], *(column[places] for column in numbers)
            held, first = held[end:], first + end


def walk(root: Root) -> Iterator[tuple[str, int, int]]:
    """Yield (container, size, modification time in ns) of all files, in order."""
    for files in list_files(root):
        folder = os.fsdecode(files.folder)
        numbers = (files.sizes.tolist(), files.times.tolist())
        for name, size, time in zip(map(os.fsdecode, files.names()), *numbers, strict=True):
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


def pack_keys(folders: list[tuple[bytes, list[bytes]]]) -> bytes:
    """Pack keys that have a suffix, by their folder, in as few bytes as a part of 10⁷ files may
    have: names in order are alike. No name holds a slash, and no key two zeros in a row."""
    blocks = [folder + DOT + b"/".join(keys) for folder, keys in folders]
    return bytes(pa.Codec("zstd").compress((DOT + DOT).join(blocks), asbytes=True))


def unpack_keys(packed: bytes) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yield (folder, keys), in order."""
    data = pa.CompressedInputStream(pa.BufferReader(packed), "zstd").read()
    for block in data.split(DOT + DOT):
        folder, _, keys = block.partition(DOT)
        yield folder, keys.split(b"/")

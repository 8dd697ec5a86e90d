"""A listing of files as arrays: 10⁷ names take 1 GB as Python objects apiece, 0.5 GB so."""

import itertools
import os
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

#: Name of a file without its last suffix, that suffix, and the file's size in bytes.
LISTING_SCHEMA: Final = pa.schema(
    [
        pa.field("stem", pa.large_binary()),  # names need not be UTF-8
        pa.field("suffix", pa.large_binary()),
        pa.field("size", pa.int64()),
    ]
)
_CHUNK: Final = 1 << 16


def list_files(files: Iterable[tuple[str, int]]) -> pa.Table:
    """(container, size) pairs as a table of LISTING_SCHEMA, sorted by stem, then suffix."""
    remaining = iter(files)
    batches = []
    while chunk := list(itertools.islice(remaining, _CHUNK)):
        names = [split_suffix(os.fsencode(container)) for container, _ in chunk]
        columns: list[list[Any]] = [
            [stem for stem, _ in names],
            [suffix for _, suffix in names],
            [size for _, size in chunk],
        ]
        batches.append(pa.record_batch(columns, schema=LISTING_SCHEMA))
    table = pa.Table.from_batches(batches, LISTING_SCHEMA)
    del batches  # with a table of its own memory, the unsorted one can go
    table = table.combine_chunks()
    return table.sort_by([("stem", "ascending"), ("suffix", "ascending")])


def split_suffix(path: bytes) -> tuple[bytes, bytes]:
    """b'a/b.c.json' -> (b'a/b.c', b'json')."""
    stem, _, suffix = path.rpartition(b".")
    return (stem, suffix) if stem and b"/" not in suffix else (path, b"")


def suffix_in(listing: pa.Table, suffixes: Iterable[str]) -> np.ndarray:
    """(num_files,) bool: whether the suffix, in lower case, is one of these."""
    encoded = listing["suffix"].combine_chunks().dictionary_encode()
    wanted = {suffix.encode() for suffix in suffixes}
    of_code = np.array([value.lower() in wanted for value in encoded.dictionary.to_pylist()], bool)
    return of_code[encoded.indices.to_numpy()] if len(listing) else np.zeros(0, bool)


def stem_groups(listing: pa.Table) -> np.ndarray:
    """(num_files,) int64: number of the file's stem, counted from 0."""
    stems = listing["stem"].combine_chunks()
    begins = np.ones(len(stems), bool)
    begins[1:] = pc.not_equal(stems[1:], stems[:-1]).to_numpy(zero_copy_only=False)
    return np.cumsum(begins) - 1


def joined(listing: pa.Table) -> pa.LargeBinaryArray:
    """Containers of all files, as bytes."""
    stems, suffixes = (listing[name].combine_chunks() for name in ("stem", "suffix"))
    dots = pc.binary_join_element_wise(stems, suffixes, pa.scalar(b".", pa.large_binary()))
    return pc.if_else(pc.equal(pc.binary_length(suffixes), 0), stems, dots)


def full_names(listing: pa.Table) -> list[str]:
    """Containers of all files."""
    stems, suffixes = (listing[name].to_pylist() for name in ("stem", "suffix"))
    return [
        os.fsdecode(stem + b"." + suffix if suffix else stem)
        for stem, suffix in zip(stems, suffixes, strict=True)
    ]


def listing_hash(listing: pa.Table) -> str:
    """Changes with any file's name or size."""
    digest = xxhash.xxh3_128()
    for name in ("stem", "suffix"):
        column = listing[name].combine_chunks()
        _, offsets, data = column.buffers()
        ends = np.frombuffer(offsets, np.int64)[column.offset :][: len(column) + 1]
        digest.update(np.diff(ends).tobytes())
        if len(column):
            digest.update(memoryview(data)[ends[0] : ends[-1]])
    digest.update(listing["size"].to_numpy().tobytes())
    return digest.hexdigest()


def to_bytes(listing: pa.Table) -> bytes:
    """A table in as many bytes as its rows need; pickling a slice would take the whole table."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")  # sorted names are much alike
    with pa.ipc.new_stream(sink, listing.schema, options=options) as writer:
        writer.write_table(listing)
    return sink.getvalue().to_pybytes()


def from_bytes(data: bytes) -> pa.Table:
    """The table of `to_bytes`."""
    return pa.ipc.open_stream(data).read_all()

"""Locators of stored bytes, and reading them.

kind         container                     offset                           size
file         a file                        0                                of the whole file
bytes        a file                        first byte                       bytes
stream       a .gz or .zst file            first byte, when unpacked        bytes
parquet_row  a Parquet file, `column`      row                              bytes of the value
arrow_row    an Arrow file, `column`       row                              bytes of the value
sub_sample   a tar, or a pack's JSON       first byte of the pack's JSON    bytes of the value
record       that of a record, which holds the medium as text: `offset` is the record's
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar

import orjson
import xxhash

from offline_packing.errors import ChangedError, StageError
from offline_packing.sources.reading.rows import read_value
from offline_packing.sources.roots.roots import FileRange, RemoteRoot, Root
from offline_packing.storage.streams import unpack, unpacked_copy
from task_encoders.packs.pack import PackFormatError, restore_pack
from task_encoders.records.record import ASKED
from task_encoders.samples import SourceSample
from task_encoders.samples.medium_options import options_json
from task_encoders.storage.paths import read_at
from task_encoders.text.pieces import to_messages


class Locator(NamedTuple):
    """`size` bytes at `offset` of `container`, a POSIX path relative to a root.

    `column` says which part is meant: of a row, the columns (rows.py); of a tar's sample, the
    part (webdataset.py), or the member of a medium; of a pack, "TASK.NUMBER.BYTES": a sub-sample,
    and the size of the pack's JSON. A `stream_sub_sample` is one in a compressed tar. Of a medium
    in a `record`, "HASH.BYTES.KIND.COLUMN": xxh3_64 of its text, and the rest of the record's own.
    """

    kind: str
    container: str
    offset: int
    size: int
    column: str = ""


def in_record(record: Locator, text: str, size: int) -> Locator:
    """Return the locator of a medium of `size` bytes that is text in the record at a locator."""
    column = f"{hash_text(text)}.{record.size}.{record.kind}.{record.column}"
    return Locator("record", record.container, record.offset, size, column)


def record_around(at: Locator) -> tuple[Locator, str]:
    """Return the record that a medium in a `record` is text of, and the hash of that text."""
    text_hash, size, kind, column = at.column.split(".", 3)
    return Locator(kind, at.container, at.offset, int(size), column), text_hash


def hash_text(text: str) -> str:
    """Hash the text of a medium."""
    return xxhash.xxh3_64_hexdigest(text.encode(errors="surrogatepass"))


def read_locator(root: Root, at: Locator, unpack_folder: Path | None = None) -> bytes:
    """Read the bytes at a locator. A compressed container is unpacked to `unpack_folder`, once, to
    be read at any place. Raises StageError if the bytes no longer exist, or not all of them."""
    if at.kind in ("file", "bytes"):
        return root.read_range(at.container, at.offset, at.size, whole=at.kind == "file")
    if at.kind == "stream":
        return _read_stream(root, at, unpack_folder)
    if at.kind in ("parquet_row", "arrow_row"):
        return read_value(root, at.kind, at.container, at.offset, at.column, at.size)
    task, number, size = at.column.split(".")
    kind = "stream" if at.kind == "stream_sub_sample" else "bytes"
    pack = read_locator(root, Locator(kind, at.container, at.offset, int(size)), unpack_folder)
    return _sub_sample_json(pack, task, int(number), at.size)


def _read_stream(root: Root, at: Locator, unpack_folder: Path | None) -> bytes:
    path = root.path(at.container)
    if unpack_folder is None:
        raise StageError(f"{path} is compressed and no unpack_folder is set")

    def write(copy: BinaryIO) -> None:
        with root.open(at.container, sequential=True) as file:
            unpack(file, at.container, copy)

    version = root.version(at.container)
    with open(unpacked_copy(version, path, unpack_folder, write), "rb", buffering=0) as file:
        data = read_at(file.fileno(), at.size, at.offset)
    if len(data) != at.size:
        raise ChangedError(path, f"it unpacks to less than {at.offset + at.size} bytes")
    return data


def _sub_sample_json(pack: bytes, task: str, number: int, size: int) -> bytes:
    """Write the record of a sub-sample, from its pack's JSON. Raises StageError if it is another
    one."""
    try:
        sub = restore_pack(pack, "pack", task).sub_samples[number]
        record = to_json(sub) if isinstance(sub, SourceSample) else b""
    except (PackFormatError, IndexError):
        record = b""
    if len(record) != size:
        raise ChangedError(f"sub-sample {number} of a pack")
    return record


def to_json(sample: SourceSample) -> bytes:
    """Write a restored sub-sample as a record."""
    record: dict[str, Any] = {"messages": to_messages(sample), "images": sample.images}
    record |= {"tools": sample.tools} if sample.tools else {}
    record |= {ASKED: options_json(sample.options)} if sample.options else {}
    return orjson.dumps(record | {"videos": sample.videos} if sample.videos else record)


#: Bytes and places of the items that are taken at a time, without the last item. The larger they
#: are, the closer together the places are.
_MAX_BYTES: Final = 32 << 20
_MAX_PLACES: Final = 1 << 13

Item = TypeVar("Item")


def read_ahead(
    items: Iterable[Item], places: Callable[[Item], Iterable[tuple[Root, Locator]]]
) -> Iterator[Item]:
    """Yield the same items. While one is used, remote roots hold the bytes at its `places`."""
    window: list[Item] = []
    wanted: dict[RemoteRoot, list[FileRange]] = {}
    num_bytes = num_places = 0
    for item in items:
        window.append(item)
        for root, at in places(item):
            num_places += 1
            found = _file_range(at)
            if isinstance(root, RemoteRoot) and found is not None:
                wanted.setdefault(root, []).append(found)
                num_bytes += found.size
        if num_bytes >= _MAX_BYTES or num_places >= _MAX_PLACES:
            yield from _held(window, wanted)
            window, wanted, num_bytes, num_places = [], {}, 0, 0
    yield from _held(window, wanted)


def _held(
    items: Sequence[Item], wanted: Mapping[RemoteRoot, Sequence[FileRange]]
) -> Iterator[Item]:
    """Yield the same items, for which roots hold ranges until all of them were used."""
    try:
        for root, ranges in wanted.items():
            root.read_ahead(ranges)
        yield from items
    finally:
        for root in wanted:
            root.read_ahead(())


def _file_range(at: Locator) -> FileRange | None:
    """Return the bytes of a file that `read_locator` reads; None: it reads no such range."""
    if at.kind in ("file", "bytes"):
        return FileRange(at.container, at.offset, at.size, at.kind == "file")
    if at.kind == "sub_sample":
        return FileRange(at.container, at.offset, int(at.column.rpartition(".")[2]), False)
    return None

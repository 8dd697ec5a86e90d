"""Reading what a locator means: one function for each kind of place."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Final

import orjson

from offline_packing.errors import StageError
from offline_packing.sources.reading.locators import Locator, Root
from offline_packing.sources.reading.row_reader import read_value
from offline_packing.storage.streams import unpack, unpacked_copy
from task_encoders.pack_format import PackFormatError, restore_pack
from task_encoders.samples import SourceSample

Reader = Callable[[Root, Locator, Path | None], bytes]


def read_locator(root: Root, locator: Locator, unpack_folder: Path | None = None) -> bytes:
    """The bytes at a locator.

    Args:
        unpack_folder: where a compressed container is unpacked, once, for random access.

    Raises:
        StageError: they no longer exist, or not all of them.
    """
    return READERS[locator.kind](root, locator, unpack_folder)


def _read_file(root: Root, at: Locator, _: Path | None) -> bytes:
    return root.read_range(at.container, 0, at.size, whole=True)


def _read_bytes(root: Root, at: Locator, _: Path | None) -> bytes:
    return root.read_range(at.container, at.offset, at.size, whole=False)


def _read_stream(root: Root, at: Locator, unpack_folder: Path | None) -> bytes:
    if unpack_folder is None:
        raise StageError(f"{root.path(at.container)} is compressed and no unpack_folder is set")
    path = unpacked_file(root, at.container, unpack_folder)
    with open(path, "rb", buffering=0) as file:
        data = os.pread(file.fileno(), at.size, at.offset)
    if len(data) != at.size:
        raise StageError(
            f"{root.path(at.container)} changed since it was measured: it unpacks to less than "
            f"{at.offset + at.size} bytes; measure again with output.overwrite=true"
        )
    return data


def unpacked_file(root: Root, container: str, folder: Path) -> Path:
    """The unpacked content of a compressed file, as a file in `folder`; see `unpacked_copy`."""
    path = root.path(container)

    def write(copy: BinaryIO) -> None:
        with root.open(container, sequential=True) as file:
            unpack(file, container, root.size(file), copy)

    return unpacked_copy(f"{path}\0{root.stamp(container)}", path, folder, write)


def _read_row(root: Root, at: Locator, _: Path | None) -> bytes:
    return read_value(root, at.kind, at.container, at.offset, at.column, at.size)


def _read_sub_sample(root: Root, at: Locator, unpack_folder: Path | None) -> bytes:
    task, number, size = at.column.split(".")
    kind = "stream" if at.kind.startswith("stream") else "bytes"
    pack = read_locator(root, Locator(kind, at.container, at.offset, int(size)), unpack_folder)
    return sub_sample_json(pack, task, int(number), at.size)


READERS: Final[Mapping[str, Reader]] = {
    "file": _read_file,
    "bytes": _read_bytes,
    "stream": _read_stream,
    "parquet_row": _read_row,
    "arrow_row": _read_row,
    "sub_sample": _read_sub_sample,
    "stream_sub_sample": _read_sub_sample,
}


def to_json(sample: SourceSample) -> bytes:
    """A restored sub-sample as a record."""
    messages = [{"role": "system", "content": sample.system}] if sample.system is not None else []
    for turn in sample.turns:
        messages.append({"role": "user", "content": turn.prompt})
        messages.append({"role": "assistant", "content": turn.answer})
    record = {"messages": messages, "images": sample.images}
    return orjson.dumps(record | {"videos": sample.videos} if sample.videos else record)


def sub_sample_json(pack: bytes, task: str, number: int, size: int) -> bytes:
    """The record of one sub-sample, from the JSON of its pack.

    Raises:
        StageError: it is not the one that was measured.
    """
    try:
        sub = restore_pack(pack, "pack", task).sub_samples[number]
        record = to_json(sub) if isinstance(sub, SourceSample) else b""
    except (PackFormatError, IndexError):
        record = b""
    if len(record) != size:
        raise StageError(
            f"sub-sample {number} of a pack changed since it was measured; restore the pack, or "
            "measure again with output.overwrite=true"
        )
    return record

"""Record batches of Arrow files. One whose buffers are compressed says how large it will be before
it is unpacked, alone.

Source: RecordBatch in https://github.com/apache/arrow/blob/main/format/Message.fbs, and
https://flatbuffers.dev/internals for how its fields lie
"""

import struct
from typing import BinaryIO, Final

import numpy as np
import pyarrow as pa

from offline_packing.storage.memory import machine_memory

#: Beginning of a file that is a stream with a footer.
_FILE_MAGIC: Final = b"ARROW1\0\0"
#: Rows of a batch; a damaged number would be as many samples that are set aside.
MAX_BATCH_ROWS: Final = 1 << 24

#: End of a stream: a continuation mark, and a message of length 0.
_STREAM_END: Final = b"\xff\xff\xff\xff\0\0\0\0"


class ArrowBatches:
    """The record batches of a file in either of Arrow's formats."""

    def __init__(self, source: "BinaryIO | pa.NativeFile") -> None:
        """Raises pa.ArrowException or OSError if the file is damaged."""
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        open_reader = pa.ipc.open_file if is_file else pa.ipc.open_stream
        source.seek(0)
        self.schema: pa.Schema = open_reader(source).schema
        source.seek(len(_FILE_MAGIC) if is_file else 0)
        messages = [m for m in pa.ipc.MessageReader.open_stream(source) if m.type != "schema"]
        try:
            sizes = [_rows_and_bytes(message) for message in messages]
        except struct.error as error:
            raise pa.ArrowInvalid(f"a batch names bytes outside of it: {error}") from error
        self._batches: list[pa.Message] | list[pa.RecordBatch] = messages
        if not is_file:
            _check_end(source, sum(num_rows for num_rows, _ in sizes))
        if any(message.type == "dictionary" for message in messages):
            total = sum(num_bytes for _, num_bytes in sizes)
            if total > machine_memory():
                problem = f"compressed batches with dictionaries, {total:,} bytes in all"
                remedy = "write it without compression or without dictionaries"
                raise pa.ArrowInvalid(f"{problem} > the memory's {machine_memory():,}; {remedy}")
            source.seek(0)
            self._batches = open_reader(source).read_all().to_batches()
            sizes = [(len(batch), 0) for batch in self._batches]
        else:
            for message, (num_rows, num_bytes) in zip(messages, sizes, strict=True):
                self._check(message, num_rows, num_bytes)
        #: rows of each batch, and the bytes that it is unpacked to; 0: it is used as it is
        self.num_rows = [num_rows for num_rows, _ in sizes]
        self.unpacked = [num_bytes for _, num_bytes in sizes]

    def _check(self, message: pa.Message, num_rows: int, num_bytes: int) -> None:
        """Raise pa.ArrowException or OSError where a batch cannot have as many rows as it claims:
        each would be set aside."""
        if not 0 <= num_rows <= MAX_BATCH_ROWS:
            problem = f"a batch claims {num_rows:,} rows, at most {MAX_BATCH_ROWS:,} are read"
            raise pa.ArrowInvalid(f"{problem}; write smaller ones")
        if not num_bytes:
            pa.ipc.read_record_batch(message, self.schema)  # copies nothing

    def read(self, number: int) -> pa.RecordBatch:
        """One batch; what is not compressed stays where it is in the file."""
        found = self._batches[number]
        if isinstance(found, pa.RecordBatch):
            return found
        return pa.ipc.read_record_batch(found, self.schema)


def _check_end(source: "BinaryIO | pa.NativeFile", num_rows: int) -> None:
    """Raise pa.ArrowInvalid where a stream lacks its end, as one that was cut between two batches,
    or goes on after it."""
    source.seek(max(0, source.tell() - len(_STREAM_END)))
    if source.read(len(_STREAM_END)) != _STREAM_END or source.read(1):
        raise pa.ArrowInvalid(
            f"its {num_rows} rows do not end in an end-of-stream mark at the end of the file: it "
            "was cut, or written over; restore it or save the dataset again"
        )


def _rows_and_bytes(message: pa.Message) -> tuple[int, int]:
    """Rows of a batch or a dictionary, and the unpacked bytes of its compressed buffers."""
    data = memoryview(message.metadata)
    header = _field(data, _at(data, 0), 2)
    batch = _at(data, header)
    if message.type == "dictionary":
        batch = _at(data, _field(data, batch, 1))
    length, buffers, compression = (_field(data, batch, number) for number in (0, 2, 3))
    num_rows = struct.unpack_from("<q", data, length)[0] if length else 0
    if not compression or not buffers:
        return num_rows, 0
    vector = _at(data, buffers)
    (count,) = struct.unpack_from("<I", data, vector)
    places = np.frombuffer(data, "<i8", 2 * count, vector + 4).reshape(-1, 2)
    body = memoryview(message.body)
    # Each begins with its size; -1: it is not compressed.
    sizes = (
        struct.unpack_from("<q", body, offset)[0] for offset, size in places.tolist() if size > 8
    )
    return num_rows, sum(size for size in sizes if size > 0)


def _field(data: memoryview, table: int, number: int) -> int:
    """Position of a table's field; 0: it has its default."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    slot = 4 + 2 * number
    if slot >= struct.unpack_from("<H", data, vtable)[0]:
        return 0
    (offset,) = struct.unpack_from("<H", data, vtable + slot)
    return table + offset if offset else 0


def _at(data: memoryview, position: int) -> int:
    """Position that an offset there leads to."""
    return int(position + struct.unpack_from("<I", data, position)[0])

"""Headers that lead astray: the file is refused, and read no further."""

import io
import struct

import pyarrow as pa
import pytest

from offline_packing.sources.reading.rows import ArrowBatches


def test_a_compressed_buffer_outside_of_its_batch() -> None:
    table = pa.table({"a": range(1000)})
    file = io.BytesIO()
    with pa.ipc.new_stream(
        file, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")
    ) as writer:
        writer.write_table(table)
    data = file.getvalue()
    (message,) = (
        m for m in pa.ipc.MessageReader.open_stream(io.BytesIO(data)) if m.type == "record batch"
    )
    buffers = struct.pack("<qqq", 0, 0, 0)  # no nulls; then the values, from the first byte on
    place = data.index(buffers, data.index(message.metadata.to_pybytes())) + 16
    hostile = data[:place] + struct.pack("<q", 1 << 40) + data[place + 8 :]
    assert ArrowBatches(io.BytesIO(data)).num_rows == [1000]
    with pytest.raises(pa.ArrowInvalid, match="outside"):
        ArrowBatches(io.BytesIO(hostile))

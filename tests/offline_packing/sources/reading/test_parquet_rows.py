"""Rows of lists, whose bytes are known before they are decoded."""

import io
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offline_packing.errors import StageError
from offline_packing.sources.formats import tables
from offline_packing.sources.reading import parquet_rows, row_files
from offline_packing.sources.reading.column_types import value_bytes
from offline_packing.sources.reading.parquet_pages import read_pages
from offline_packing.sources.reading.parquet_rows import largest_row, upper_bound
from offline_packing.sources.reading.row_files import RowFile
from tests.helpers import accounting
from tests.helpers.datasets import image_bytes

TYPES = {
    "binary": pa.list_(pa.binary()),
    "string": pa.list_(pa.string()),
    "fixed": pa.list_(pa.binary(7)),
    "number": pa.list_(pa.int64()),
    "nested": pa.list_(pa.list_(pa.binary())),
    "struct": pa.list_(pa.struct([("bytes", pa.binary())])),
}


def draw(kind: pa.DataType, rng: random.Random) -> Any:
    """A value of a type, or None."""
    if rng.random() < 0.1:
        return None
    if pa.types.is_list(kind):
        return [draw(kind.value_type, rng) for _ in range(rng.choice((0, 1, 3, 40)))]
    if pa.types.is_struct(kind):
        return {"bytes": draw(kind.field("bytes").type, rng)}
    if pa.types.is_integer(kind):
        return rng.randrange(9)
    size = 7 if pa.types.is_fixed_size_binary(kind) else rng.choice((0, 5, 60, 900))
    value = bytes([rng.randrange(97, 103)]) * size
    return value.decode() if pa.types.is_string(kind) else value


def own_bytes(value: Any, size: int) -> int:
    """The bytes of a row: 16 for each level, and the values' own."""
    if isinstance(value, dict):
        return own_bytes(value["bytes"], size)
    if isinstance(value, list) and value:
        return sum(own_bytes(one, size) for one in value)
    is_value = value is not None and not isinstance(value, list)
    return 16 + (size or len(value) if is_value and not isinstance(value, int) else 0)


@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("form", sorted(TYPES))
def test_largest_row_equals_the_values(form: str, version: str, dictionary: bool) -> None:
    """Pages of both versions, packed and not, with dictionaries that end after some pages."""
    rng = random.Random(f"{form} {version} {dictionary}")
    size = 7 if form == "fixed" else 0
    for codec in ("none", "snappy", "zstd", "gzip", "brotli", "lz4"):
        rows = [draw(TYPES[form], rng) for _ in range(rng.choice((1, 30, 300)))]
        table = pa.table({"a": pa.array(rows, TYPES[form])})
        sink, page = io.BytesIO(), rng.choice((300, 1 << 20))
        limits = {"data_page_size": page, "dictionary_pagesize_limit": rng.choice((900, 1 << 20))}
        options: dict[str, Any] = {"data_page_version": version, "write_batch_size": 8, **limits}
        pq.write_table(table, sink, compression=codec, use_dictionary=dictionary, **options)
        file, data = pq.ParquetFile(sink), sink.getvalue()
        chunk, column = file.metadata.row_group(0).column(0), file.schema.column(0)

        def read(offset: int, count: int, data: bytes = data) -> bytes:
            return data[offset : offset + count]

        pages = read_pages(chunk, read)
        expected = max(own_bytes(row, size) for row in rows)
        found = largest_row(chunk, column, pages, read)
        numbers = 8 if form == "number" else 0
        assert expected <= found <= expected * (1 + numbers / 16)
        assert found <= upper_bound(pages, column.length)


def write_repeated(path: Path, form: str, number: int) -> dict[str, Any]:
    """Row 0 repeats one entry of 20,000 bytes; the other two are as they should be."""
    path.mkdir(parents=True, exist_ok=True)
    entries = [image_bytes(56, 56) + bytes(20_000), image_bytes(28, 56)]
    values = pa.DictionaryArray.from_arrays(pa.array([0] * number + [1, 1], pa.int32()), entries)
    ends = pa.array([0, number, number + 1, number + 2], pa.int32())
    if "view" in form:
        values = values.dictionary_decode().cast(pa.binary_view())
    images = pa.ListArray.from_arrays(ends, values)
    table = pa.table({"images": images, "question": ["What?"] * 3, "answer": ["It."] * 3})
    if form == "parquet":
        pq.write_table(table, path / "a.parquet", row_group_size=1, compression="zstd")
        return {"format": "parquet", "path": str(path), "task": "vqa"}
    with pa.ipc.new_stream(path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    return {"format": "huggingface", "path": str(path), "task": "vqa"}


@pytest.mark.parametrize("form", ["parquet", "arrow", "arrow of views"])
def test_rows_that_repeat_an_entry(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set aside before they are decoded; the rows beside them are read."""
    monkeypatch.setattr(tables, "MAX_ROW_BYTES", 300_000)
    monkeypatch.setattr(tables, "MAX_JSON_BYTES", 100_000)
    monkeypatch.setattr(parquet_rows, "MAX_ROW_BYTES", 300_000)
    monkeypatch.setattr(row_files, "_MAX_BATCH_BYTES", 100_000)
    monkeypatch.setattr(row_files, "_MAX_PART_BYTES", 100_000)
    decoded, to_rows = [], tables._to_rows
    monkeypatch.setattr(
        tables, "_to_rows", lambda batch, media: decoded.append(len(batch)) or to_rows(batch, media)
    )
    for number, expected in ((5, "ok"), (100, "too_costly")):
        decoded.clear()
        source = write_repeated(tmp_path / f"{number}", form, number)
        rows = list(accounting.account(accounting.open_one(source, tmp_path)))
        assert [outcome for _, outcome, _ in rows] == [expected, "ok", "ok"]
        assert sum(decoded) == (2 if form == "parquet" and number == 100 else 3)


def test_batches_are_as_small_as_the_largest_row_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "_MAX_BATCH_BYTES", 500_000)
    images = [[b"a" * 20_000] * 10] * 20
    pq.write_table(pa.table({"images": images}), tmp_path / "a")
    rows = RowFile.open(open(tmp_path / "a", "rb"), "parquet_row")  # noqa: SIM115 - it closes it
    batches = list(rows.batches(range(1), ["images"]))
    assert [len(batch) for batch in batches] == [2] * 10
    assert pa.Table.from_batches(batches)["images"].to_pylist() == images


def test_bytes_of_values_that_share_memory() -> None:
    texts = ["ab", "c" * 100, None, "ab"]
    plain = pa.array(texts)
    for array in (plain.dictionary_encode(), plain.cast(pa.string_view())):
        batch = pa.record_batch({"a": array, "b": pa.StructArray.from_arrays([array], ["c"])})
        assert 2 * 104 <= value_bytes(batch) <= 2 * 104 + 100
        assert value_bytes(batch.slice(1, 1)) - value_bytes(batch.slice(0, 1)) == 2 * 98


@pytest.mark.parametrize(
    "images",
    [
        pa.array([["a.jpg"]], pa.list_view(pa.string())),
        pa.array(
            [[{"path": ["a.jpg"]}]], pa.list_(pa.struct([("path", pa.list_view(pa.string()))]))
        ),
        pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), pa.array(["a.jpg"])),
    ],
    ids=["views", "within", "runs"],
)
def test_types_that_are_not_read(tmp_path: Path, images: pa.Array) -> None:
    table = pa.table({"images": images, "question": ["What?"], "answer": ["It."]})
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    source = {"format": "huggingface", "path": str(tmp_path), "task": "vqa"}
    with pytest.raises(StageError, match=r"column 'images' has the type .*, which is not read"):
        accounting.outcomes(source, tmp_path)


@pytest.mark.parametrize("damage", ["index", "runs", "length"])
def test_damaged_pages_are_said(damage: str) -> None:
    """An index beyond the dictionary, more values than there are, lengths beyond the page."""
    sink = io.BytesIO()
    table = pa.table({"a": [[b"a" * 300] * 9]})
    options: dict[str, Any] = {"use_dictionary": damage != "length", "compression": "none"}
    pq.write_table(table, sink, **options)
    file, data = pq.ParquetFile(sink), bytearray(sink.getvalue())
    chunk, column = file.metadata.row_group(0).column(0), file.schema.column(0)

    def read(offset: int, count: int) -> bytes:
        return bytes(data[offset : offset + count])

    pages = read_pages(chunk, read)
    values = pages[-1].offset + pages[-1].unpacked - (2 if damage == "index" else 0)
    if damage == "index":
        data[values : values + 2] = b"\x12\x05"  # a run of nine times entry 5
    elif damage == "runs":
        data[pages[-1].offset + 4] = 0
    else:
        data[pages[-1].offset + pages[-1].unpacked - 2 * 304 + 3] = 127
    with pytest.raises(pa.ArrowInvalid, match=r"write the file again|beyond the end"):
        largest_row(chunk, column, pages, read)


def test_lists_of_booleans_in_headers_take_bytes() -> None:
    """A list that claims 2⁶⁰ of them would never end."""
    header = b"\x15\x00\x15\x00\x15\x00\x29\xf1" + b"\xff" * 8 + b"\x0f" + bytes(9)
    chunk = SimpleNamespace(
        dictionary_page_offset=None, data_page_offset=4, total_compressed_size=100
    )
    with pytest.raises(pa.ArrowInvalid, match="no header of a page"):
        read_pages(chunk, lambda offset, size: header)

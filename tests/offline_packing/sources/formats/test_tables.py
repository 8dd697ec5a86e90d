"""Tables: types of columns that writers choose, their names, and which files are read."""

import io
import json
import re
import resource
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offline_packing.errors import StageError
from offline_packing.measure.measure import measure
from offline_packing.sources import open_source
from offline_packing.sources.formats import tables
from offline_packing.sources.reading import rows as row_files
from offline_packing.sources.reading.rows import ArrowBatches, RowFile
from offline_packing.verify.verify import verify
from tests.helpers import formats
from tests.helpers.accounting import account, open_one, outcomes, turns_in
from tests.helpers.datasets import image_bytes, index_rows, make_run, pack_all, write_json

JPEG = image_bytes()
OTHER = image_bytes(84, 56)


def write_parquet(folder: Path, table: pa.Table, **options: Any) -> dict[str, Any]:
    """A source of one file."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / "a.parquet", **options)
    return {"format": "parquet", "path": str(folder), "task": "captioning"}


def save_arrow(
    path: Path, table: pa.Table, form: str = "stream", rows: int | None = None, **options: Any
) -> dict[str, Any]:
    """A source of one file, in batches of some rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
    with new(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return {"format": "huggingface", "path": str(path.parent), "task": "captioning"}


def texts_of(source: dict[str, Any], tmp_path: Path) -> list[str]:
    """The answers of all samples, read again from their locators."""
    return [answer for turns in turns_in(source, tmp_path).values() for _, answer in turns]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()], ids=str)
def test_text_that_is_stored_as_bytes(tmp_path: Path, kind: pa.DataType) -> None:
    captions = pa.array(["Ein Kätzchen.".encode(), b"A dog.", b"\xff\xfe", None], kind)
    table = pa.table({"id": ["a", "b", "c", "d"], "image": [JPEG] * 4, "caption": captions})
    source = write_parquet(tmp_path / "data", table)
    assert texts_of(source, tmp_path) == ["Ein Kätzchen.", "A dog."]
    lost = {"a:2": "bad_json", "d": "bad_record"}
    assert outcomes(source, tmp_path) == {"a": "ok", "b": "ok"} | lost


def test_messages_and_ids_that_are_stored_as_bytes(tmp_path: Path) -> None:
    message = pa.struct([("role", pa.binary()), ("content", pa.binary())])
    turns = [{"role": b"user", "content": b"What?"}, {"role": b"assistant", "content": b"That."}]
    table = pa.table(
        {"id": pa.array([b"k"], pa.binary()), "messages": pa.array([turns], pa.list_(message))}
    )
    source = {**write_parquet(tmp_path / "data", table), "task": "bmr"}
    assert turns_in(source, tmp_path) == {"k": [("What?", "That.")]}


def test_times_in_nanoseconds_are_kept_without_pandas(tmp_path: Path) -> None:
    kinds = (pa.timestamp("ns"), pa.duration("ns"), pa.time64("ns"))
    times = {f"{i}": pa.array([10**9 + 1], kind) for i, kind in enumerate(kinds)}
    table = pa.table({"image": [JPEG], "caption": ["A."], **times})
    source = write_parquet(tmp_path / "data", table)
    measure(run := make_run({**source, "keep": [*times]}, tmp_path / "out"))
    (row,) = index_rows(run)
    texts = ["1970-01-01T00:00:01", "0:00:01", "00:00:01"]
    assert [value["text"] for _, value in row["kept"]] == texts


def test_lists_that_are_stored_as_json(tmp_path: Path) -> None:
    """As in CSV; a text that begins like one stays text."""
    said = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "That."}]
    columns = {
        "messages": [json.dumps(said), None, None],
        "images": ['["a.jpg"]', "[b].jpg", None],
        "question": [None, "What?", "And?"],
        "answer": [None, "[sic]", '["so"]'],
        "history": [None, None, '[["Who?", "I."]]'],
    }
    for name in ("a.jpg", "[b].jpg"):
        formats.write_file(tmp_path / "data" / name, JPEG)
    source = {**write_parquet(tmp_path / "data", pa.table(columns)), "task": "bmr"}
    assert [*outcomes(source, tmp_path).values()] == ["ok"] * 3
    assert texts_of(source, tmp_path) == ["That.", "[sic]", '["so"]']


def dictionary_of(values: list[bytes]) -> pa.Array:
    return pa.array(values, pa.binary()).dictionary_encode()


IMAGE_COLUMNS = {
    "dictionary": dictionary_of,
    "large_binary": lambda values: pa.array(values, pa.large_binary()),
    "binary_view": lambda values: pa.array(values, pa.binary_view()),
    "fixed_size_binary": lambda values: pa.array(
        [value.ljust(4000, b"\0") for value in values], pa.binary(4000)
    ),
    "fixed_size_list": lambda values: pa.array([[v] for v in values], pa.list_(pa.binary(), 1)),
    "list_of_view": lambda values: pa.array([[v] for v in values], pa.list_(pa.binary_view())),
    "list_of_dictionary": lambda values: pa.ListArray.from_arrays(
        range(len(values) + 1), dictionary_of(values)
    ),
    "struct_of_large_binary": lambda values: pa.array(
        [{"bytes": value, "path": None} for value in values],
        pa.struct([("bytes", pa.large_binary()), ("path", pa.string())]),
    ),
}


def test_images_of_every_binary_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches that each have a dictionary of their own; shards read copies of large groups."""
    images = [image_bytes(28 * (2 + i // 4), 56) for i in range(12)]
    assert max(map(len, images)) < 4000
    captions = pa.array([f"Number {i}." for i in range(12)]).dictionary_encode()
    for form, column in IMAGE_COLUMNS.items():
        table = pa.table({"im,age": column(images), "te,xt": captions, "other,": range(12)})
        source = write_parquet(tmp_path / form, table, row_group_size=4)
        source["fields"] = {"images": "im,age", "caption": "te,xt"}
        opened = open_one(source, tmp_path)
        media = [opened.read_media(at) for *_, row in account(opened) if row for at in row.media]
        assert [data.rstrip(b"\0") for data in media] == images, form
        for small_group in {"dictionary": (0,), "list_of_view": (0, 1 << 30)}.get(form, ()):
            monkeypatch.setattr(row_files, "SMALL_GROUP", small_group)
            run = make_run(source, tmp_path / f"{form} {small_group}")
            assert pack_all(run).counts.packed == 12
            assert verify(run, deep=True).ok


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("split", ["", "train/"])
def test_files_that_map_left_behind_are_not_read(
    tmp_path: Path, split: str, has_state: bool
) -> None:
    samples = formats.draw_samples(4)
    root = tmp_path / "data"
    save_arrow(root / f"{split}data-00000-of-00002.arrow", formats.table(samples[:2]))
    save_arrow(root / f"{split}data-00001-of-00002.arrow", formats.table(samples[2:]))
    save_arrow(root / f"{split}cache-0123456789abcdef.arrow", formats.table(samples))
    if split:
        write_json(root / "dataset_dict.json", {"splits": ["train"]})
    if has_state:
        names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
        write_json(root / f"{split}state.json", {"_data_files": [{"filename": n} for n in names]})
        save_arrow(root / f"{split}older.arrow", formats.table(samples))
    source = {"format": "huggingface", "path": str(root)}
    assert outcomes(source, tmp_path) == {key: "ok" for key, *_ in samples}
    if has_state:
        (root / f"{split}data-00001-of-00002.arrow").unlink()
        with pytest.raises(StageError, match=r"data-00001.*, which state\.json names, does not"):
            outcomes(source, tmp_path)
        write_json(root / f"{split}state.json", [])
        with pytest.raises(StageError, match=r"state\.json names no _data_files"):
            outcomes(source, tmp_path)


@pytest.mark.parametrize(("has_split", "count"), [(False, 9), (True, 9), (True, 4)])
def test_rows_are_compared_with_the_count_of_the_dataset(
    tmp_path: Path, has_split: bool, count: int
) -> None:
    root, split = tmp_path / "data", "test/" if has_split else ""
    table = formats.table(formats.draw_samples(4))
    save_arrow(root / f"{split}data-00000-of-00001.arrow", table)
    if has_split:
        write_json(root / "dataset_dict.json", {"splits": ["train", "test"]})
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "test"}
    write_json(root / f"{split}state.json", state)
    counts = {"train": {"num_examples": 7}, "test": {"num_examples": count}}
    write_json(root / f"{split}dataset_info.json", {"splits": counts})
    options = {"split": "test"} if has_split else {}
    source = {"format": "huggingface", "path": str(root), "task": "captioning", **options}
    run = make_run(source, tmp_path / "out")
    found = [line for line in measure(run).info.warnings if "dataset_info.json" in line]
    assert len(found) == (count != 4)
    assert all("holds 4 rows, its dataset_info.json counts 9" in line for line in found)
    (root / f"{split}dataset_info.json").write_bytes(b"{")
    assert not open_source(source).scan(100).warnings


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("times", [1, -1], ids=["batch", "batch and columns"])
def test_batches_that_claim_more_rows_than_they_hold(
    tmp_path: Path, compression: str | None, times: int
) -> None:
    """They are damage of the file, not so many rows that are set aside one by one."""
    table = pa.table({"text": ["a"] * 12_345})
    save_arrow(tmp_path / "a.arrow", table, compression=compression)
    whole = (tmp_path / "a.arrow").read_bytes()
    assert ArrowBatches(io.BytesIO(whole)).num_rows == [12_345]
    number = struct.pack("<q", 12_345)
    claimed = whole.replace(number, struct.pack("<q", 2**50), times)
    assert claimed != whole
    if compression and times == 1:  # the columns' numbers come first
        pytest.skip("which number is the batch's depends on the writer")
    with pytest.raises((pa.ArrowException, OSError)):
        ArrowBatches(io.BytesIO(claimed))


def test_a_compressed_buffer_outside_of_its_batch(tmp_path: Path) -> None:
    save_arrow(tmp_path / "a.arrow", pa.table({"a": range(1000)}), compression="lz4")
    data = (tmp_path / "a.arrow").read_bytes()
    (message,) = (
        m for m in pa.ipc.MessageReader.open_stream(io.BytesIO(data)) if m.type == "record batch"
    )
    buffers = struct.pack("<qqq", 0, 0, 0)  # no nulls; then the values, from the first byte on
    place = data.index(buffers, data.index(message.metadata.to_pybytes())) + 16
    hostile = data[:place] + struct.pack("<q", 1 << 40) + data[place + 8 :]
    with pytest.raises(pa.ArrowInvalid, match="outside"):
        ArrowBatches(io.BytesIO(hostile))


@pytest.mark.parametrize("damage", ["cut between batches", "a false end"])
def test_arrow_stream_that_ends_early(tmp_path: Path, damage: str) -> None:
    """Arrow takes the rest for the whole."""
    path = tmp_path / "data" / "data-00000-of-00001.arrow"
    path.parent.mkdir()
    table = pa.table({"text": [f"caption {i}" for i in range(9)]})
    ends = []
    with open(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=3):
            writer.write_batch(batch)
            ends.append(file.tell())
    data = path.read_bytes()
    end = b"\xff\xff\xff\xff" + bytes(4)
    assert data.endswith(end)
    path.write_bytes(data[: ends[0]] + (end + data[ends[0] + 8 :] if "false" in damage else b""))
    source = {"format": "huggingface", "path": str(path.parent), "task": "captioning"}
    with pytest.raises(StageError, match=rf"{path.name}.* its 3 rows do not end in an"):
        open_source(source).scan(9)


def test_pictures_in_columns_that_texts_are_named_by(tmp_path: Path) -> None:
    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    output = pa.array([{"bytes": OTHER, "path": None}], picture)
    table = pa.table({"id": ["a"], "image": [JPEG], "output": output, "caption": ["A dog."]})
    source = write_parquet(tmp_path / "data", table)
    assert texts_of(source, tmp_path) == ["A dog."]


def test_row_groups_above_the_memory_are_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the footer's own sizes; groups that are smaller are read."""
    images = [JPEG, JPEG + bytes(700_000), OTHER + bytes(800_000)]
    table = pa.table({"image": images, "caption": ["A dog."] * 3})
    monkeypatch.setattr(tables, "machine_memory", lambda: 1_000_000)
    for group_rows, expected in ((1, ["ok"] * 3), (2, ["ok"] * 3), (3, ["too_costly"] * 3)):
        source = write_parquet(tmp_path / "data", table, row_group_size=group_rows)
        opened = open_one(source, tmp_path)
        assert [outcome for _, outcome, _ in account(opened)] == expected


def write_repeated(path: Path, form: str, number: int, size: int = 20_000) -> dict[str, Any]:
    """Row 0 repeats one entry of `size` bytes; the last one has a long text."""
    path.mkdir(parents=True, exist_ok=True)
    entries = [image_bytes(56, 56) + bytes(size), image_bytes(28, 56)]
    values = pa.DictionaryArray.from_arrays(pa.array([0] * number + [1, 1], pa.int32()), entries)
    ends = pa.array([0, number, number + 1, number + 2], pa.int32())
    if "view" in form:
        values = values.dictionary_decode().cast(pa.binary_view())
    images = pa.ListArray.from_arrays(ends, values)
    answers = ["It.", "It.", "It" * 60_000]
    table = pa.table({"images": images, "question": ["What?"] * 3, "answer": answers})
    if form == "parquet":
        options: dict[str, Any] = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30}
        pq.write_table(table, path / "a.parquet", row_group_size=1, **options)
        return {"format": "parquet", "path": str(path), "task": "vqa"}
    return {**save_arrow(path / "a.arrow", table), "task": "vqa"}


@pytest.mark.parametrize("form", ["parquet", "arrow", "arrow of views"])
def test_rows_that_repeat_an_entry(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set aside before their values are Python's, as is a row with a long text."""
    monkeypatch.setattr(tables, "MAX_ROW_BYTES", 300_000)
    monkeypatch.setattr(tables, "MAX_JSON_BYTES", 100_000)
    monkeypatch.setattr(row_files, "_MAX_PART_BYTES", 100_000)
    for number, expected in ((5, "ok"), (100, "too_costly")):
        source = write_repeated(tmp_path / f"{number}", form, number)
        rows = list(account(open_one(source, tmp_path)))
        assert [outcome for _, outcome, _ in rows] == [expected, "ok", "too_costly"]


def test_a_table_above_the_memory_of_its_task(tmp_path: Path) -> None:
    """A file of some kB that takes 1.5 GiB where a task may take 0.5 more, as workers are bounded:
    it is named and counted, and the other files are packed."""
    sources = []
    for form in ("parquet", "arrow"):
        write_repeated(tmp_path / form, form, 1500, 1 << 20)
        (tmp_path / form / f"a.{form}").rename(tmp_path / form / f"large.{form}")
        sources.append(write_repeated(tmp_path / form, form, 3))
    run = make_run(sources, tmp_path / "out", pack={"max_set_aside": 1})
    taken = int(re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (taken + (1 << 29), limits[1]))
    try:
        info = measure(run).info
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    assert (info.num_samples, dict(info.set_aside)) == (6, {"damaged_source": 6})


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
    source = {**save_arrow(tmp_path / "a.arrow", table), "task": "vqa"}
    with pytest.raises(StageError, match=r"column 'images' has the type .*, which is not read"):
        outcomes(source, tmp_path)


PACKED: dict[str, Any] = {"rows": 8, "compression": "zstd", "emit_dictionary_deltas": True}


@pytest.mark.parametrize(
    ("form", "small_group"), [("stream", 0), ("stream", 1 << 30), ("file", 0), ("dictionary", 0)]
)
def test_compressed_arrow_batches(
    tmp_path: Path, form: str, small_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacked one at a time, but where they share dictionaries; each once for a shard, too."""
    monkeypatch.setattr(row_files, "SMALL_GROUP", small_group)
    images = [image_bytes(28 * (2 + i // 8), 56) + bytes(5000) for i in range(24)]
    texts = pa.array([f"Number {i % 3}." for i in range(24)])
    captions = texts.dictionary_encode() if form == "dictionary" else texts
    table = pa.table({"id": [f"{i:02d}" for i in range(24)], "image": images, "caption": captions})
    source = save_arrow(tmp_path / "data" / "a.arrow", table, form, **PACKED)
    with open(tmp_path / "data" / "a.arrow", "rb") as file:
        batches = ArrowBatches(file)
    assert batches.num_rows == [8, 8, 8]
    expected = sum(map(len, images[:8]))
    if form != "dictionary":
        assert all(expected < size < expected + 8000 for size in batches.unpacked)
    reads, read = [], ArrowBatches.read

    def unpack(self: ArrowBatches, number: int) -> pa.RecordBatch:
        reads.extend([number] * (self.unpacked[number] > 0))
        return read(self, number)

    monkeypatch.setattr(ArrowBatches, "read", unpack)
    run = make_run(source, tmp_path / "out")
    assert pack_all(run).counts.packed == 24
    if form != "dictionary":
        assert sorted(reads) == [0, 0, 1, 1, 2, 2]  # unpacked to be measured and to be written
    assert verify(run, deep=True).ok


def test_compressed_arrow_batches_that_are_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [JPEG] * 8 + [JPEG + bytes(200_000)] * 8
    table = pa.table({"image": images, "caption": ["A dog."] * 16})
    path = tmp_path / "data" / "a.arrow"
    source = save_arrow(path, table, **PACKED)
    monkeypatch.setattr(tables, "machine_memory", lambda: 1_000_000)
    found = [outcome for _, outcome, _ in account(open_one(source, tmp_path))]
    assert found == ["ok"] * 8 + ["too_costly"] * 8
    coded = table.set_column(1, "caption", table["caption"].dictionary_encode())
    save_arrow(path, coded, **PACKED)
    monkeypatch.setattr(row_files, "machine_memory", lambda: 1_000_000)
    with pytest.raises(
        pa.ArrowInvalid, match=r"with dictionaries, 1,6.* in all > the memory's 1,000,000"
    ):
        RowFile(open(path, "rb"), "arrow_row")  # noqa: SIM115 - it closes the file


@pytest.mark.parametrize("kind", ["parquet_row", "arrow_row"])
def test_rows_are_handed_on_a_few_megabytes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(row_files, "_MAX_PART_BYTES", 1000)
    table = pa.table({"image": [bytes([i]) * size for i, size in enumerate((9, 9, 2000, 5, 700))]})
    with open(tmp_path / "a", "wb") as file:
        if kind == "parquet_row":
            pq.write_table(table, file)
        else:
            row_files.write_arrow(file, table.to_batches())
    rows = RowFile(open(tmp_path / "a", "rb"), kind)  # noqa: SIM115 - it closes the file
    parts = list(rows.batches(0, ["image"]))
    assert [len(part) for part in parts] == [2, 1, 2]
    assert pa.Table.from_batches(parts) == table

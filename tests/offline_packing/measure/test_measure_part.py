"""Records are measured in groups: in order, and with few media in memory at a time."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from offline_packing.errors import as_sample_error
from offline_packing.sources import Embedded, Source, SourceRecord
from task_encoders.samples import SampleError
from tests.helpers.accounting import measuring_of, open_one

#: Of the records, every seventh has an empty answer.
NUM_RECORDS = 100


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("data")
    for i in range(NUM_RECORDS):
        answer = "" if i % 7 == 0 else f"Answer {i}."
        record = {"id": str(i), "question": "What?", "answer": answer}
        (folder / f"{i:03d}.json").write_bytes(orjson.dumps(record))
    return open_one({"format": "pairs", "path": str(folder)}, Path(folder))


def records(source: Source) -> list[SourceRecord]:
    (part,) = source.scan(1000).parts
    return [replace(record, paired_media=None) for record in source.records(part)]


def test_rows_are_in_the_order_of_the_records(source: Source) -> None:
    found = records(source)
    rows = list(measuring_of(source).rows(enumerate(found)))
    assert [row["key"] for row in rows] == [record.key for record in found]
    measured = ["reason" not in row for row in rows]
    assert measured == [i % 7 != 0 for i in range(NUM_RECORDS)]


@pytest.mark.parametrize(("num_bytes", "most"), [(0, 32), (1 << 20, 16), (20 << 20, 1)])
def test_media_in_records_are_held_within_a_limit(
    source: Source, num_bytes: int, most: int
) -> None:
    found = records(source)[:40]
    medium = Embedded(found[0].locator, bytes(num_bytes))
    drawn = 0

    def draw() -> Iterator[SourceRecord]:
        nonlocal drawn
        for record in found:
            drawn += 1
            yield replace(record, embedded={"a.jpg": medium})

    rows = measuring_of(source).rows(enumerate(draw()))
    next(rows)
    assert drawn == most
    assert len(list(rows)) == len(found) - 1


def test_an_error_holds_nothing_of_its_record() -> None:
    def fail(record: bytes) -> None:
        raise SampleError("too_costly", f"{len(record)} bytes")

    with pytest.raises(SampleError) as raised:
        fail(bytes(100))
    assert raised.value.__traceback__ is not None  # whose frames have the record
    kept = as_sample_error(raised.value)
    assert (str(kept), kept.__traceback__) == ("too_costly: 100 bytes", None)

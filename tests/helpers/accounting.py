"""Reading a source as `measure` does, without its files: what becomes of every record."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from offline_packing.index.table import INDEX_SCHEMA
from offline_packing.layouts.shards import COLUMNS, PlannedSample, read_planned
from offline_packing.measure.measure_part import MeasureTask, Measuring
from offline_packing.sources import Source, SourcePart, open_source
from task_encoders.samples import REASONS
from tests.helpers.datasets import make_config

#: Model limits of the tests.
MODEL = make_config(Path("data"), Path("out")).model


def open_one(config: dict[str, Any], scratch: Path) -> Source:
    """The source of a configuration; `task` defaults to bmr."""
    return open_source({"task": "bmr", **config}, unpack_folder=scratch / "unpacked")


def measuring_of(source: Source) -> Measuring:
    """Return what measures the records of a source, all of them diagnosed."""
    return Measuring(MeasureTask(0, source, 0, SourcePart(None, None), MODEL, Path(), Path()))


def measured_rows(source: Source) -> list[dict[str, Any]]:
    """The rows of all records."""
    measuring = measuring_of(source)
    records = (record for part in source.scan(3).parts for record in source.records(part))
    return [row for record in records for row in measuring.rows([(0, record)])]


def account(source: Source) -> list[tuple[str, str, PlannedSample | None]]:
    """(key, 'ok' or the reason, sample) of every record. Samples are read again from their
    locators."""
    found: list[tuple[str, str, PlannedSample | None]] = []
    for row in measured_rows(source):
        key = row["key"].removeprefix(source.key_prefix)
        if "reason" in row:
            assert row["reason"] in REASONS
            found.append((key, row["reason"], None))
        else:
            found.append((key, "ok", read_again(source, key, row)))
    return found


def read_again(source: Source, key: str, row: dict[str, Any]) -> PlannedSample:
    """A measured sample, which is read from nothing but its locators."""
    (one,) = read_planned(pa.Table.from_pylist([row], INDEX_SCHEMA).select(COLUMNS))
    num_images = len(one.media) - one.num_videos
    sample = source.read_sample(key, one.json, num_images, one.num_videos)
    sizes = [len(source.read_media(locator)) for locator in one.media]
    assert sizes == [locator.size for locator in one.media]
    assert len(sample.turns) == row["num_turns"]
    return one


def outcomes(config: dict[str, Any], scratch: Path) -> dict[str, str]:
    """Key -> 'ok' or the reason; no key twice."""
    found = account(open_one(config, scratch))
    assert len({key for key, _, _ in found}) == len(found)
    return {key: outcome for key, outcome, _ in found}


def turns_in(config: dict[str, Any], scratch: Path) -> dict[str, list[tuple[str, str]]]:
    """Prompts and answers of the samples by their keys, read again from their locators."""
    source = open_one(config, scratch)
    rows = [(row, row.num_videos) for *_, row in account(source) if row is not None]
    samples = (
        source.read_sample(row.key, row.json, len(row.media) - videos, videos)
        for row, videos in rows
    )
    return {sample.key: [(turn.prompt, turn.answer) for turn in sample.turns] for sample in samples}

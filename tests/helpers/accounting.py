"""Reading a source as `measure` does, without its files: what becomes of every record."""

from pathlib import Path
from typing import Any

from offline_packing.index.measured import MeasuredSample
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


def account(source: Source) -> list[tuple[str, str, MeasuredSample | None]]:
    """(key, 'ok' or the reason, row) of every record. Rows are read again from their locators."""
    measuring = measuring_of(source)
    found: list[tuple[str, str, MeasuredSample | None]] = []
    for part in source.scan(3).parts:
        for record in source.records(part):
            (row,) = measuring.rows([(0, record)])
            if isinstance(row, MeasuredSample):
                found.append((record.key, "ok", row))
            else:
                found.append((record.key, row.reason, None))
    assert {outcome for _, outcome, _ in found} <= {"ok", *REASONS}
    for key, _, row in found:
        if row is not None:
            read_again(source, key, row)
    return found


def read_again(source: Source, key: str, row: MeasuredSample) -> list[bytes]:
    """A measured sample from nothing but its locators; its images."""
    num_images = len(row.media) - row.num_videos
    sample = source.read_sample(key, row.json, num_images, row.num_videos)
    images = [source.read_media(locator) for locator, _ in row.media]
    assert [len(image) for image in images] == [locator.size for locator, _ in row.media]
    assert len(sample.turns) == row.num_turns
    return images


def outcomes(config: dict[str, Any], scratch: Path) -> dict[str, str]:
    """Key -> 'ok' or the reason; no key twice."""
    found = account(open_one(config, scratch))
    assert len({key for key, _, _ in found}) == len(found)
    return {key: outcome for key, outcome, _ in found}

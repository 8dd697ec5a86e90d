"""Reading a source as `measure` does, without its files: what becomes of every record."""

from pathlib import Path
from typing import Any

from offline_packing.config.packing import SourceConfig
from offline_packing.index.table import MeasuredSample
from offline_packing.measure.measure_part import measure_record
from offline_packing.runs.run import open_encoder
from offline_packing.sources import Source, source_class
from task_encoders.samples import REASONS, SampleError
from tests.helpers.datasets import make_config

#: Model limits of the tests.
MODEL = make_config(Path("data"), Path("out")).model


def open_source(config: dict[str, Any], scratch: Path) -> Source:
    """The source of a configuration; `task` defaults to bmr."""
    parsed = SourceConfig(**{"task": "bmr", **config})
    return source_class(parsed.format)(
        parsed.path,
        parsed.task,
        image_root=parsed.image_root,
        fields=parsed.fields,
        split=parsed.split,
        dataset=parsed.dataset,
        unpack_folder=scratch / "unpacked",
    )


def account(source: Source) -> list[tuple[str, str, MeasuredSample | None]]:
    """(key, 'ok' or the reason, row) of every record. Rows are read again from their locators."""
    encoder = open_encoder(MODEL)
    found: list[tuple[str, str, MeasuredSample | None]] = []
    for part in source.scan(3).parts:
        for record in source.records(part):
            try:
                row = measure_record(record, record.key, source, 0, encoder, 10**7)
            except SampleError as error:
                found.append((record.key, error.reason, None))
                continue
            found.append((record.key, "ok", row))
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
    found = account(open_source(config, scratch))
    assert len({key for key, _, _ in found}) == len(found)
    return {key: outcome for key, outcome, _ in found}

"""Measuring one part of a source: one part of the index, and one of the set-aside table.

Media are not decoded: their size is read from the header.
"""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson
import pyarrow.compute as pc
import pyarrow.parquet as pq

from offline_packing.engines.local import advance
from offline_packing.errors import StageError
from offline_packing.index import table as index
from offline_packing.index.measured import (
    MeasuredSample,
    SetAsideSample,
    index_table,
    sample_stamp,
    sample_traits,
    set_aside_table,
)
from offline_packing.measure.identity import NewRecords, hash_content
from offline_packing.runs.run import open_encoder
from offline_packing.sources import Locator, Source, SourcePart, SourceRecord
from offline_packing.sources.lost_fields import lost_fields
from task_encoders.families import ModelSettings
from task_encoders.media.image import MAX_IMAGE_PIXELS, read_image_header
from task_encoders.media.video_file import MissingPyAVError, VideoHeader, read_video_header
from task_encoders.pack_format import image_extension, video_extension
from task_encoders.sample_encoder import SampleEncoder
from task_encoders.samples import SampleError, SourceSample

#: Rows that a worker holds at a time: a part of a compressed source may have any number.
_ROWS_AT_ONCE: Final = 1024
#: Metadata of a part of the set-aside table: how many samples were left out, and what others lack.
_SKIPPED: Final = "num_skipped"
_LOST_FIELDS: Final = "lost_fields"


@dataclass(frozen=True)
class MeasureTask:
    """One part of one source, and where its two tables go."""

    number: int
    source: Source
    source_id: int
    part: SourcePart
    model: ModelSettings
    index_path: Path
    set_aside_path: Path


@dataclass(frozen=True)
class PartResult:
    """What a measured part holds."""

    num_rows: int
    num_tokens: int
    set_aside: Counter[str]
    #: left out by source.skip
    num_skipped: int
    #: what samples lack -> how many; see sources/lost_fields.py
    lost_fields: Counter[str]

    @property
    def num_records(self) -> int:
        """Samples of both tables, and those that were left out."""
        return self.num_rows + self.set_aside.total() + self.num_skipped


def read_result(task: MeasureTask) -> PartResult:
    """What a measured part holds, by its two tables."""
    num_tokens = pq.read_table(task.index_path, columns=["num_tokens"])["num_tokens"]
    with pq.ParquetFile(task.set_aside_path) as aside:
        reasons = Counter(aside.read(["reason"])["reason"].to_pylist())
        notes = aside.metadata.metadata or {}
    skipped = int(notes.get(_SKIPPED.encode(), 0))
    lost = Counter(orjson.loads(notes.get(_LOST_FIELDS.encode(), b"{}")))
    return PartResult(len(num_tokens), pc.sum(num_tokens).as_py() or 0, reasons, skipped, lost)


def measure_part(task: MeasureTask) -> None:
    """Measure one part and write its two tables. The index part comes last and marks completion."""
    encoder = open_encoder(task.model)
    notes: dict[str, str] = {}
    lost: Counter[str] = Counter()
    with (
        index.table_writer(task.index_path, index.INDEX_SCHEMA) as write_measured,
        index.table_writer(task.set_aside_path, index.SET_ASIDE_SCHEMA, notes) as write_aside,
    ):
        new = NewRecords(task.source, task.part)
        records = iter(new)
        while True:  # one record at a time, as it may hold its media
            some = itertools.islice(records, _ROWS_AT_ONCE)
            measured, aside = _measure_some(task, some, encoder, lost)
            if not measured and not aside:
                break
            write_measured(index_table(measured))
            write_aside(set_aside_table(aside))
        if new.num_skipped:
            notes[_SKIPPED] = str(new.num_skipped)
        if lost:
            notes[_LOST_FIELDS] = orjson.dumps(lost).decode()


def _measure_some(
    task: MeasureTask, records: Iterable[SourceRecord], encoder: SampleEncoder, lost: Counter[str]
) -> tuple[list[MeasuredSample], list[SetAsideSample]]:
    """Rows of both tables. What samples lack is counted in `lost`."""
    source = task.source
    measured: list[MeasuredSample] = []
    aside: list[SetAsideSample] = []
    for record in records:
        advance()
        key = source.key_prefix + record.key
        try:
            sample = source.sample(record, key)
            row = measure_record(record, sample, source, task.source_id, encoder, task.model)
            lost.update(set(lost_fields(record, sample, source.fields)))
        except SampleError as error:
            aside.append(SetAsideSample(key, source.path, error.reason, error.detail))
            continue
        except Exception as error:
            kind = "" if isinstance(error, MissingPyAVError) else f"{type(error).__name__}: "
            raise StageError(f"sample {key!r} in {source.path}: {kind}{error}") from error
        measured.append(row)
    return measured, aside


def measure_record(
    record: SourceRecord,
    sample: SourceSample,
    source: Source,
    source_id: int,
    encoder: SampleEncoder,
    model: ModelSettings,
) -> MeasuredSample:
    """One row of the index. Raises SampleError if the record must be set aside."""
    max_pixels = model.max_image_pixels or MAX_IMAGE_PIXELS
    media: list[tuple[Locator, str]] = []  # of each image, then of each video; and its extension
    sizes: list[tuple[int, int]] = []  # (height, width)
    videos: list[VideoHeader] = []
    for name in sample.images:
        locator, file = source.open_media(record, name)
        with file:
            header = read_image_header(file, max_image_pixels=max_pixels)
        media.append((locator, image_extension(name, header.format)))
        sizes.append((header.height, header.width))
    for name in sample.videos:
        locator, file = source.open_media(record, name)
        limits = {"max_frame_pixels": max_pixels, "max_frames": model.max_video_frames}
        with file:
            video = read_video_header(file, **limits)
        media.append((locator, video_extension(name, video.extension)))
        videos.append(video)
    names = (*sample.images, *sample.videos)
    return MeasuredSample(
        sample.key,
        source_id,
        source.task,
        len(sample.turns),
        encoder.measure(sample, sizes, videos),
        record.locator,
        tuple(media),
        sample_stamp(source, record.locator, (locator for locator, _ in media)),
        sample_traits(sample, sizes),
        len(videos),
        hash_content(sample, map(record.embedded.get, names)) if record.own_id else 0,
    )

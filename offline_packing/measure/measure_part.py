"""Measuring one part of a source: one part of the index, and one of the set-aside table.

Media are not decoded: their size is read from the header.
"""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import orjson
import pyarrow.compute as pc
import pyarrow.parquet as pq

from offline_packing.engines.base import advance
from offline_packing.errors import StageError
from offline_packing.index import table as index
from offline_packing.index.stamps import sample_stamp
from offline_packing.index.table import MeasuredSample, SetAsideSample
from offline_packing.index.traits import sample_traits
from offline_packing.measure.repeated_ids import hash_content
from offline_packing.measure.skip import NewRecords
from offline_packing.runs.run import open_encoder
from offline_packing.sources import Locator, Source, SourcePart, SourceRecord
from offline_packing.sources.lost_fields import lost_fields
from offline_packing.sources.records import check_prompts_are_shown, to_sample
from task_encoders.families import ModelSettings
from task_encoders.media.image import MAX_IMAGE_PIXELS, read_image_header
from task_encoders.media.video_file import (
    MAX_VIDEO_FRAMES,
    MissingPyAVError,
    VideoHeader,
    read_video_header,
)
from task_encoders.pack_format import image_extension, video_extension
from task_encoders.sample_encoder import SampleEncoder
from task_encoders.samples import SampleError, SourceSample

#: Rows that a worker holds at a time: a part of a compressed source may have any number.
_ROWS_AT_ONCE: Final = 1024
#: Metadata of a part of the set-aside table: how many samples were left out.
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
    """What a finished part holds."""

    number: int
    num_rows: int
    num_tokens: int
    set_aside: dict[str, int]
    #: left out by source.skip
    num_skipped: int = 0
    #: what samples lack -> how many; see sources/lost_fields.py
    lost_fields: dict[str, int] = field(default_factory=dict)

    @property
    def num_records(self) -> int:
        """Samples of both tables, and those that were left out."""
        return self.num_rows + sum(self.set_aside.values()) + self.num_skipped


def finished_part(task: MeasureTask) -> PartResult:
    """What a part that was measured before holds."""
    num_tokens = pq.read_table(task.index_path, columns=["num_tokens"])["num_tokens"]
    tokens = pc.sum(num_tokens).as_py() or 0
    with pq.ParquetFile(task.set_aside_path) as aside:
        reasons = Counter(aside.read(["reason"])["reason"].to_pylist())
        notes = aside.metadata.metadata or {}
    skipped = int(notes.get(_SKIPPED.encode(), 0))
    lost = orjson.loads(notes.get(_LOST_FIELDS.encode(), b"{}"))
    return PartResult(task.number, len(num_tokens), tokens, dict(reasons), skipped, lost)


def measure_part(task: MeasureTask) -> PartResult:
    """Measure one part and write its two tables. The index part comes last and marks completion."""
    encoder = open_encoder(task.model)
    notes: dict[str, str] = {}
    lost: Counter[str] = Counter()
    with (
        index.table_writer(task.index_path, index.INDEX_SCHEMA) as write_measured,
        index.table_writer(task.set_aside_path, index.SET_ASIDE_SCHEMA, notes) as write_aside,
    ):
        total = PartResult(task.number, 0, 0, {})
        new = NewRecords(task.source, task.part)
        records = iter(new)
        while True:  # one record at a time, as it may hold its media
            some = itertools.islice(records, _ROWS_AT_ONCE)
            measured, aside = _measure_some(task, some, encoder, lost)
            if not measured and not aside:
                break
            write_measured(index.index_table(measured))
            write_aside(index.set_aside_table(aside))
            total = PartResult(
                task.number,
                total.num_rows + len(measured),
                total.num_tokens + sum(sample.length.num_tokens for sample in measured),
                dict(Counter(total.set_aside) + Counter(sample.reason for sample in aside)),
            )
        if new.num_skipped:
            notes[_SKIPPED] = str(new.num_skipped)
        if lost:
            notes[_LOST_FIELDS] = orjson.dumps(lost).decode()
    return replace(total, num_skipped=new.num_skipped, lost_fields=dict(lost))


def _measure_some(
    task: MeasureTask, records: Iterable[SourceRecord], encoder: SampleEncoder, lost: Counter[str]
) -> tuple[list[MeasuredSample], list[SetAsideSample]]:
    """Rows of both tables. What samples lack is counted
    in `lost`."""
    limits = (task.model.max_image_pixels or MAX_IMAGE_PIXELS, task.model.max_video_frames)
    source = task.source
    measured: list[MeasuredSample] = []
    aside: list[SetAsideSample] = []
    for record in records:
        advance()
        key = source.key_prefix + record.key
        try:
            sample = read_record(record, key, source)
            row = measure_record(record, sample, source, task.source_id, encoder, *limits)
            lost.update(set(lost_fields(record, sample, source.fields)))
        except SampleError as error:
            aside.append(SetAsideSample(key, source.path, error.reason, error.detail))
            continue
        except MissingPyAVError as error:
            raise StageError(f"sample {key!r} in {source.path}: {error}") from error
        except Exception as error:
            raise StageError(
                f"sample {key!r} in {source.path}: {type(error).__name__}: {error}"
            ) from error
        measured.append(row)
    return measured, aside


def read_record(record: SourceRecord, key: str, source: Source) -> SourceSample:
    """The sample of a record. Raises SampleError if it must be set aside."""
    if isinstance(record.content, SampleError):
        raise record.content
    sample = to_sample(record.content, key, source.task, record.paired_media)
    if not source.options.ignore_prompts:
        check_prompts_are_shown(sample)
    return sample


def measure_record(
    record: SourceRecord,
    sample: SourceSample,
    source: Source,
    source_id: int,
    encoder: SampleEncoder,
    max_image_pixels: int,
    max_video_frames: int = MAX_VIDEO_FRAMES,
) -> MeasuredSample:
    """One row of the index. Raises SampleError if the record must be set aside."""
    limits = (max_image_pixels, max_video_frames)
    media, sizes, videos = _read_headers(record, sample, source, *limits)
    names = (*sample.images, *sample.videos)
    content_hash = hash_content(sample, map(record.embedded.get, names)) if record.own_id else 0
    length = encoder.measure(sample, sizes, videos)
    stamp = sample_stamp(source, record.locator, (locator for locator, _ in media))
    return MeasuredSample(
        sample.key,
        source_id,
        source.task,
        len(sample.turns),
        length,
        record.locator,
        tuple(media),
        stamp,
        sample_traits(sample, sizes),
        len(videos),
        content_hash,
    )


def _read_headers(
    record: SourceRecord,
    sample: SourceSample,
    source: Source,
    max_image_pixels: int,
    max_video_frames: int,
) -> tuple[list[tuple[Locator, str]], list[tuple[int, int]], list[VideoHeader]]:
    """Place and extension of each image, then of each video; (height, width) of the images."""
    media: list[tuple[Locator, str]] = []
    sizes: list[tuple[int, int]] = []
    videos: list[VideoHeader] = []
    for name in sample.images:
        locator, file = source.open_media(record, name)
        with file:
            header = read_image_header(file, max_image_pixels=max_image_pixels)
        media.append((locator, image_extension(name, header.format)))
        sizes.append((header.height, header.width))
    for name in sample.videos:
        locator, file = source.open_media(record, name)
        with file:
            video = read_video_header(
                file, max_frame_pixels=max_image_pixels, max_frames=max_video_frames
            )
        media.append((locator, video_extension(name, video.extension)))
        videos.append(video)
    return media, sizes, videos

"""Measuring one part of a source: one part of the index, and one of the set-aside table.

Media are not decoded: their size is read from the header.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.engines.local import advance
from offline_packing.errors import StageError, as_sample_error
from offline_packing.index import table as index
from offline_packing.index.measured import (
    MeasuredSample,
    SetAsideSample,
    index_table,
    sample_stamp,
    sample_traits,
    set_aside_table,
)
from offline_packing.measure.diagnosis import NUM_FIRST, Diagnosis
from offline_packing.measure.hashes import (
    HASHED_BYTES,
    hash_content,
    hash_group,
    hash_medium,
    hash_sample,
)
from offline_packing.measure.identity import NewRecords
from offline_packing.runs.run import open_encoder
from offline_packing.sources import Locator, Source, SourcePart, SourceRecord
from task_encoders.families import ModelOptions
from task_encoders.media.image import ImageHeader
from task_encoders.media.video_file import VideoHeader
from task_encoders.packs.pack_format import image_extension, video_extension
from task_encoders.records.record import is_inline
from task_encoders.sample_encoder import SampleLength
from task_encoders.samples import SampleError, SourceSample

Header = TypeVar("Header", ImageHeader, VideoHeader)

#: Rows that a worker holds at a time: a part of a compressed source may have any number.
_ROWS_AT_ONCE: Final = 1024
#: Records that go through each step together, and bytes of their JSON and embedded media. A step
#: that is run many times in a row takes less time: with one record, measuring takes a fifth longer.
_RECORDS_PER_STEP: Final = 32
_BYTES_PER_STEP: Final = 16 << 20
#: Characters of the name of a medium in a detail.
_MAX_NAME: Final = 200
#: Characters of a reason's detail that are kept: it may quote what a record holds.
_MAX_DETAIL: Final = 1000
#: Fields of PartResult in the metadata of a part of the set-aside table, as JSON, but empty ones.
_NOTES: Final = ("num_skipped", "num_weighted", "num_part_hashed", "diagnosis")


@dataclass(frozen=True)
class MeasureTask:
    """One part of one source, and where its two tables go."""

    number: int
    source: Source
    source_id: int
    part: SourcePart
    model: ModelOptions
    index_path: Path
    set_aside_path: Path
    #: records at its beginning that are all diagnosed, see shares_of_first
    num_first: int = NUM_FIRST
    #: whether the layout needs the traits of every sample
    with_traits: bool = False


@dataclass(frozen=True)
class PartResult:
    """Content of a measured part."""

    num_rows: int
    num_tokens: int
    set_aside: Counter[str]
    #: left out by source.skip
    num_skipped: int = 0
    #: with loss weights other than 0 and 1
    num_weighted: int = 0
    #: media of samples, see IndexInfo
    num_part_hashed: int = 0
    #: see Diagnosis.notes
    diagnosis: dict[str, Any] = field(default_factory=dict)

    @property
    def num_records(self) -> int:
        """Samples of both tables, and those that were left out."""
        return self.num_rows + self.set_aside.total() + self.num_skipped


def read_result(task: MeasureTask) -> PartResult:
    """Content of a measured part, from its two tables."""
    with index.open_table(task.index_path) as rows:
        num_tokens = rows.read(["num_tokens"])["num_tokens"]
    with index.open_table(task.set_aside_path) as aside:
        reasons = Counter(aside.read(["reason"])["reason"].to_pylist())
        notes = aside.metadata.metadata or {}
    held = {name: orjson.loads(notes[name.encode()]) for name in _NOTES if name.encode() in notes}
    return PartResult(len(num_tokens), pc.sum(num_tokens).as_py() or 0, reasons, **held)


def find_unreadable(task: MeasureTask) -> Path | None:
    """The file that marks a part as measured, if one of its tables is lost, cut or damaged."""
    try:
        for path in (task.index_path, task.set_aside_path):
            with index.open_table(path) as table:
                table.read()
    except (OSError, pa.ArrowException):
        return task.index_path
    return None


def measure_part(task: MeasureTask) -> None:
    """Measure one part and write its two tables. The index part comes last and marks completion."""
    notes: dict[str, str] = {}
    with (
        index.table_writer(task.index_path, index.INDEX_SCHEMA) as write_measured,
        index.table_writer(task.set_aside_path, index.SET_ASIDE_SCHEMA, notes) as write_aside,
    ):
        new = NewRecords(task.source, task.part)
        measuring = Measuring(task)
        rows = measuring.rows(new)
        while some := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            write_measured(index_table([row for row in some if isinstance(row, MeasuredSample)]))
            write_aside(set_aside_table([row for row in some if isinstance(row, SetAsideSample)]))
        measuring.num_skipped = new.num_skipped
        for name in _NOTES:
            if value := getattr(measuring, name):
                notes[name] = orjson.dumps(value).decode()


@dataclass(slots=True)
class _Found:
    """A record on its way to a row of either table. Each step sets fields that later ones read."""

    number: int
    record: SourceRecord
    key: str
    row: MeasuredSample | SetAsideSample | None = None
    sample: SourceSample = field(init=False)
    #: of each image, then of each video; and its extension
    media: list[tuple[Locator, str]] = field(init=False)
    media_hashes: list[int] = field(init=False)
    #: (height, width) of each image
    sizes: list[tuple[int, int]] = field(init=False)
    #: mode of each image by its name
    modes: dict[str, str] = field(init=False)
    videos: list[VideoHeader] = field(init=False)
    length: SampleLength = field(init=False)


class Measuring:
    """Rows of the records of a source."""

    def __init__(self, task: MeasureTask) -> None:
        self.task, self.source, self.encoder = task, task.source, open_encoder(task.model)
        self._diagnosis = Diagnosis(self.source.fields, self.encoder.tokenizer, task.num_first)
        # See PartResult.
        self.num_skipped = self.num_weighted = self.num_part_hashed = 0

    @property
    def diagnosis(self) -> dict[str, Any]:
        """See `Diagnosis.notes`."""
        return self._diagnosis.notes()

    def rows(
        self, records: Iterable[tuple[int, SourceRecord]]
    ) -> Iterator[MeasuredSample | SetAsideSample]:
        """A row of either table for each record, in order; each comes with its number in the part.

        Raises:
            StageError: an error that is not caused by the sample.
        """
        for group in self._groups(records):
            for step in (self._read_sample, self._read_headers, self._measure, self._make_row):
                for found in group:
                    if found.row is None:
                        self._try(step, found)
            for found in group:
                assert found.row is not None
                yield found.row

    def _groups(self, records: Iterable[tuple[int, SourceRecord]]) -> Iterator[list[_Found]]:
        group: list[_Found] = []
        held = 0
        for number, record in records:
            advance()
            group.append(_Found(number, record, self.source.key_prefix + record.key))
            held += record.locator.size
            held += sum([len(one.data or b"") for one in record.embedded.values()])
            if len(group) == _RECORDS_PER_STEP or held > _BYTES_PER_STEP:
                yield group
                group, held = [], 0
        yield group

    def _try(self, step: Callable[[_Found], None], found: _Found) -> None:
        path = self.source.path
        try:
            step(found)
        except (OSError, MemoryError, ImportError, StageError) as error:
            kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
            raise StageError(f"sample {found.key!r} in {path}: {kind}{error}") from error
        except Exception as error:  # noqa: BLE001 - of this sample
            reason = as_sample_error(error)
            found.row = SetAsideSample(found.key, path, reason.reason, reason.detail[:_MAX_DETAIL])

    def _read_sample(self, found: _Found) -> None:
        found.sample = self.source.sample(found.record, found.key)

    def _read_headers(self, found: _Found) -> None:
        found.media, found.media_hashes, found.sizes, found.videos = [], [], [], []
        record, sample = found.record, found.sample
        images = {
            name: self._header(record, name, self.encoder.image_header)
            for name in dict.fromkeys(sample.images)
        }
        for name in sample.images:
            locator, media_hash, header = images[name]
            found.media_hashes.append(media_hash)
            found.media.append((locator, image_extension(name, header.format)))
            found.sizes.append((header.height, header.width))
        found.modes = {name: header.mode for name, (*_, header) in images.items()}
        videos = {
            name: self._header(record, name, self.encoder.video_header)
            for name in dict.fromkeys(sample.videos)
        }
        for name in sample.videos:
            locator, media_hash, video = videos[name]
            found.media_hashes.append(media_hash)
            found.media.append((locator, video_extension(name, video.extension)))
            found.videos.append(video)

    def _header(
        self, record: SourceRecord, name: str, read: Callable[[BinaryIO], Header]
    ) -> tuple[Locator, int, Header]:
        locator, file = self.source.open_media(record, name)
        try:
            with file:
                media_hash = hash_medium(locator.size, file)
                file.seek(0)
                return locator, media_hash, read(file)
        except SampleError as error:
            where = "in its record" if is_inline(name) else repr(name[:_MAX_NAME])
            raise SampleError(error.reason, f"{where}: {error.detail}") from error

    def _measure(self, found: _Found) -> None:
        found.length = self.encoder.measure(found.sample, found.sizes, found.videos)

    def _make_row(self, found: _Found) -> None:
        record, sample, media = found.record, found.sample, found.media
        assert not isinstance(record.content, SampleError)
        embedded = [*map(record.embedded.get, sample.media)]
        locators = [locator for locator, _ in media]
        found.row = MeasuredSample(
            sample.key,
            self.task.source_id,
            self.source.task,
            len(sample.turns),
            found.length,
            record.locator,
            tuple(media),
            sample_stamp(self.source, record.locator, locators),
            sample_traits(sample, found.sizes) if self.task.with_traits else None,
            len(found.videos),
            hash_content(sample, embedded) if record.own_id else 0,
            hash_sample(sample, found.media_hashes),
            tuple(found.media_hashes),
            hash_group(self.source, record.content),
        )
        self._diagnosis.add(found.number, record, sample, found.modes)
        self.num_part_hashed += sum(at.size > HASHED_BYTES for at in locators)
        self.num_weighted += any(turn.weight not in (0, 1) for turn in sample.turns)

"""Measuring one part of a source: one part of the index, and one of the set-aside table. Media are
not decoded: their size is read from the header.

Under `pack.on_overlong: split_turns`, conversations and documents that fit no pack are cut. A part
takes all turns, or sections, that fit. It is rendered and measured as it will be trained, so its
length is exact, however the chat template treats last turns, or their thoughts. A turn that answers
the result of a tool stays with the turn that called it.
"""

import gc
import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from offline_packing.config.sections import SplitTurnsConfig
from offline_packing.engines.local import advance
from offline_packing.errors import StageError, as_sample_error
from offline_packing.index import table as index
from offline_packing.index.measured import (
    HASHED_BYTES,
    hash_medium,
    hash_place,
    hash_sample,
    modification_time,
    prefix_row,
    sample_stamp,
)
from offline_packing.index.table import escape
from offline_packing.layouts import LAYOUTS
from offline_packing.measure.diagnosis import NUM_FIRST, Diagnosis
from offline_packing.measure.from_index import IndexPart, copy_part
from offline_packing.measure.identity import NewRecords, hash_content, hash_group
from offline_packing.runs.run import open_encoder
from offline_packing.sources import Locator, Source, SourcePart, SourceRecord
from offline_packing.sources.base import ConversationPart
from offline_packing.sources.options import KEPT
from task_encoders.families import ModelOptions
from task_encoders.families.base.family import FamilyEncoder
from task_encoders.media.image import ImageHeader
from task_encoders.media.video_file import VideoHeader
from task_encoders.packs.pack_format import image_extension, video_extension
from task_encoders.records.record import RATED, is_inline
from task_encoders.sample_encoder import SampleLength, sizes_of
from task_encoders.samples import (
    IMAGE_PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    SampleError,
    SourceSample,
    Turn,
    count_placeholders,
    join_sections,
    sections,
)


@dataclass(frozen=True)
class Cutting:
    """Limits of a sample, and how longer conversations are cut."""

    options: SplitTurnsConfig
    #: of a pack: tokens, and whatever else it is limited in
    limits: Mapping[str, int]


def fits(sample: SourceSample, length: SampleLength, limits: Mapping[str, int]) -> bool:
    """Tell whether a sample fits a pack by itself."""
    sizes = sizes_of(length, sample.images, sample.videos)
    return all(sizes[name] <= limit for name, limit in limits.items())


class _Cut(NamedTuple):
    """Exchanges from `first` to `end`, shown from `begin` on."""

    begin: int
    first: int
    end: int


class Part(NamedTuple):
    """A part, as the sample that it becomes."""

    cut: _Cut
    sample: SourceSample
    place: ConversationPart
    length: SampleLength


class Conversation:
    """One conversation, in exchanges: a turn, and the turns that answer its calls of tools; or one
    document, in sections."""

    def __init__(
        self,
        encoder: FamilyEncoder,
        found: "_Found",
        options: SplitTurnsConfig,
        limits: Mapping[str, int],
    ) -> None:
        """Take a record whose media are known, and a pack's `limits` on tokens and others."""
        self.encoder, self.options, self.limits = encoder, options, limits
        self.sample, self.sizes, self.videos = found.sample, found.sizes, found.videos
        self.record = found.record.locator
        turns = sections(self.sample)
        # A turn may begin with the result of a tool, which the turn before it called.
        speakers = [turn.before[0][0] if turn.before else turn.role for turn in turns]
        starts = [i for i, speaker in enumerate(speakers) if i == 0 or speaker != "tool"]
        #: turns before each exchange, and of all; the same of images and videos
        self.bounds = [*starts, len(turns)]
        exchanges = [turns[begin:end] for begin, end in pairwise(self.bounds)]
        task = self.sample.task
        self.images = _counts(exchanges, IMAGE_PLACEHOLDER, task)
        self.clips = _counts(exchanges, VIDEO_PLACEHOLDER if self.sample.videos else "\0", task)
        self.is_trained = [any(turn.weight for turn in own) for own in exchanges]
        self._part = lru_cache(maxsize=4)(self._measure)

    def parts(self) -> list[Part]:
        """Cut the conversation. Together its parts train each turn once; turns between them carry
        no loss. A turn that is too long by itself becomes a part that fits no pack. Return [] if no
        part would fit one. Raises SampleError if no template takes them."""
        found: list[Part] = []
        first, ends = 0, self._estimate()
        while first < len(self.is_trained):
            if self.is_trained[first]:
                found.append(self._next(first, ends))
                first = found[-1].cut.end
            else:
                first += 1
        return found if any(fits(one.sample, one.length, self.limits) for one in found) else []

    def _measure(self, cut: _Cut) -> Part:
        """Measure one part as the sample that it becomes. Raises SampleError where no template
        takes it."""
        shown = range(self.images[cut.begin], self.images[cut.end])
        clips = range(self.clips[cut.begin], self.clips[cut.end])
        kept = [*shown, *(len(self.sizes) + clip for clip in clips)]
        places = [-1] * len(self.sample.media)
        for place, medium in enumerate(kept):
            places[medium] = place
        begin, first, end = (self.bounds[at] for at in cut)
        part = ConversationPart(
            key=self.sample.key,
            json=self.record,
            media=tuple(places),
            num_videos=len(self.videos),
            begin=begin,
            first=first,
            end=end,
        )
        sample = replace(part.take(self.sample), key=f"{self.sample.key}[{first}:{end}]")
        sizes, videos = [self.sizes[i] for i in shown], [self.videos[i] for i in clips]
        return Part(cut, sample, part, self.encoder.measure(sample, sizes, videos))

    def _is_fit(self, cut: _Cut) -> bool:
        part = self._part(cut)
        return fits(part.sample, part.length, self.limits)

    def _estimate(self) -> npt.NDArray[np.int64]:
        """Estimate (num_exchanges + 1,) how many tokens come before each exchange, and in all."""
        plain = replace(self.sample, system=None, tools="")
        trained = [replace(turn, weight=1.0) for turn in sections(plain)]

        def num_tokens(begin: int, end: int) -> int:
            images = slice(self.images[begin], self.images[end])
            clips = slice(self.clips[begin], self.clips[end])
            turns = join_sections(plain, trained[self.bounds[begin] : self.bounds[end]])
            shown = range(len(plain.media))
            own = replace(plain, turns=turns).showing(
                [*shown[images], *shown[len(plain.images) :][clips]]
            )
            return self.encoder.measure(own, self.sizes[images], self.videos[clips]).num_tokens

        count = len(self.is_trained)
        alone = np.array([num_tokens(i, i + 1) for i in range(count)], np.int64)
        around = alone[:2].sum() - num_tokens(0, 2) if count > 1 else 0
        return np.concatenate([[0], np.cumsum(alone - around)])

    def _next(self, first: int, ends: npt.NDArray[np.int64]) -> Part:
        """Return the longest part that begins with an exchange."""
        cut = _Cut(self._context(first), first, first + 1)
        if not self._is_fit(cut):
            return self._part(cut)
        last, room = len(self.is_trained), self.limits["tokens"] - self._part(cut).length.num_tokens
        guess = int(np.searchsorted(ends, ends[first + 1] + room, side="right")) - 1
        end = min(max(guess, first + 1), last)
        if self._is_fit(cut._replace(end=end)):
            while end < last and self._is_fit(cut._replace(end=end + 1)):
                end += 1
        else:
            fewer = range(first + 1, end)
            is_long = bisect_left(
                fewer, True, key=lambda one: not self._is_fit(cut._replace(end=one))
            )
            end = first + max(is_long, 1)
        while end > first + 1 and not (
            self.is_trained[end - 1] and self._is_fit(cut._replace(end=end))
        ):
            end -= 1
        return self._part(cut._replace(end=end))

    def _context(self, first: int) -> int:
        """Find the first exchange that is shown in front of an exchange: the latest ones, up to the
        configured number, that fit a pack together with it. Without any, it need not fit."""
        earlier = range(max(0, first - self.options.context_turns), first)
        return earlier.start + bisect_left(
            earlier, True, key=lambda begin: self._is_fit(_Cut(begin, first, first + 1))
        )


def _counts(exchanges: Sequence[Sequence[Turn]], placeholder: str, task: str) -> list[int]:
    """Number of a placeholder's occurrences before each exchange, and in all."""
    return [0, *accumulate(count_placeholders(own, placeholder, task) for own in exchanges)]


#: Rows that a worker holds at a time: a part of a compressed source may have any number.
_ROWS_AT_ONCE: Final = 1024
#: Records that go through each step together, and bytes of their JSON and embedded media. A step
#: that is run many times in a row takes less time: with one record, measuring takes a fifth longer.
_RECORDS_PER_STEP: Final = 32
_BYTES_PER_STEP: Final = 16 << 20
#: More objects than records and rows are made of that are held at a time.
_OBJECTS_HELD: Final = 20_000
#: Characters of the name of a medium in a detail.
_MAX_NAME: Final = 200
#: Characters of a reason's detail that are kept: it may quote a record.
_MAX_DETAIL: Final = 1000
#: Fields of PartResult in the metadata of a part of the set-aside table, as JSON, but empty ones.
_NOTES: Final = ("num_skipped", "num_weighted", "num_part_hashed", "split", "diagnosis", "rated")

_Read = Callable[[BinaryIO], ImageHeader | VideoHeader]

#: Values of a row of the index, or of the set-aside table, by the names of their columns.
Row = dict[str, Any]


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
    #: a name in LAYOUTS
    layout: str = "energon"
    #: how conversations are cut that fit no pack; None: they are not
    cutting: Cutting | None = None


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
    #: conversations that were cut, and the samples they became
    split: dict[str, int] = field(default_factory=dict)
    #: see Diagnosis.notes
    diagnosis: dict[str, Any] = field(default_factory=dict)
    #: places of source.min_rating that a record has
    rated: list[str] = field(default_factory=list)

    @property
    def num_measured(self) -> int:
        """Records of the rows."""
        return self.num_rows - self.split.get("samples", 0) + self.split.get("conversations", 0)

    @property
    def num_records(self) -> int:
        """Records of both tables, and records that were left out."""
        return self.num_measured + self.set_aside.total() + self.num_skipped


def read_result(paths: tuple[Path, Path]) -> PartResult:
    """Read the counts of a measured part from its two tables."""
    with index.open_table(paths[0]) as rows:
        num_tokens = rows.read(["num_tokens"])["num_tokens"]
    with index.open_table(paths[1]) as aside:
        reasons = Counter(aside.read(["reason"])["reason"].to_pylist())
        notes = aside.metadata.metadata or {}
    held = {name: orjson.loads(notes[name.encode()]) for name in _NOTES if name.encode() in notes}
    return PartResult(len(num_tokens), pc.sum(num_tokens).as_py() or 0, reasons, **held)


def find_unreadable(task: MeasureTask) -> Path | None:
    """Return the file that marks a part as measured, if a table of it is lost, cut or damaged."""
    try:
        for path in (task.index_path, task.set_aside_path):
            with index.open_table(path) as table:
                table.read()
    except (OSError, pa.ArrowException):
        return task.index_path
    return None


def measure_part(task: MeasureTask) -> None:
    """Measure one part and write its two tables. The index part comes last and marks completion."""
    if isinstance(task.part.items, IndexPart):
        target = task.index_path, task.set_aside_path
        copy_part(task.part.items, task.source, task.source_id, target)
        return
    notes: dict[str, str] = {}
    with (
        _rare_collection(),
        index.table_writer(task.index_path, index.INDEX_SCHEMA) as write_measured,
        index.table_writer(task.set_aside_path, index.SET_ASIDE_SCHEMA, notes) as write_aside,
    ):
        new = NewRecords(task.source, task.part)
        measuring = Measuring(task)
        rows = measuring.rows(new)
        while some := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            measured = [row for row in some if "reason" not in row]
            aside = [row for row in some if "reason" in row]
            write_measured(pa.Table.from_pylist(measured, index.INDEX_SCHEMA))
            write_aside(pa.Table.from_pylist(aside, index.SET_ASIDE_SCHEMA))
        measuring.num_skipped = new.num_skipped
        for name in _NOTES:
            if value := getattr(measuring, name):
                notes[name] = orjson.dumps(value, default=sorted).decode()


@contextmanager
def _rare_collection() -> Iterator[None]:
    """Collect garbage only where objects pile up: records are in no cycles, and looking for some
    among those that are held takes a twelfth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_HELD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Medium(NamedTuple):
    """A medium of a record, with its `hash_medium`, and its hash for `prefix_row`."""

    locator: Locator
    media_hash: int
    same: int
    header: Any
    extension: str


@dataclass(slots=True)
class _Found:
    """A record on its way to rows of either table. Each step sets fields that later ones read."""

    number: int
    record: SourceRecord
    key: str
    #: of the record, or of the parts of a conversation; empty until the last step
    rows: list[Row] = field(default_factory=list)
    sample: SourceSample = field(init=False)
    #: each image, then each video
    media: list[_Medium] = field(init=False)
    #: (height, width) of each image
    sizes: list[tuple[int, int]] = field(init=False)
    videos: list[VideoHeader] = field(init=False)
    length: SampleLength = field(init=False)


class Measuring:
    """Rows of the records of a source."""

    def __init__(self, task: MeasureTask) -> None:
        self.task, self.source, self.encoder = task, task.source, open_encoder(task.model)
        self._layout, self._model = LAYOUTS[task.layout], self.encoder.fingerprint
        self._diagnosis = Diagnosis(self.source.fields, self.encoder, task.num_first)
        # See PartResult.
        self.num_skipped = self.num_weighted = self.num_part_hashed = 0
        self.split: Counter[str] = Counter()
        self.rated = set[str]()
        # Before its records are read: an edit meanwhile gives the file another time.
        self._time_of = lru_cache(maxsize=32)(modification_time)

    @property
    def diagnosis(self) -> dict[str, Any]:
        """See `Diagnosis.notes`."""
        return self._diagnosis.notes()

    def rows(self, records: Iterable[tuple[int, SourceRecord]]) -> Iterator[Row]:
        """Yield the row of each record, or of each of its parts, in order: a row of the index or,
        with a reason, of the set-aside table. Records come with their number in the part.

        Raises:
            StageError: an error that the sample did not cause.
        """
        for group in self._groups(records):
            for step in (self._read_sample, self._read_headers, self._measure, self._make_rows):
                for found in group:
                    if not found.rows:
                        self._try(step, found)
            for found in group:
                assert found.rows
                yield from found.rows

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
            why = as_sample_error(error)
            values = (found.key, path, why.reason, why.detail[:_MAX_DETAIL])
            names = index.SET_ASIDE_SCHEMA.names
            found.rows = [dict(zip(names, map(escape, values), strict=True))]

    def _read_sample(self, found: _Found) -> None:
        if not isinstance(found.record.content, SampleError):
            self.rated.update(found.record.content.get(RATED, ()))
        found.sample = self.source.sample(found.record, found.key)

    def _read_headers(self, found: _Found) -> None:
        record, sample = found.record, found.sample
        if not sample.media:
            found.media, found.sizes, found.videos = [], [], []
            return
        images = self._media(record, sample.images, self.encoder.image_header)
        videos = self._media(record, sample.videos, self.encoder.video_header)
        found.media = [*images, *videos]
        found.sizes = [(one.header.height, one.header.width) for one in images]
        found.videos = [one.header for one in videos]

    def _media(self, record: SourceRecord, names: Sequence[str], read: _Read) -> list[_Medium]:
        """Read the header of each medium, once of one that is named several times."""
        found = {name: self._medium(record, name, read) for name in dict.fromkeys(names)}
        return [found[name] for name in names]

    def _medium(self, record: SourceRecord, name: str, read: _Read) -> _Medium:
        locator, file = self.source.open_media(record, name)
        embedded = record.embedded.get(name)
        is_at_hand = is_inline(name) if embedded is None else embedded.data is not None
        try:
            with file:
                media_hash = hash_medium(locator.size, file.read(HASHED_BYTES))
                file.seek(0)
                if is_at_hand:
                    same = xxhash.xxh3_64_intdigest(file.read())
                    file.seek(0)
                else:
                    same = hash_place(self.task.source_id, locator)
                header = read(file)
        except SampleError as error:
            where = "in its record" if is_inline(name) else repr(name[:_MAX_NAME])
            raise SampleError(error.reason, f"{where}: {error.detail}") from error
        if isinstance(header, ImageHeader):
            extension = image_extension(name, header.format)
        else:
            extension = video_extension(name, header.extension)
        return _Medium(locator, media_hash, same, header, extension)

    def _measure(self, found: _Found) -> None:
        found.length = self.encoder.measure(found.sample, found.sizes, found.videos)

    def _make_rows(self, found: _Found) -> None:
        record, sample, source = found.record, found.sample, self.source
        assert not isinstance(record.content, SampleError)
        embedded = map(record.embedded.get, sample.media)
        of_record = {
            "key_hash": index.key_hash(self.task.source_id, sample.key),
            "content_hash": hash_content(sample, embedded) if record.own_id else 0,
            "sample_hash": hash_sample(sample, [one.media_hash for one in found.media]),
            "group_hash": hash_group(source, record.content),
            "kept": record.content.get(KEPT) if source.fields.beside else None,
            "source_id": self.task.source_id,
            "task": source.task,
        }
        parts: Sequence[Part | None] = self._cut(found)
        if parts:
            self.split += Counter(conversations=1, samples=len(parts))
        found.rows = [of_record | self._row(found, part) for part in parts or (None,)]
        modes = {n: one.header.mode for n, one in zip(sample.images, found.media, strict=False)}
        self._diagnosis.add(found.number, record, sample, modes)
        self.num_part_hashed += sum([one.locator.size > HASHED_BYTES for one in found.media])
        self.num_weighted += any(turn.weight not in (0, 1) for turn in sample.turns)

    def _cut(self, found: _Found) -> Sequence[Part]:
        """Cut a conversation that fits no pack into parts; return none if it stays whole."""
        cutting = self.task.cutting
        if cutting is None:
            return ()
        room = self._layout.added_tokens(found.sample, found.length.grid_thw, self._model)
        limits = {**cutting.limits, "tokens": cutting.limits["tokens"] - room}
        if fits(found.sample, found.length, limits):
            return ()
        try:
            return Conversation(self.encoder, found, cutting.options, limits).parts()
        except SampleError as error:
            why = "it fits no pack, and the chat template writes no part of it"
            raise SampleError("not_in_template", why) from error

    def _row(self, found: _Found, part: Part | None) -> Row:
        """Make the row of a sample, which is a record or a part of one with some of its media."""
        sample, length, at = found.sample, found.length, found.record.locator
        kept: Sequence[int] = range(len(found.media))
        if part is not None:
            sample, length = part.sample, part.length
            kept = [i for i, place in enumerate(part.place.media) if place >= 0]
            turns = [(turn.prompt, turn.answer, turn.details) for turn in sample.turns]
            at = at._replace(size=len(orjson.dumps([sample.system, sample.tools, turns])))
        media = [found.media[i] for i in kept]
        sizes = [found.sizes[i] for i in kept if i < len(found.sizes)]
        return {
            "key": sample.key,
            "num_tokens": length.num_tokens,
            "num_loss_tokens": length.num_loss_tokens,
            "num_vision_patches": length.num_vision_patches,
            "num_images": len(sample.images),
            "num_videos": len(sample.videos),
            "num_turns": len(sample.turns),
            "unfit": self._layout.unfit(sample, sizes, self._model),
            "room": self._layout.added_tokens(sample, length.grid_thw, self._model),
            "stamp": sample_stamp(self.source, at, [one.locator for one in media], self._time_of),
            "json": at,
            "part": None if part is None else asdict(part.place),
            **(_media_columns(media, sample, length) if media else _NO_MEDIA),
        }


#: Columns of a sample without media.
_NO_MEDIA: Final[Row] = {"grid_thw": [], "media": [], "media_hash": [], **prefix_row(None, (), ())}


def _media_columns(media: Sequence[_Medium], sample: SourceSample, length: SampleLength) -> Row:
    """Return the columns of a sample's media, its images and then its videos."""
    prefix, options, videos = length.prefix, sample.media_options, len(sample.images)
    leading: list[int] = []
    if prefix is not None:
        leading = [*range(prefix.num_images), *range(videos, videos + prefix.num_videos)]
    return {
        "grid_thw": [number for grid in length.grid_thw for number in grid],
        "media": [(*one.locator, one.extension) for one in media],
        "media_hash": [one.media_hash for one in media],
        **prefix_row(
            prefix,
            [media[i].media_hash for i in leading],
            [media[i].same for i in leading],
            [options[i] for i in leading],
        ),
    }

"""A source: a format lists parts and reads their records, and all else follows from these.

scan()                    -> parts of bounded size, and a hash of everything that was listed
records(part)             -> each record as found: key, where its JSON is, the JSON
open_media(record, name)  -> the place of a medium that a record names, open to read its header
read_sample, read_media   -> a sample, and the bytes of its media, again from nothing but locators
"""

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final

import numpy as np
import numpy.typing as npt

from offline_packing.errors import ChangedError, StageError
from offline_packing.sources.options import FieldMap, FieldOptions, MediaOptions, SourceOptions
from offline_packing.sources.reading.contents import file_names, nothing_found
from offline_packing.sources.reading.locators import (
    Locator,
    hash_text,
    in_record,
    read_locator,
    record_around,
)
from offline_packing.sources.roots.listing import walk
from offline_packing.sources.roots.roots import Root, open_root
from offline_packing.storage.key_set import KeySet
from offline_packing.storage.streams import size_of
from task_encoders.records.record import (
    check_prompts_are_shown,
    decode_inline,
    is_inline,
    load_json,
    to_sample,
)
from task_encoders.samples import SampleError, SourceSample, join_sections, sections
from task_encoders.samples.limits import check_cost
from task_encoders.storage.paths import is_url

#: Characters of a description of damage.
_MAX_DETAIL: Final = 400


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A task's share of a source: the format's own `items`, at most `num_records` (None: any), or
    more where some are lists of records."""

    items: Any
    num_records: int | None


@dataclass(frozen=True, slots=True)
class Scan:
    """A source's listing.

    `fingerprint` changes with the names and sizes of its files. `unpaired_media` are the
    `container_hash`es of image and video files without a record of their name, as uint64
    (num_files,); a record may still name them.
    """

    parts: tuple[SourcePart, ...]
    fingerprint: str
    unpaired_media: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    #: a table of listing.FILES_SCHEMA, packed, if it was made while listing
    files: bytes | None = None
    #: one line per thing about the whole that is probably a mistake
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Embedded:
    """A medium in the record's own container; `data` if it was read with the record."""

    locator: Locator
    data: bytes | None = None


@dataclass(slots=True)
class SourceRecord:
    """A record as found. `content` is its JSON object, or the error in place of one.

    `paired_media` are the images and videos that belong to it by their name, where the format pairs
    by name (None where it does not); they count only if the content names none itself. `embedded`
    holds, by the name that the content or `paired_media` use, the media in the record's container.
    `own_id` tells that the key is an id of the record's own, which others may repeat. `known` is
    the number of records that it stands for, which the source leaves out and did not read. `unread`
    are columns of its file that seem to hold media, and such that hold text, which are not read.
    """

    key: str
    locator: Locator
    content: Mapping[str, Any] | SampleError
    paired_media: tuple[str, ...] | None = None
    embedded: Mapping[str, Embedded] = field(default_factory=dict)
    own_id: bool = False
    known: int = 0
    unread: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


class Source(ABC):
    """One source: a format implements `scan` and `records`, and `parse` if its records are not
    JSON. Cheap to build and to send to another process."""

    #: the options of the format
    Options: ClassVar[type[SourceOptions]] = FieldOptions
    #: endings of the files that are read in a folder (none: all), in lower case; and of files that
    #: are not read because of their compression
    ENDINGS: ClassVar[tuple[str, ...]] = ()
    UNREAD: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, options: SourceOptions, *, key_prefix: str = "", unpack_folder: Path | None = None
    ) -> None:
        """Open the source that `options`, of the class's own Options, describe. Compressed files
        that are read out of order are unpacked to `unpack_folder`. Raises StageError if the path
        does not exist."""
        self.options = options
        self.path = options.path
        self.task = options.task
        self.key_prefix = key_prefix
        self.image_root = options.image_root if isinstance(options, MediaOptions) else None
        self.fields = FieldMap({})
        if isinstance(options, FieldOptions):
            self.fields = FieldMap(options.fields, options.keep, options.min_rating)
        self.unpack_folder = unpack_folder
        #: what a file beside the data says of the fields of records, as JSON; "": there is none
        self.description = ""
        #: the record whose media were read last, and their texts by `hash_text`
        self._texts: tuple[Locator, dict[str, str]] | None = None
        #: keys of the records that are left out, see source.skip
        self.known: KeySet | None = None
        #: whether any source of the run is remote, set by `open_sources`
        self.beside_remote = False
        #: `file_name` is the container of the source's file, where `path` is a file, or None
        self.root, self.file_name = open_root(self.path)
        self.media = self.root
        if (folder := self.image_root) is not None:
            if not is_url(folder) and not Path(folder).is_dir():
                raise StageError(f"image_root {folder!r} is not a folder; set source.image_root")
            self.media, _ = open_root(folder)

    @abstractmethod
    def scan(self, samples_per_part: int) -> Scan:
        """List the source. Only its files decide the order of the parts, and of records in them."""

    @abstractmethod
    def records(self, part: SourcePart) -> Iterator[SourceRecord]:
        """Yield the records of a part, in order; in place of one that cannot be read, its error."""

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        """Return the options, besides the path, to read a path with; None: it has another
        format."""
        is_here = any(name.lower().endswith(cls.ENDINGS) for name in file_names(path))
        return {} if is_here else None

    def is_known(self, key: str) -> bool:
        """Tell whether the record of a key is left out. A format that knows the key before it reads
        the record does not read it, and yields it with `known`."""
        return self.known is not None and key in self.known

    def is_read(self, container: str) -> bool:
        """Tell whether `scan` reads a file of this name, where the path is a folder."""
        return not self.ENDINGS or container.lower().endswith((*self.ENDINGS, *self.UNREAD))

    def entries(self) -> Iterator[tuple[str, int, int]]:
        """Yield (container, size, modification time in ns) of every file that `scan` reads."""
        if self.file_name is not None:
            return iter([self.root.entry(self.file_name)])
        return (entry for entry in walk(self.root) if self.is_read(entry[0]))

    def files(self) -> list[tuple[str, int]]:
        """Return (container, size) of every file that `scan` reads, by name. Raises StageError if
        there is none, or one whose compression or name is not read."""
        found = sorted((name, size) for name, size, _ in self.entries())
        if not found:
            raise nothing_found(self.path, f"*{self.ENDINGS[0]}")
        for name, _ in found:
            why = "whose name is not UTF-8; rename it"
            if is_packed := name.lower().endswith(self.UNREAD):
                why = "compressed in a way that is not read; unpack it, compress it as .gz or .zst"
            if is_packed or name != name.encode("utf-8", "replace").decode():
                where = f"source path {self.path!r} holds {name!r}"
                raise StageError(f"{where}, {why}, or move it out of source.path")
        return found

    def cut_files(
        self, cut: Callable[[str], tuple[Sequence[SourcePart], str]]
    ) -> tuple[SourcePart, ...]:
        """Return the parts of all files, in order. `cut` returns the parts of one file, and why no
        record of it can be used ("": they can); `records` then yields each record, or else the
        file, as `damaged`. Raises StageError if that is so of every file."""
        parts, problems, names = list[SourcePart](), list[str](), [name for name, _ in self.files()]
        for container in names:
            own, problem = cut(container)
            parts += own
            if problem:
                problems.append(f"{self.root.path(container)}: {problem}")
        if len(problems) == len(names):
            others = f" (and {len(names) - 1:,} other files like it)" if len(names) > 1 else ""
            raise StageError(f"{problems[0]}{others}")
        return tuple(parts)

    def damaged(self, key: str, at: Locator, why: object) -> SourceRecord:
        """Return a damaged record; its key is the container if the rest of the file is damaged."""
        detail = " ".join(f"{at.container}: {why}".split())
        return SourceRecord(key, at, SampleError("damaged_source", detail[:_MAX_DETAIL]))

    def unread_parts(self) -> Sequence[SourcePart]:
        """Return the parts that are known without reading whole files, for a dry run. A part
        without `num_records` is one file, from its beginning."""
        return self.scan(samples_per_part=4096).parts

    def open_container(self, container: str, *, sequential: bool = False) -> BinaryIO:
        """Open one of the source's own files. Raises StageError if that is not allowed."""
        try:
            return self.root.open(container, sequential=sequential)
        except SampleError as error:
            raise StageError(
                f"{self.root.path(container)} cannot be read: {error.detail}; restore it, or set "
                "source.path to a folder that holds the files themselves"
            ) from error

    def parse(self, data: bytes, column: str = "") -> Mapping[str, Any]:
        """Parse bytes at a locator with a `column` into a record for `to_sample`. Raises
        SampleError."""
        return self.fields.apply(load_json(data))

    def open_media(self, record: SourceRecord, name: str) -> tuple[Locator, BinaryIO]:
        """Locate an image or a video of a record, and open it. Raises SampleError: missing_image or
        path_outside_root."""
        found = record.embedded.get(name)
        if found is None and is_inline(name):
            data = decode_inline(name)
            return in_record(record.locator, name, len(data)), io.BytesIO(data)
        if found is None:
            container, file = self._open_file(record.locator, name)
            return Locator("file", container, 0, size_of(file)), file
        if found.data is not None:
            return found.locator, io.BytesIO(found.data)
        at = found.locator
        return at, self.root.open_range(at.container, at.offset, at.size)

    def _open_file(self, record: Locator, name: str) -> tuple[str, BinaryIO]:
        """Open a file that a record names, from image_root on, or else its own file's folder."""
        folder = "" if self.image_root is not None else record.container
        container = self.media.locate(folder.rpartition("/")[0], name)
        return container, self.media.open(container)

    def files_at(self, record: Locator) -> Callable[[str], bool] | None:
        """Return a test of whether a name in a record's text is a file; None: texts hold none."""

        def is_file(name: str) -> bool:
            with suppress(SampleError):
                self._open_file(record, name)[1].close()
                return True
            return False

        return is_file

    def read(self, locator: Locator) -> Mapping[str, Any]:
        """Read the JSON object at a locator. Raises StageError if it is no longer there."""
        try:
            data = read_locator(self.root, locator, self.unpack_folder)
            return self.parse(data, locator.column)
        except SampleError as error:
            raise ChangedError(self.root.path(locator.container), error) from error

    def sample(self, record: "SourceRecord", key: str) -> SourceSample:
        """Return the sample of a record. Raises SampleError if it must be set aside."""
        if isinstance(record.content, SampleError):
            raise record.content
        paired, is_file = record.paired_media, self.files_at(record.locator)
        sample = to_sample(record.content, key, self.task, paired, is_file)
        if not self.options.ignore_prompts:
            check_prompts_are_shown(sample)
        limits = self.options
        check_cost(
            sample,
            max_text_length=limits.max_text_length,
            max_messages=limits.max_messages,
            max_media=limits.max_media,
        )
        return sample

    def read_sample(
        self, key: str, locator: Locator, num_images: int, num_videos: int = 0
    ) -> SourceSample:
        """Read a sample again, whose record is at a locator and had this many images and videos.
        Raises StageError if it is gone, or changed after it was measured."""
        # A record that names no media was paired with one; its name no longer matters.
        paired = ("paired.mp4",) if num_videos else ("paired",) if num_images else None
        try:
            sample = to_sample(self.read(locator), key, self.task, paired, self.files_at(locator))
        except SampleError as error:
            raise ChangedError(f"sample {key!r}", error) from error
        if (len(sample.images), len(sample.videos)) != (num_images, num_videos):
            names = f"it names {len(sample.images)} images and {len(sample.videos)} videos"
            raise ChangedError(f"sample {key!r}", f"{names}, was {num_images} and {num_videos}")
        return sample

    def read_media(self, locator: Locator) -> bytes:
        """Read the bytes of a medium. Raises StageError if they no longer exist."""
        if locator.kind != "record":
            return read_locator(self.media_root(locator), locator, self.unpack_folder)
        at, text_hash = record_around(locator)
        try:
            if self._texts is None or self._texts[0] != at:  # a record may hold many
                paired, is_file = ("paired",), self.files_at(at)
                media = to_sample(self.read(at), "", self.task, paired, is_file).media
                self._texts = at, {hash_text(name): name for name in media if is_inline(name)}
            data = decode_inline(self._texts[1].get(text_hash, "data:"))
        except SampleError as error:
            raise ChangedError(self.root.path(at.container), error) from error
        if len(data) != locator.size:
            raise ChangedError(self.root.path(at.container))
        return data

    def media_root(self, locator: Locator) -> Root:
        """Return the root of a medium's container: a medium that is a file may be under image_root,
        all others are in the source."""
        return self.media if locator.kind == "file" else self.root


@dataclass(frozen=True, slots=True)
class ConversationPart:
    """The record that a sample is a part of, and which of its turns, or sections, and media the
    sample has."""

    key: str
    json: Locator
    #: place of each image, then video, of the record among the sample's; -1: it is not shown
    media: tuple[int, ...]
    num_videos: int
    #: the first turn that is shown; turns before `first` carry no loss
    begin: int
    first: int
    end: int

    def read(self, source: Source, key: str) -> SourceSample:
        """Read the sample of this part. Raises StageError if its record changed after it was
        measured."""
        num_images = len(self.media) - self.num_videos
        return self.take(source.read_sample(key, self.json, num_images, self.num_videos))

    def take(self, sample: SourceSample) -> SourceSample:
        """Take this part of a whole sample, with its system message and tools."""
        turns = list(sections(sample)[self.begin : self.end])
        for i in range(self.first - self.begin):
            turns[i] = replace(turns[i], weight=0.0)
        joined = replace(sample, turns=join_sections(sample, turns))
        return joined.showing([i for i, place in enumerate(self.media) if place >= 0])

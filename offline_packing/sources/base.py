"""What the project derives from a source's protocol: reading again from nothing but locators.

read_sample, read_media   -> a sample, and the bytes of its media, where they were measured
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final

from offline_packing.errors import StageError
from offline_packing.sources.fields import FieldMap
from offline_packing.sources.options import FieldOptions, MediaOptions, SourceOptions
from offline_packing.sources.protocol import SourcePart, SourceProtocol, SourceRecord
from offline_packing.sources.reading.locators import Locator
from offline_packing.sources.reading.read import read_locator
from offline_packing.sources.records import load_json, to_sample
from offline_packing.sources.roots.listing import walk
from offline_packing.sources.roots.local import MediaRoot
from offline_packing.sources.roots.remote import RemoteRoot, is_remote
from offline_packing.storage.key_set import KeySet
from task_encoders.samples import SampleError, SourceSample

_DRY_RUN_SAMPLES: Final = 4096
_CHANGED: Final = "restore it, or measure again with output.overwrite=true"


class Source(SourceProtocol):
    """One source: a format implements `scan` and `records`, and `parse` if its records are not
    JSON. Cheap to build and to send to another process."""

    #: the options of the format
    Options: ClassVar[type[SourceOptions]] = FieldOptions

    def __init__(
        self, options: SourceOptions, *, key_prefix: str = "", unpack_folder: Path | None = None
    ) -> None:
        """`options` are of the class's own Options; `unpack_folder` is where a compressed container
        may be unpacked when it is read out of order.

        Raises:
            StageError: the path does not exist.
        """
        self.options = options
        self.path = options.path
        self.task = options.task
        self.key_prefix = key_prefix
        self.image_root = options.image_root if isinstance(options, MediaOptions) else None
        self.fields = FieldMap(options.fields if isinstance(options, FieldOptions) else {})
        self.unpack_folder = unpack_folder
        #: keys of the records that are left out, see source.skip
        self.known: KeySet | None = None
        #: container of the source's file, where `path` is a file and not a folder
        self.file_name: str | None = None
        self.root = self._open_root()
        self.media = self.root
        if self.image_root is not None:
            if not is_remote(self.image_root) and not Path(self.image_root).is_dir():
                raise StageError(
                    f"image_root {self.image_root!r} is not a folder; set source.image_root"
                )
            self.media = _root_at(self.image_root)

    def _open_root(self) -> MediaRoot | RemoteRoot:
        if is_remote(self.path):
            root, self.file_name = RemoteRoot.at(self.path)
            return root
        given = Path(self.path)
        if not given.exists():
            raise StageError(f"source path {self.path!r} does not exist; set source.path")
        if given.is_dir():
            return MediaRoot(given)
        self.file_name = given.name
        return MediaRoot(given.parent)

    def is_known(self, key: str) -> bool:
        """Whether the record of a key is left out; a format that knows the key before it reads the
        record yields it with `known`, unread."""
        return self.known is not None and key in self.known

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        """The options besides the path for reading a local file or folder; None if it has
        another format."""
        return None

    def is_read(self, container: str) -> bool:
        """Whether `scan` reads a file of this name, where the path is a folder."""
        return True

    def entries(self) -> Iterator[tuple[str, int, int]]:
        """(container, size, modification time in ns) of every file that `scan` reads, in order."""
        if self.file_name is not None:
            return iter([self.root.entry(self.file_name)])
        return (entry for entry in walk(self.root) if self.is_read(entry[0]))

    def unread_parts(self) -> Sequence[SourcePart]:
        """The parts that can be known without reading whole files, for a dry run. A part
        without `num_records` is one file, from its beginning."""
        return self.scan(_DRY_RUN_SAMPLES).parts

    def open_container(self, container: str, *, sequential: bool = False) -> BinaryIO:
        """Open one of the source's own files, perhaps to be read sequentially. Raises
        StageError if that is not allowed."""
        try:
            return self.root.open(container, sequential=sequential)
        except SampleError as error:
            raise self.unreadable(container, error) from error

    def unreadable(self, container: str, error: SampleError) -> StageError:
        """The error to raise if one of the source's own files may not be read."""
        return StageError(
            f"{self.root.path(container)} cannot be read: {error.detail}; restore it, or set "
            "source.path to a folder that holds the files themselves"
        )

    def image_folder(self, container: str) -> str:
        """Folder that image names in the JSON file `container` are relative to, within `media`."""
        return "" if self.image_root is not None else container.rpartition("/")[0]

    def parse(self, data: bytes, column: str = "") -> Mapping[str, Any]:
        """A record's bytes, at a locator with this `column`, as the object that `to_sample` reads.

        Raises:
            SampleError: they are not such an object.
        """
        return self.fields.apply(load_json(data))

    def open_media(self, record: SourceRecord, name: str) -> tuple[Locator, BinaryIO]:
        found = record.embedded.get(name)
        if found is None:
            container = self.media.locate(self.image_folder(record.locator.container), name)
            file = self.media.open(container)
            return Locator("file", container, 0, self.media.size(file)), file
        if found.data is not None:
            return found.locator, io.BytesIO(found.data)
        at = found.locator
        return at, self.root.open_range(at.container, at.offset, at.size)

    def read(self, locator: Locator) -> Mapping[str, Any]:
        """The JSON object at a locator.

        Raises:
            StageError: the bytes no longer exist, or are no longer the record.
        """
        try:
            data = read_locator(self.root, locator, self.unpack_folder)
            return self.parse(data, locator.column)
        except SampleError as error:
            raise StageError(
                f"{self.root.path(locator.container)} changed since it was measured: {error}; "
                f"{_CHANGED}"
            ) from error

    def read_sample(
        self, key: str, locator: Locator, num_images: int, num_videos: int = 0
    ) -> SourceSample:
        """The sample whose record lies at a locator and had this many images and videos.

        Raises:
            StageError: it no longer exists, or is no longer what was measured.
        """
        # A record that names no media was paired with one; its name no longer matters.
        paired = ("paired.mp4",) if num_videos else ("paired",) if num_images else None
        try:
            sample = to_sample(self.read(locator), key, self.task, paired)
        except SampleError as error:
            raise StageError(
                f"sample {key!r} changed since it was measured: {error}; {_CHANGED}"
            ) from error
        if (len(sample.images), len(sample.videos)) != (num_images, num_videos):
            raise StageError(
                f"sample {key!r} changed since it was measured: it names {len(sample.images)} "
                f"images and {len(sample.videos)} videos, was {num_images} and {num_videos}; "
                f"{_CHANGED}"
            )
        return sample

    def read_media(self, locator: Locator) -> bytes:
        """The bytes of a medium. Raises StageError if they no longer exist."""
        # A medium that is a separate file may be under image_root; all others are in the source.
        root = self.media if locator.kind == "file" else self.root
        return read_locator(root, locator, self.unpack_folder)


def _root_at(folder: str) -> MediaRoot | RemoteRoot:
    return RemoteRoot.at(folder)[0] if is_remote(folder) else MediaRoot(Path(folder))

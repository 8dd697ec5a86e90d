"""What every source format offers: a scan into independent parts, and the records of a part.

scan()         -> parts of bounded size, and a hash of everything that was listed
records(part)  -> each record as found: key, where its JSON lies, the JSON
media          -> where the files that records name lie, and nothing outside the root
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offline_packing.errors import StageError
from offline_packing.files import read_range
from offline_packing.sources.media_root import MediaRoot
from offline_packing.sources.records import load_json
from task_encoders.samples import SampleError

#: A record with a larger JSON is refused before it is read into memory.
MAX_JSON_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class Locator:
    """Where bytes lie: `size` bytes at `offset` of `container`.

    `kind` is "file" (all of the file, which must have that size) or "bytes" (a range of it).
    `container` is a POSIX path relative to the source's root.
    """

    kind: str
    container: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A task's share of a source. `items` is the format's own; `num_records` an upper bound."""

    items: Any
    num_records: int


@dataclass(frozen=True, slots=True)
class Scan:
    """A source's listing.

    `fingerprint` changes with the names and sizes of its files. `unpaired_images` are image files
    that stand beside no record of their name; a record may still name them.
    """

    parts: tuple[SourcePart, ...]
    fingerprint: str
    unpaired_images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A record as found. `content` is its JSON object, or why there is none.

    `paired_images` are the images that belong to it by their name, where the format pairs by name
    (None where it does not); they count only if the content names no images itself.
    """

    key: str
    locator: Locator
    content: Mapping[str, Any] | SampleError
    paired_images: tuple[str, ...] | None = None


class Source(ABC):
    """One source. Cheap to build and to send to another process."""

    def __init__(
        self, path: str, task: str, *, key_prefix: str = "", image_root: str | None = None
    ) -> None:
        """Raises StageError if the path does not exist."""
        given = Path(path)
        if not given.exists():
            raise StageError(f"source path {path!r} does not exist; set source.path")
        self.path = given
        self.task = task
        self.key_prefix = key_prefix
        self.root = MediaRoot(given if given.is_dir() else given.parent)
        self.media = self.root
        self.image_root = image_root
        if image_root is not None:
            if not Path(image_root).is_dir():
                raise StageError(f"image_root {image_root!r} is no folder; set source.image_root")
            self.media = MediaRoot(Path(image_root))

    @abstractmethod
    def scan(self, samples_per_part: int) -> Scan:
        """List the source. Parts, and records in them, come in an order that depends on nothing
        but the files."""

    @abstractmethod
    def records(self, part: SourcePart) -> Iterator[SourceRecord]:
        """The records of a part, in order. A record that cannot be read is yielded as its error."""

    def image_folder(self, container: str) -> str:
        """Folder that image names in the JSON file `container` are relative to, within `media`."""
        return "" if self.image_root is not None else container.rpartition("/")[0]

    def read(self, locator: Locator) -> Mapping[str, Any]:
        """The JSON object at a locator.

        Raises:
            StageError: the bytes are not there any more, or are no longer the record.
        """
        data = read_range(
            self.root.path(locator.container),
            locator.offset,
            locator.size,
            whole=locator.kind == "file",
        )
        try:
            return load_json(data)
        except SampleError as error:
            raise StageError(
                f"{self.root.path(locator.container)} changed since it was measured: {error}"
            ) from error

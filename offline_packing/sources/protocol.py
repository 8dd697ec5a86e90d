"""What a source format has to do: list parts, read their records, open the media that these name.

scan()                    -> parts of bounded size, and a hash of everything that was listed
records(part)             -> each record as found: key, where its JSON lies, the JSON
open_media(record, name)  -> where a medium that a record names lies, open for reading its header

`Source` (base.py) derives the rest, and opens media that are files or in the record's container.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from offline_packing.sources.reading.locators import Locator
from task_encoders.samples import SampleError

#: A record with a larger JSON is refused before it is read into memory.
MAX_JSON_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A task's share of a source. `items` is the format's own; `num_records` an upper bound, None
    if only reading the part would tell."""

    items: Any
    num_records: int | None


@dataclass(frozen=True, slots=True)
class Scan:
    """A source's listing.

    `fingerprint` changes with the names and sizes of its files. `unpaired_media` are the
    `container_hash`es of image and video files that stand beside no record of their name, as uint64
    (num_files,); a record may still name them.
    """

    parts: tuple[SourcePart, ...]
    fingerprint: str
    unpaired_media: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    #: a table of listing.FILES_SCHEMA, packed, if it was made while listing
    files: bytes | None = None


@dataclass(frozen=True, slots=True)
class Embedded:
    """A medium inside the record's own container; `data` if it had to be read on the way."""

    locator: Locator
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A record as found. `content` is its JSON object, or why there is none.

    `paired_media` are the images and videos that belong to it by their name, where the format pairs
    by name (None where it does not); they count only if the content names none itself. `embedded`
    holds, by the name that the content or `paired_media` use, the media in the record's container.
    `own_id` tells that the key is an id of the record's own, which others may repeat. `known` is
    the number of records that it stands for, which the source leaves out and did not read. `unread`
    are fields that seem to hold media and were not read.
    """

    key: str
    locator: Locator
    content: Mapping[str, Any] | SampleError
    paired_media: tuple[str, ...] | None = None
    embedded: Mapping[str, Embedded] = field(default_factory=dict)
    own_id: bool = False
    known: int = 0
    unread: tuple[str, ...] = ()


class SourceProtocol(ABC):
    """What every format implements."""

    @abstractmethod
    def scan(self, samples_per_part: int) -> Scan:
        """List the source. Parts, and records in them, come in an order that depends only
        on the files."""

    @abstractmethod
    def records(self, part: SourcePart) -> Iterator[SourceRecord]:
        """The records of a part, in order. A record that cannot be read is yielded as its error."""

    @abstractmethod
    def open_media(self, record: SourceRecord, name: str) -> tuple[Locator, BinaryIO]:
        """Where an image or a video of a record lies, and a file of its bytes.

        Raises:
            SampleError: missing_image or path_outside_root.
        """


def record_key(content: Mapping[str, Any], default: str) -> str:
    """The key of a record that may have one of its own: "id", text or a whole number."""
    identity = content.get("id")
    if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        return default
    return str(identity)


# Names from earlier versions, which custom sources may import; nothing here uses them.


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes `begin` to `end` of a file, and their xxh3_128."""

    begin: int
    end: int
    content_hash: str


@dataclass(frozen=True, slots=True)
class Growth:
    """What a source had beyond what was measured before, when outputs could be appended to."""

    added: bytes
    num_added: int
    grown: Mapping[str, tuple[int, int]] = field(default_factory=dict)

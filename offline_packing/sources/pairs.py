"""`{img, json}` and `{video, json}` pairs, text-only `output_00000000.json`; in a folder and below.

    root/000000003474.jpg, root/000000003474.json       paired by their name
    root/a/book.json                                    {"images": ["cover.png", ...], ...}
    root/output_00000012.json                           {"images": [], ...} or no "images"

Every JSON file is one sample; its key is its path without the suffix. Files and folders whose name
begins with a dot are not looked at.
"""

import itertools
import os
import re
from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow.compute as pc

from offline_packing.errors import StageError
from offline_packing.sources import listing
from offline_packing.sources.base import MAX_JSON_BYTES, Growth, Scan, Source, SourcePart
from offline_packing.sources.base import SourceRecord as Record
from offline_packing.sources.locators import Locator
from task_encoders.pack_format import MEDIA_EXTENSIONS
from task_encoders.samples import SampleError

#: Suffixes of the files that samples are made of.
_READ: Final = frozenset(("json", *MEDIA_EXTENSIONS))
_TEXT_ONLY_NAME: Final = re.compile(r"output_\d{8}")


class PairsSource(Source):
    """One JSON file per sample, media beside it.

    A part is (rows of the listing as bytes, records to leave out in front): stems stay together.
    """

    def scan(self, samples_per_part: int) -> Scan:
        if self.file_name is not None:
            raise StageError(f"source path {self.path!r} is a file; pairs lie in a folder")
        files = listing.list_files(self.root.walk())
        useful = listing.suffix_in(files, _READ)
        used = files if useful.all() else files.filter(useful)
        return Scan(
            tuple(_parts(used, samples_per_part)),
            listing.listing_hash(files),
            tuple(listing.full_names(files.filter(_unpaired(files)))),
        )

    def scan_new(self, samples_per_part: int, growth: Growth) -> Scan:
        """New JSON files with the media that share their stem, whether these are new or not."""
        files = listing.list_files(entry[:2] for entry in self.entries())
        is_new = pc.is_in(listing.joined(files), growth.new).to_numpy(zero_copy_only=False)
        is_json = listing.suffix_in(files, ["json"])
        groups = listing.stem_groups(files)
        has_new_json = np.bincount(groups, is_new & is_json, minlength=1) > 0
        used = files.filter(has_new_json[groups] & (is_new | ~is_json))
        return Scan(
            tuple(_parts(used, samples_per_part)),
            listing.listing_hash(used),
            tuple(listing.full_names(files.filter(_unpaired(files) & is_new))),
        )

    def is_read(self, container: str) -> bool:
        return container.rpartition(".")[2].lower() in _READ

    def records(self, part: SourcePart) -> Iterator[Record]:
        data, skip = part.items
        names = listing.full_names(listing.from_bytes(data))
        files = ((name, *os.path.splitext(name)) for name in names)
        stems = itertools.groupby(files, key=lambda file: file[1])
        found = (record for _, group in stems for record in _pair(name for name, *_ in group))
        for container, beside in itertools.islice(found, skip, skip + (part.num_records or 0)):
            yield self._record(container, beside)

    def _record(self, container: str, beside: tuple[str, ...]) -> Record:
        stem = container.rpartition(".")[0]
        text_only = not beside and _TEXT_ONLY_NAME.fullmatch(stem.rpartition("/")[2])
        paired = None if text_only else beside
        key = os.fsencode(stem).decode("utf-8", "backslashreplace")
        try:
            if key != stem:
                raise SampleError("bad_record", "the file name is not UTF-8")
            data = self._read(container)
            content = self.parse(data)
        except SampleError as error:
            return Record(key, Locator("file", container, 0, 0), error)
        return Record(key, Locator("file", container, 0, len(data)), content, paired)

    def _read(self, container: str) -> bytes:
        try:
            return self.root.read(container, MAX_JSON_BYTES)
        except SampleError as error:
            if error.reason == "missing_image":  # a link to nowhere, or no regular file
                raise SampleError("bad_json", error.detail) from error
            raise


def _unpaired(files: "listing.pa.Table") -> np.ndarray:
    """(num_files,) bool: whether it is a medium beside no JSON of its name."""
    groups = listing.stem_groups(files)
    has_json = np.bincount(groups, listing.suffix_in(files, ["json"]), minlength=1) > 0
    unpaired: np.ndarray = listing.suffix_in(files, MEDIA_EXTENSIONS) & ~has_json[groups]
    return unpaired


def _parts(files: "listing.pa.Table", samples_per_part: int) -> Iterator[SourcePart]:
    """Parts of JSON files with the media that share their stem."""
    groups = listing.stem_groups(files)
    records = np.flatnonzero(listing.suffix_in(files, ["json"]))
    for start in range(0, len(records), samples_per_part):
        chosen = records[start : start + samples_per_part]
        begin = int(np.searchsorted(groups, groups[chosen[0]]))
        end = int(np.searchsorted(groups, groups[chosen[-1]], "right"))
        skip = start - int(np.searchsorted(records, begin))
        rows = files.slice(begin, end - begin)
        yield SourcePart((listing.to_bytes(rows), skip), len(chosen))


def _pair(names: Iterator[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Files of one stem -> each JSON file, with the names of the media beside it."""
    records: list[str] = []
    media: list[str] = []
    for name in names:
        (records if name.lower().endswith(".json") else media).append(name)
    beside = tuple(name.rpartition("/")[2] for name in media)
    return ((record, beside) for record in records)

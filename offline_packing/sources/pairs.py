"""`{img, json}` pairs, and text-only `output_00000000.json`, in one folder and all below it.

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

import xxhash

from offline_packing.sources.base import MAX_JSON_BYTES, Locator, Scan, Source, SourcePart
from offline_packing.sources.base import SourceRecord as Record
from offline_packing.sources.records import load_json
from task_encoders.pack_format import IMAGE_EXTENSIONS
from task_encoders.samples import SampleError

_TEXT_ONLY_NAME: Final = re.compile(r"output_\d{8}")

#: A JSON file's container, and the names of the images beside it that share its stem.
_Entry = tuple[str, tuple[str, ...]]


class PairsSource(Source):
    """One JSON file per sample, images beside it."""

    def scan(self, samples_per_part: int) -> Scan:
        digest = xxhash.xxh3_128()
        entries: list[_Entry] = []
        unpaired: list[str] = []
        # Sorted by (stem, suffix), the files of one stem stand together.
        files = sorted((_split(path), size) for path, size in _walk(self.root.folder, ""))
        for stem, group in itertools.groupby(files, key=lambda file: file[0][0]):
            names = [(f"{stem}.{suffix}", suffix, size) for (_, suffix), size in group]
            for name, _, size in names:
                digest.update(os.fsencode(name) + b"\0%d\n" % size)
            images = [name for name, suffix, _ in names if suffix.lower() in IMAGE_EXTENSIONS]
            records = [name for name, suffix, _ in names if suffix.lower() == "json"]
            beside = tuple(name.rpartition("/")[2] for name in images)
            entries.extend((record, beside) for record in records)
            if not records:
                unpaired.extend(images)
        chunks = (
            tuple(entries[start : start + samples_per_part])
            for start in range(0, len(entries), samples_per_part)
        )
        parts = tuple(SourcePart(chunk, len(chunk)) for chunk in chunks)
        return Scan(parts, digest.hexdigest(), tuple(unpaired))

    def records(self, part: SourcePart) -> Iterator[Record]:
        for container, beside in part.items:
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
            content = load_json(data)
        except SampleError as error:
            return Record(key, Locator("file", container, 0, 0), error)
        return Record(key, Locator("file", container, 0, len(data)), content, paired)

    def _read(self, container: str) -> bytes:
        try:
            with self.root.open(container) as file:
                data = file.read(MAX_JSON_BYTES + 1)
        except SampleError as error:
            if error.reason == "path_outside_root":
                raise
            raise SampleError("bad_json", error.detail) from error
        if len(data) > MAX_JSON_BYTES:
            raise SampleError("bad_record", f"the JSON is larger than {MAX_JSON_BYTES} bytes")
        return data


def _walk(folder: str, relative: str) -> Iterator[tuple[str, int]]:
    """(path relative to the root, size) of every file below a folder, links not followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path = f"{relative}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path, f"{path}/")
            else:
                yield path, entry.stat(follow_symlinks=False).st_size


def _split(path: str) -> tuple[str, str]:
    """'a/b.c.json' -> ('a/b.c', 'json')."""
    stem, _, suffix = path.rpartition(".")
    return (stem, suffix) if stem and "/" not in suffix else (path, "")

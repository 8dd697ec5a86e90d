"""`{img, json}` and `{video, json}` pairs, text-only `output_00000000.json`; in a folder and below.

    root/000000003474.jpg, root/000000003474.json       paired by their name
    root/a/book.json                                    {"images": ["cover.png", ...], ...}
    root/output_00000012.json                           {"images": [], ...} or no "images"

Every JSON file is one sample; its key is its path without the suffix. Files and folders whose name
begins with a dot are not looked at.
"""

import functools
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from offline_packing.errors import StageError
from offline_packing.sources.base import Source
from offline_packing.sources.protocol import MAX_JSON_BYTES, Scan, SourcePart
from offline_packing.sources.protocol import SourceRecord as Record
from offline_packing.sources.reading.locators import Locator
from offline_packing.sources.roots import listing
from offline_packing.sources.roots.contents import file_names, first_character, is_pack_name
from offline_packing.sources.roots.listing import PackedKeys
from offline_packing.storage.key_set import KeySet
from task_encoders.pack_format import MEDIA_EXTENSIONS
from task_encoders.samples import SampleError

#: What a suffix may mean besides 1, a medium, and 0, neither.
_RECORD: Final = 2
_TEXT_ONLY_NAME: Final = re.compile(r"output_\d{8}")


class PairsSource(Source):
    """One JSON file per sample, media beside it. A part is PackedKeys: JSON files, and the media
    that share their stem."""

    def scan(self, samples_per_part: int) -> Scan:
        if self.file_name is not None:
            raise StageError(f"source path {self.path!r} is a file; pairs need a folder")
        digest = xxhash.xxh3_128()
        parts = _Parts(samples_per_part)
        unpaired = [np.empty(0, np.uint64)]
        table = listing.FileTable(lambda suffix: _kind(suffix) > 0)
        for files in listing.list_files(self.root):
            listing.hash_files(digest, files)
            table.add(files)
            alone: list[bytes] = []
            for keys, num_records in _by_stem(files.keys):
                if num_records:
                    parts.add(files.folder, keys, num_records)
                else:
                    alone += keys
            unpaired.append(_hashes(files.folder, alone))
        hashes = np.concatenate(unpaired)
        return Scan(tuple(parts.finish()), digest.hexdigest(), hashes, files=table.finish())

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        names = file_names(path)
        record = next((name for name in names if name.lower().endswith(".json")), None)
        described = {"dataset_info.json", "dataset_dict.json", "state.json"} & set(names)
        if (
            not path.is_dir()
            or (path / ".nv-meta").is_dir()
            or record is None
            or described
            or is_pack_name(record)
        ):
            return None
        return {} if first_character(path, record) == b"{" else None

    def is_read(self, container: str) -> bool:
        stem, _, suffix = container.rpartition(".")
        return stem != "" and not stem.endswith("/") and _is_read(suffix)

    def records(self, part: SourcePart) -> Iterator[Record]:
        for folder, keys in part.items.unpack():
            where = os.fsdecode(folder)
            if self.known is not None:
                keys, num_known = _drop_known(self.known, where, keys)
                if num_known:
                    yield Record(where, Locator("file", where, 0, 0), {}, known=num_known)
            for _, stem_keys in itertools.groupby(keys, key=_stem):
                for name, beside in _pair(map(listing.to_name, stem_keys)):
                    yield self._record(where + name, beside)

    def _record(self, container: str, beside: tuple[str, ...]) -> Record:
        stem = container.rpartition(".")[0]
        text_only = not beside and _TEXT_ONLY_NAME.fullmatch(stem.rpartition("/")[2])
        paired = None if text_only else beside
        key = _record_key(stem)
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


class _Parts:
    """Parts of bounded size, made of the stems of one folder after the other."""

    def __init__(self, samples_per_part: int) -> None:
        self._samples_per_part = samples_per_part
        self._folders: list[tuple[bytes, list[bytes]]] = []
        self._num_records = 0
        self._parts: list[SourcePart] = []

    def add(self, folder: bytes, keys: Sequence[bytes], num_records: int) -> None:
        """Add the files of one stem."""
        if self._num_records + num_records > self._samples_per_part:
            self._close()
        if not self._folders or self._folders[-1][0] != folder:
            self._folders.append((folder, []))
        self._folders[-1][1].extend(keys)
        self._num_records += num_records

    def finish(self) -> list[SourcePart]:
        """All parts."""
        self._close()
        return self._parts

    def _close(self) -> None:
        if self._folders:
            self._parts.append(SourcePart(PackedKeys.of(self._folders), self._num_records))
        self._folders, self._num_records = [], 0


def _by_stem(keys: Sequence[bytes]) -> Iterator[tuple[list[bytes], int]]:
    """Keys in order -> those of each stem that are records or media, and how many are records."""
    kinds: dict[bytes, int] = {}
    stem, found, num_records = b"", list[bytes](), 0
    for key in keys:
        own, _, suffix = key.partition(listing.DOT)
        kind = kinds.get(suffix)
        if kind is None:
            kind = kinds[suffix] = _kind(suffix)
        if not kind:
            continue
        if own != stem:
            if found:
                yield found, num_records
            stem, found, num_records = own, [], 0
        found.append(key)
        num_records += kind == _RECORD
    if found:
        yield found, num_records


def _kind(suffix: bytes) -> int:
    name = os.fsdecode(suffix.lower())
    return _RECORD if name == "json" else int(name in MEDIA_EXTENSIONS)


@functools.cache
def _is_read(suffix: str) -> bool:
    return _kind(os.fsencode(suffix)) > 0


def _drop_known(known: KeySet, where: str, keys: list[bytes]) -> tuple[list[bytes], int]:
    """The keys of a folder's files except those of known records, and the number of the latter."""
    records = [_stem(key) for key in keys if _is_record(key)]
    found = known.find([_record_key(where + os.fsdecode(stem)) for stem in records])
    dropped = set(itertools.compress(records, found))
    return [key for key in keys if _stem(key) not in dropped], int(found.sum())


def _record_key(stem: str) -> str:
    return os.fsencode(stem).decode("utf-8", "backslashreplace")


def _is_record(key: bytes) -> bool:
    return _kind(_suffix(key)) == _RECORD


def _suffix(key: bytes) -> bytes:
    return key.partition(listing.DOT)[2]


def _hashes(folder: bytes, keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    names = (folder + key.replace(listing.DOT, b".") for key in keys)
    return np.array([listing.container_hash(name) for name in names], np.uint64)


def _stem(key: bytes) -> bytes:
    return key.partition(listing.DOT)[0]


def _pair(names: Iterator[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Files of one stem -> each JSON file, with the names of the media beside it."""
    records: list[str] = []
    media: list[str] = []
    for name in names:
        (records if name.lower().endswith(".json") else media).append(name)
    beside = tuple(media)
    return ((record, beside) for record in records)

"""`{img, json}` and `{video, json}` pairs, text-only `output_00000000.json`; in a folder and below.

    root/000000003474.jpg, root/000000003474.json       paired by their name
    root/a/book.json                                    {"images": ["cover.png", ...], ...}
    root/output_00000012.json                           {"images": [], ...} or no "images"

    root/000000003474.jpg, root/000000003474.txt        the same with captions, as plain text

Every JSON file, or every text, is one sample; its key is its path without the suffix. Files and
folders whose name begins with a dot are not looked at.
"""

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa
import xxhash

from offline_packing.errors import StageError, as_sample_error
from offline_packing.sources.base import Scan, Source, SourcePart, SourceRecord
from offline_packing.sources.options import SourceOptions
from offline_packing.sources.reading.contents import file_head, file_names, is_pack_name
from offline_packing.sources.reading.locators import Locator
from offline_packing.sources.roots import listing
from offline_packing.sources.roots.listing import DOT
from offline_packing.storage.key_set import KeySet
from task_encoders.packs.pack_format import MEDIA_EXTENSIONS
from task_encoders.records.record import decode_text
from task_encoders.samples import SampleError

_MEDIA: Final = frozenset(name.encode() for name in MEDIA_EXTENSIONS)
_TEXT_ONLY_NAME: Final = re.compile(r"output_\d{8}")

#: A folder, the files in it that share one stem (as keys), and how many of these are records.
_Stem = tuple[bytes, list[bytes], int]


class PairsSource(Source):
    """One JSON file per sample, media next to it. A part is the keys of both, packed."""

    #: suffix of a record, in lower case; media have MEDIA_EXTENSIONS, other files are not read
    RECORD: ClassVar[bytes] = b"json"

    def scan(self, samples_per_part: int) -> Scan:
        if self.file_name is not None:
            raise StageError(
                f"source path {self.path!r} is a file; set it to the folder of the pairs"
            )
        digest = xxhash.xxh3_128()
        unpaired, table = [np.empty(0, np.uint64)], pa.BufferOutputStream()

        def stems() -> Iterator[_Stem]:
            for files in listing.list_files(self.root):
                digest.update(files.folder + b"\0/" + b"/".join(files.keys) + b"\0/")
                digest.update(files.sizes.tobytes())
                writer.write_batch(files.table(self._is_suffix))
                alone: list[int] = []
                for keys, num_records in _by_stem(files.keys, self.RECORD):
                    if num_records:
                        yield files.folder, keys, num_records
                    else:
                        names = (files.folder + key.replace(DOT, b".") for key in keys)
                        alone += map(listing.container_hash, names)
                unpaired.append(np.array(alone, np.uint64))

        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(table, listing.FILES_SCHEMA, options=options) as writer:
            parts = tuple(_parts(stems(), samples_per_part))
        found = table.getvalue().to_pybytes()
        return Scan(parts, digest.hexdigest(), np.concatenate(unpaired), files=found)

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        names = file_names(path)
        record = next((name for name in names if name.lower().endswith(".json")), None)
        described = {"dataset_info.json", "dataset_dict.json", "state.json"} & set(names)
        is_prepared = (path / ".nv-meta").is_dir()
        if not path.is_dir() or record is None or is_prepared or described or is_pack_name(record):
            return None
        return {} if file_head(path, record)[:1] == b"{" else None

    def is_read(self, container: str) -> bool:
        stem, _, suffix = container.rpartition(".")
        return bool(stem) and stem[-1] != "/" and self._is_suffix(os.fsencode(suffix))

    def _is_suffix(self, suffix: bytes) -> bool:
        return suffix.lower() in {self.RECORD, *_MEDIA}

    def records(self, part: SourcePart) -> Iterator[SourceRecord]:
        for folder, keys in listing.unpack_keys(part.items):
            where = os.fsdecode(folder)
            if self.known is not None:
                keys, num_known = self._drop_known(self.known, where, keys)
                if num_known:
                    yield SourceRecord(where, Locator("file", where, 0, 0), {}, known=num_known)
            for _, stem_keys in itertools.groupby(keys, key=_stem):
                names = list(map(listing.to_name, stem_keys))
                ending = f".{self.RECORD.decode()}"
                media = tuple(name for name in names if not name.lower().endswith(ending))
                for name in names:
                    if name not in media:
                        yield self._record(where + name, media)

    def _record(self, container: str, media: tuple[str, ...]) -> SourceRecord:
        stem = container.rpartition(".")[0]
        text_only = not media and _TEXT_ONLY_NAME.fullmatch(stem.rpartition("/")[2])
        paired = None if text_only else media
        key = _record_key(stem)
        try:
            if key != stem:
                raise SampleError("bad_record", "the file name is not UTF-8")
            data = self.root.read(container)
            content = self.parse(data)
        except Exception as error:  # noqa: BLE001 - of this record
            return SourceRecord(key, Locator("file", container, 0, 0), as_sample_error(error))
        return SourceRecord(key, Locator("file", container, 0, len(data)), content, paired)

    def _drop_known(self, known: KeySet, where: str, keys: list[bytes]) -> tuple[list[bytes], int]:
        """Return the keys of a folder's files except those of known records, and the number of
        these."""
        records = [_stem(key) for key in keys if key.lower().endswith(DOT + self.RECORD)]
        found = known.find([_record_key(where + os.fsdecode(stem)) for stem in records])
        dropped = set(itertools.compress(records, found))
        return [key for key in keys if _stem(key) not in dropped], int(found.sum())


class CaptionsSource(PairsSource):
    """One text file per sample, the caption of the image or video next to it."""

    Options = SourceOptions
    RECORD = b"txt"

    @classmethod
    def recognise(cls, path: Path) -> Mapping[str, Any] | None:
        parted = [name.rpartition(".") for name in file_names(path)]
        media = {stem for stem, _, suffix in parted if suffix.lower() in MEDIA_EXTENSIONS}
        texts = {stem for stem, _, suffix in parted if suffix.lower() == "txt"}
        return {"task": "captioning"} if media & texts and path.is_dir() else None

    def parse(self, data: bytes, column: str = "") -> Mapping[str, Any]:
        return {"caption": decode_text(data).strip()}


def _parts(stems: Iterable[_Stem], samples_per_part: int) -> Iterator[SourcePart]:
    """Cut stems into parts of bounded size; no stem is cut."""
    folders: list[tuple[bytes, list[bytes]]] = []
    held = 0
    for folder, keys, num_records in stems:
        if folders and held + num_records > samples_per_part:
            yield SourcePart(listing.pack_keys(folders), held)
            folders, held = [], 0
        if not folders or folders[-1][0] != folder:
            folders.append((folder, []))
        folders[-1][1].extend(keys)
        held += num_records
    if folders:
        yield SourcePart(listing.pack_keys(folders), held)


def _by_stem(keys: Sequence[bytes], record: bytes) -> Iterator[tuple[list[bytes], int]]:
    """Group keys in order by their stem: yield its records and media, and the number of records."""
    parted = (key.partition(DOT) for key in keys)
    for _, group in itertools.groupby(parted, itemgetter(0)):
        found = {key: suffix for key in group if (suffix := key[2].lower()) in {record, *_MEDIA}}
        if found:
            yield [*map(b"".join, found)], list(found.values()).count(record)


def _record_key(stem: str) -> str:
    return os.fsencode(stem).decode("utf-8", "backslashreplace")


def _stem(key: bytes) -> bytes:
    return key.partition(DOT)[0]

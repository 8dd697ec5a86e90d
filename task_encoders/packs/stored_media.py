"""Media that packs refer to instead of holding them (`output.media: refer`).

A pack's JSON has the place of each medium in `meta.media`, by the name that it would have in the
pack:

    {"img000.jpg": ["files0", "a/cat.jpg", null, 34071, 1763766381000000000],
     "img001.jpg": ["tars0", "000.tar", 51200, 20113, 1763766381000000000]}

A place is a root, a file in it, the medium's offset there (null: it is the whole file), its bytes,
and the file's modification time in ns (0 of a remote object: storages do not agree on it). The
roots of an output are in one small file next to its shards, so that its data can move:

    media_roots.json    {"files0": "/data/images", "tars0": "/data"}    folders or URLs
"""

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from task_encoders.packs.pack import Pack, PackFormatError, parse_json
from task_encoders.packs.pack_format import JSON_PART, MEDIA_EXTENSIONS, extension_of
from task_encoders.storage.paths import REMEDY, is_url, path_of, read_at, read_range

MEDIA_ROOTS: Final = "media_roots.json"

#: Root, file, offset, bytes and modification time of a medium.
Place = Sequence[Any]


#: Errors of a medium that cannot be read, and why; and of one that has another size or time.
_GONE: Final = (
    "{} cannot be read: {}; restore it, or if the data moved, say where they are: "
    "offline-packing write CONFIG source.path=NEW (or source.image_root)"
)
_CHANGED: Final = (
    "{} changed since it was packed ({}); restore it (cp -a and rsync -t keep times), or pack "
    "again with another output.path"
)


@functools.lru_cache(maxsize=64)
def read_media_roots(folder: str) -> Mapping[str, str]:
    """Read the folders, or URLs, that packs in a folder name, once per process. Raises
    PackFormatError if the file is missing or damaged."""
    path = path_of(folder) / MEDIA_ROOTS
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise PackFormatError(f"{path} cannot be used ({error}); {REMEDY}") from error


def _read_at(place: Place, folder: str, count: int | None) -> bytes:
    """Read a medium at a place in a pack of an output, or its first `count` bytes. Raises
    PackFormatError if there is no such place, the medium no longer exists, or its file has another
    size or was written to; RemoteError."""
    try:
        root, file, offset, size, packed_ns = place
        path = f"{read_media_roots(folder)[root]}/{file}"
    except (LookupError, TypeError, ValueError) as error:
        if isinstance(error, PackFormatError):
            raise
        what = f"no medium is at {place!r}"[:200]
        raise PackFormatError(f"{folder}: {what} by {MEDIA_ROOTS}; {REMEDY}") from error
    count = size if count is None else count
    begin, mtime_ns = offset or 0, 0
    try:
        if is_url(path):
            remote = path_of(path)
            data = read_range(remote, begin, begin + count) if count else b""
            file_size = remote.stat().st_size
        else:
            with open(path, "rb", buffering=0) as opened:
                data = read_at(opened.fileno(), count, begin)
                found = os.fstat(opened.fileno())
            file_size, mtime_ns = found.st_size, found.st_mtime_ns
    except OSError as error:
        raise PackFormatError(_GONE.format(path, error.strerror or error)) from error
    end = begin + size
    if file_size < end or len(data) < count or (offset is None and file_size != end):
        raise PackFormatError(_CHANGED.format(path, f"{file_size} bytes, were {end}"))
    if mtime_ns != packed_ns:
        raise PackFormatError(_CHANGED.format(path, "another time"))
    return data


class StoredMedia(Mapping[str, bytes]):
    """Media by name that are read when asked for."""

    def __init__(self, places: Mapping[str, Place], folder: object) -> None:
        """Take the places in a pack's JSON, and the folder or URL of its output."""
        self._places, self._folder = places, str(folder)

    def check(self, name: str) -> None:
        """Raise as reading a medium does, by the size and time of its file alone."""
        self._read(name, 0)

    def _read(self, name: str, count: int | None = None) -> bytes:
        try:
            return _read_at(self._places[name], self._folder, count)
        except PackFormatError:
            read_media_roots.cache_clear()  # perhaps the data moved since
            return _read_at(self._places[name], self._folder, count)

    def __getitem__(self, name: str) -> bytes:
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._places  # Mapping's own would read the bytes

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def pack_of(key: str, members: Mapping[str, Any], folder: object) -> Pack:
    """Make the pack of these members; members other than its JSON and media are left out. Media
    that its JSON refers to are read when asked for. JSON that cannot be parsed stays as it is.

    Args:
        folder: of the output, or its URL.
    """
    media = {n: data for n, data in members.items() if extension_of(n) in MEDIA_EXTENSIONS}
    try:
        record = parse_json(members.get(JSON_PART), key)
    except PackFormatError:  # whoever looks into it says so
        return Pack(key, members.get(JSON_PART), media)
    meta = record.get("meta")
    places = meta.get("media") if isinstance(meta, Mapping) else None
    return Pack(key, record, StoredMedia(places, folder) if isinstance(places, Mapping) else media)

"""What is in a folder, for messages about a source without records or without its pictures."""

import contextlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from offline_packing.errors import StageError
from offline_packing.sources.roots.remote import is_remote
from offline_packing.storage.streams import DamagedStreamError, open_unpacked
from offline_packing.storage.tars import TarReader

#: Suffix of a file, and the value of source.format that reads it.
_FORMATS: Final = {
    ".tar": "webdataset",
    ".tar.gz": "webdataset",
    ".tgz": "webdataset",
    ".tar.zst": "webdataset",
    ".parquet": "parquet",
    ".arrow": "huggingface",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".json": "json or pairs",
}
_PACK_NAME: Final = re.compile(r"[A-Za-z0-9_-]*ps_\d+\.")
#: How many names are looked at: a source may hold millions.
_MAX_NAMES: Final = 10_000
#: Folders in which a missing picture is looked for.
_MAX_FOLDERS: Final = 500


def nothing_found(path: str, wanted: str) -> StageError:
    """The error to raise if a source holds no file, or no record, of its format: names what
    it holds instead."""
    others = describe_others(path, wanted)
    hint = f", or {others}" if others else ""
    return StageError(f"source path {path!r} holds no {wanted}; set source.path{hint}")


def describe_others(path: str, wanted: str) -> str:
    """The files at a path, or one folder below it, that another format reads: '2 *.tar here:
    source.format=webdataset'; empty where there are none, or the path is remote.

    Args:
        wanted: the files that were expected: '*.jsonl'.
    """
    if is_remote(path):
        return ""
    names = itertools.islice(_names(Path(path)), _MAX_NAMES)
    counts = Counter(suffix for name in names if (suffix := _format_suffix(name)))
    return ", ".join(
        f"{count:,} *{suffix} here: source.format={_FORMATS[suffix]}"
        for suffix, count in counts.most_common()
        if f"*{suffix}" != wanted
    )


def find_image_root(path: str, name: str) -> str | None:
    """A folder at, below or above a source from which an image that is missing can be reached:
    the value of source.image_root; None where none is found.

    Args:
        name: as the record gives it, with or without the record's own folder in front.
    """
    if is_remote(path) or name.startswith("/"):
        return None
    parts = PurePosixPath(name).parts
    tails = ["/".join(parts[i:]) for i in range(len(parts))]
    start = Path(path) if Path(path).is_dir() else Path(path).parent
    for folder in itertools.islice(_folders_near(start), _MAX_FOLDERS):
        for tail in tails:
            if (folder / tail).is_file():
                return str(folder)
    return None


def _names(path: Path) -> Iterator[str]:
    if path.is_file():
        yield path.name
        return
    for folder in (path, *_subfolders(path)):
        with os.scandir(folder) as entries:
            yield from (entry.name for entry in entries if entry.is_file())


def _format_suffix(name: str) -> str | None:
    name = name.lower()
    fitting = [suffix for suffix in _FORMATS if name.endswith(suffix)]
    return max(fitting, key=len, default=None)


def _folders_near(folder: Path) -> Iterator[Path]:
    """The folder, the two above it, and the contents of each."""
    for near in (folder, folder / "..", folder / "../.."):
        yield Path(os.path.normpath(near))
        yield from map(Path, map(os.path.normpath, _subfolders(near)))


def _subfolders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            some = itertools.islice(entries, _MAX_NAMES)
            return sorted(folder / entry.name for entry in some if entry.is_dir())
    except OSError:  # not readable: no hint then
        return []


def file_names(path: Path) -> list[str]:
    """Names of the files at a path and below it, relative to it, at most so many as are looked at;
    of a file its own. Hidden ones, and those that a run keeps for itself, are left out."""
    if path.is_file():
        return [path.name]
    found = (
        os.path.relpath(os.path.join(folder, name), path)
        for folder, folders, names in os.walk(path)
        if folders.sort() is None and not _is_hidden(folder, path)
        for name in sorted(names)
        if not name.startswith(".")
    )
    return list(itertools.islice(found, _MAX_NAMES))


def first_character(path: Path, name: str) -> bytes:
    """The first byte of a text file at a path (which may be that file) that is not white space."""
    with open(path if path.is_file() else path / name, "rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def holds_packs(path: Path, tar: str) -> bool:
    """Whether a tar at a path (which may be that tar) begins with a pack."""
    with open(path if path.is_file() else path / tar, "rb") as packed:
        size = os.fstat(packed.fileno()).st_size
        with contextlib.suppress(DamagedStreamError):
            for member in TarReader(open_unpacked(packed, tar, size)):
                return is_pack_name(member.name)
    return False


def is_pack_name(name: str) -> bool:
    """Whether a file is named as those of packs are: 'ps_00000000.img000.jpg'."""
    return _PACK_NAME.match(name.rpartition("/")[2]) is not None


def _is_hidden(folder: str, root: Path) -> bool:
    return any(part.startswith((".", "_packing")) for part in Path(folder).relative_to(root).parts)

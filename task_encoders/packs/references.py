"""Packs whose media stay where they are: lines of JSON, and Energon's auxiliary datasets.

    {"key": "ps_00000000",
     "pack": {"images": ["img000.jpg", "img001.jpg"], "captions": [...], ...},    see pack_format.py
     "media": {"img000.jpg": ["files0", "a/cat.jpg", 34071, 1763766381000000000],
               "img001.jpg": ["tars0", "000.tar", 51200, 1763766381000000000, "0001.jpg"]}}

A locator holds the auxiliary dataset, a file in it, the medium's bytes, the file's modification
time in ns (0 of a remote object: storages do not agree on it), and for a tar of a prepared dataset
the member. Which dataset an output's metadataset.yaml means by a name is Energon's to resolve.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from megatron.energon.cache import FileStore
from megatron.energon.epathlib import EPath
from megatron.energon.errors import FatalSampleError

from task_encoders.packs.pack import MovedMediumError
from task_encoders.packs.pack_format import JSON_PART, METADATASET
from task_encoders.storage.energon_paths import energon_path

Stores = Mapping[str, FileStore[bytes]]


def metadataset_of(path: str | Path | EPath) -> EPath:
    """Path that Energon reads of an output: its folder, or the metadataset beside references.
    Raises StorageError for a URL that leads nowhere."""
    folder = energon_path(path)
    inside = folder / METADATASET
    has_shards = (folder / ".nv-meta" / "dataset.yaml").is_file()
    return inside if inside.is_file() and not has_shards else folder


def read_medium(locator: Sequence[Any], stores: Stores, sample: Any = None) -> bytes:
    """The bytes at a locator; Energon notes in a `sample` where they came from. Raises
    MovedMediumError if they are gone, or the file was written to since it was packed."""
    name, container, size, mtime_ns, *member = locator
    if name not in stores:
        raise MovedMediumError(f"no auxiliary dataset {name!r}; read the output's {METADATASET}")
    path = f"{stores[name].get_path()}/{container}"
    try:
        found = os.stat(path).st_mtime_ns if mtime_ns else 0
        data = stores[name].get(member[0] if member else container, sample)
    except (OSError, KeyError, ValueError) as error:
        raise MovedMediumError.gone(path, f"{type(error).__name__}: {error}") from error
    if len(data) != size or found != mtime_ns:
        what = f"{len(data)} bytes, was {size}" if len(data) != size else "another time"
        raise MovedMediumError.changed(path, what)
    return data


def is_reference(line: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a parsed line of JSON is a pack that refers to its media."""
    return isinstance(line, Mapping) and set(line) == {"key", "pack", "media"}


def read_parts(line: Mapping[str, Any], stores: Stores, sample: Any) -> dict[str, Any]:
    """The members of a line's pack, by part. Raises FatalSampleError where `read_medium` fails."""
    try:
        media = {name: read_medium(at, stores, sample) for name, at in line["media"].items()}
    except MovedMediumError as error:
        raise FatalSampleError(f"pack {line['key']!r}: {error}") from error
    return {JSON_PART: line["pack"], **media}

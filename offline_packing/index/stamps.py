"""Stamps: noticing at `write` that a file was edited since `measure`, though its size is the same.

A stamp covers the modification times of the files that a sample lies in. Hashing their content
would mean reading all media twice; a time costs one call per file. Remote objects have no stamp:
they are replaced as a whole, and their size is checked when they are read.

Data that were copied without their times look edited. `--accept-mismatch modification_time` takes
their word for it: sizes are still compared.
"""

import os
from collections.abc import Iterable
from typing import Final

import numpy as np
import xxhash

from offline_packing.sources import Locator, Source
from offline_packing.sources.reading.local import MediaRoot

#: What --accept-mismatch calls the times; no field of a fingerprint.
MODIFICATION_TIME: Final = "modification_time"


def sample_stamp(source: Source, json: Locator, media: Iterable[Locator]) -> int:
    """64 bits that change when a file of the sample is written to, or is gone."""
    times = [_modified(source.root, json.container)]
    for locator in media:
        # As in Source.read_media: a medium that is a file of its own may lie under image_root.
        root = source.media if locator.kind == "file" else source.root
        times.append(_modified(root, locator.container))
    return xxhash.xxh3_64_intdigest(np.array(times, dtype="<i8").tobytes())


def _modified(root: object, container: str) -> int:
    """Modification time in ns; 0 of what is remote or gone."""
    if not isinstance(root, MediaRoot):
        return 0
    try:
        return os.stat(root.path(container)).st_mtime_ns
    except OSError:
        return 0

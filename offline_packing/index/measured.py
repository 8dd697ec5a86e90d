"""Columns of the index: hashes of a sample, the stamp of its files, and its prefix."""

import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import orjson
import xxhash

from offline_packing.sources import Locator, Source
from offline_packing.sources.roots.roots import MediaRoot
from task_encoders.sample_encoder import Prefix
from task_encoders.samples import SourceSample
from task_encoders.samples.medium_options import MediumOptions, options_json

#: The number of a medium's bytes that are hashed: the first request to remote storage reads them.
HASHED_BYTES: Final = 1 << 14

#: The name of stamps in --accept-mismatch; not a field of a fingerprint.
MODIFICATION_TIME: Final = "modification_time"

_PREFIX: Final = tuple(f"prefix_{name}" for name in ("hash", "media", "tokens", "images", "videos"))
_NO_PREFIX: Final = dict.fromkeys(_PREFIX, 0)


def modification_time(root: object, container: str) -> int:
    """Return a file's modification time in ns; 0 for a remote or missing file."""
    if not isinstance(root, MediaRoot):
        return 0
    try:
        return os.stat(root.path(container)).st_mtime_ns
    except OSError:
        return 0


def sample_stamp(
    source: Source,
    record: Locator,
    media: Iterable[Locator],
    time_of: Callable[[object, str], int] = modification_time,
) -> int:
    """Hash the modification times of a sample's files to 64 bits, which change when one is written
    to or removed, even if its size does not. `time_of` is `modification_time`, or a cache of it.

    Hashing contents would read all media twice. Remote objects have no stamp: they are replaced as
    a whole, and their size is checked when they are read. Data that were copied without their times
    look edited: `--accept-mismatch modification_time` accepts them.
    """
    times = [time_of(source.root, record.container)]
    times += [time_of(source.media_root(locator), locator.container) for locator in media]
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(times)}q", *times))


def prefix_row(
    prefix: Prefix | None,
    media_hashes: Iterable[int],
    media: Sequence[int],
    options: Sequence[MediumOptions] = (),
) -> Mapping[str, int]:
    """Return a row's columns of a prefix.

    Args:
        media_hashes: `hash_medium` of the prefix's media, which covers some bytes only.
        media: a hash of all bytes of each of these media, or `hash_place` where they were not read.
            Samples share a prefix if these are also equal, or if the files are.
        options: options of these media: two clips of one file differ.
    """
    if prefix is None:
        return _NO_PREFIX
    spans = [(span[0], span[1], *span[3:]) for span in prefix.spans]
    asked = [options_json(options)] if any(options) else []
    content = orjson.dumps([spans, [*media_hashes], *asked], option=orjson.OPT_SERIALIZE_NUMPY)
    values = xxhash.xxh3_64_intdigest(content) or 1, join_hashes(media), *prefix[1:]
    return dict(zip(_PREFIX, values, strict=True))


def join_hashes(hashes: Sequence[int]) -> int:
    """Hash several hashes, in order, to one."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(hashes)}Q", *hashes))


def hash_medium(num_bytes: int, beginning: bytes) -> int:
    """Hash a medium's size and first HASHED_BYTES bytes: equal files have one hash wherever they
    are, and bytes farther on would be another request to remote storage."""
    digest = xxhash.xxh3_64(num_bytes.to_bytes(8, "little"))
    digest.update(beginning[:HASHED_BYTES])
    return digest.intdigest()


def hash_sample(sample: SourceSample, media_hashes: Sequence[int]) -> int:
    """Hash (xxh3_64) a sample's texts, and its media by their options and `hash_medium`."""
    return xxhash.xxh3_64_intdigest(orjson.dumps([*texts_of(sample), media_hashes]))


def texts_of(sample: SourceSample) -> list[Any]:
    """Return a sample's texts, and the options of its media, as JSON holds them."""
    turns = [(turn.prompt, turn.answer, turn.details) for turn in sample.turns]
    return [turns, sample.system, sample.tools, *asked_of(sample)]


def asked_of(sample: SourceSample) -> list[Any]:
    """Return a list of the options of a sample's media; an empty one if no medium has any."""
    return [options_json(sample.options)] if sample.options else []


def hash_place(source_id: int, medium: Locator) -> int:
    """Hash the location of a medium."""
    return xxhash.xxh3_64_intdigest(orjson.dumps([source_id, *medium]))

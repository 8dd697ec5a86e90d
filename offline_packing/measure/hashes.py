"""Hashes that tell which samples and media are the same."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, Final

import orjson
import xxhash

from offline_packing.sources import Embedded, Source
from task_encoders.samples import SourceSample

#: Bytes of a medium that are hashed: those that the first request to remote storage brings.
HASHED_BYTES: Final = 1 << 14


def hash_content(sample: SourceSample, media: Iterable[Embedded | None]) -> int:
    """xxh3_64 of what a sample is trained on: its texts, and its media by their names, or by their
    bytes where these are in the record itself."""
    names = (sample.images, sample.videos)
    turns = [{"prompt": t.prompt, "answer": t.answer, **t.details} for t in sample.turns]
    tools = [sample.tools] if sample.tools else []
    digest = xxhash.xxh3_64(orjson.dumps([turns, *names, sample.system, *tools]))
    for medium in media:
        if medium is not None and medium.data is not None:
            digest.update(xxhash.xxh3_128_digest(medium.data))
    return digest.intdigest()


def hash_sample(sample: SourceSample, media_hashes: Sequence[int]) -> int:
    """xxh3_64 of a sample's texts, and of its media by their `hash_medium`."""
    return xxhash.xxh3_64_intdigest(orjson.dumps([*_texts(sample), media_hashes]))


def digest_sample(sample: SourceSample, media: Iterable[bytes]) -> bytes:
    """xxh3_128 of a sample's texts, and of its media by all their bytes."""
    digest = xxhash.xxh3_128(orjson.dumps(_texts(sample)))
    for data in media:
        digest.update(xxhash.xxh3_128_digest(data))
    return digest.digest()


def _texts(sample: SourceSample) -> list[Any]:
    turns = [(turn.prompt, turn.answer, turn.details) for turn in sample.turns]
    return [turns, sample.system, sample.tools]


def hash_medium(num_bytes: int, file: BinaryIO) -> int:
    """xxh3_64 of a medium's size and its first HASHED_BYTES bytes, so that equal files have one
    hash wherever they lie: in remote storage any other place would be a request."""
    digest = xxhash.xxh3_64(num_bytes.to_bytes(8, "little"))
    digest.update(file.read(HASHED_BYTES))
    return digest.intdigest()


def hash_group(source: Source, content: Mapping[str, Any]) -> int:
    """xxh3_64 of the field that `source.fields.group` names; 0: the record lacks it."""
    if "group" not in source.fields.named or content.get("group") is None:
        return 0
    return (
        xxhash.xxh3_64_intdigest(orjson.dumps(content["group"], option=orjson.OPT_SORT_KEYS)) or 1
    )


def repeated_key(key: str, content_hash: int) -> str:
    """Key of a sample that shares its id: '33471@5d0c0a1be0a6a2f7'."""
    return f"{key}@{content_hash:016x}"

"""Values of a row of the index: the traits of a sample, the stamp of its files, its prefix."""

import itertools
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntFlag
from typing import Final

import orjson
import xxhash

from offline_packing.sources import Locator, Source
from offline_packing.sources.roots.roots import MediaRoot
from task_encoders.sample_encoder import Prefix
from task_encoders.samples import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, SourceSample
from task_encoders.text.qwen_templates import DEFAULT_SYSTEM
from task_encoders.text.qwen_vocabulary import QWEN_SPECIAL_TOKENS

#: Bytes of a medium that are hashed: the first request to remote storage brings them.
HASHED_BYTES: Final = 1 << 14

#: Name of the times in --accept-mismatch; not a field of a fingerprint.
MODIFICATION_TIME: Final = "modification_time"

_PREFIX: Final = tuple(f"prefix_{name}" for name in ("hash", "media", "tokens", "images", "videos"))
_NO_PREFIX: Final = dict.fromkeys(_PREFIX, 0)

#: Line breaks at the start of an answer, which tokenizers merge with the header's.
_BREAK: Final = re.compile(r"\s*[\r\n]")
_SPECIAL: Final = re.compile("|".join(map(re.escape, QWEN_SPECIAL_TOKENS)))
#: Image sides that array code takes for a number of channels.
_LIKE_CHANNELS: Final = frozenset((1, 3))
#: Pixels to which some trainers stretch a shorter side before they resize an image.
_LEAST_SIDE: Final = 28


class Trait(IntFlag):
    """Properties of a sample that some layout cannot store: the index column `traits`. Measuring
    records it for a layout with `Layout.NEEDS_TRAITS`, since only then is the sample's text at
    hand; `Layout.admit` names traits that the layout cannot store, and planning sets such samples
    aside. Stored: a flag's value never changes its meaning."""

    #: a conversation's system message is not the chat template's default one
    OWN_SYSTEM = 1
    #: rendered to one string, its text would be read as control tokens or as a further image; or it
    #: is a document, with images in its text
    CONTROL_TEXT = 2
    #: an image is 1 or 3 pixels high or wide
    THIN_IMAGE = 4
    #: it has tools, thoughts, other roles than a user and an assistant, or answers without loss
    NOT_PLAIN = 8
    #: an answer carries no loss or is truncated, or a system or developer message is not the first
    UNTRAINED_OR_ROLES = 16
    #: an answer begins with a line break
    BREAK_FIRST = 32
    #: it has a system message, which is empty
    EMPTY_SYSTEM = 64
    #: CONTROL_TEXT of system message, tools, calls, thoughts or messages before a prompt; or
    #: <video> that stands for no video
    CONTROL_ELSEWHERE = 128
    #: an image is less than 28 pixels high or wide
    SMALL_IMAGE = 256


_NO_TRAIT: Final = Trait(0)


def sample_traits(sample: SourceSample, image_sizes: Sequence[tuple[int, int]]) -> Trait:
    """The traits of a checked sample whose images have these (height, width)."""
    traits = _NO_TRAIT
    if sample.task == "captioning":  # nothing but the caption is encoded
        misread = sample.turns[0].answer  # no other trainer has pictures there
        texts = [misread]
    else:
        misread = "".join([turn.answer for turn in sample.turns])
        texts = [misread, *(turn.prompt for turn in sample.turns)]
        if sample.system not in (None, DEFAULT_SYSTEM):
            traits |= Trait.OWN_SYSTEM
        if sample.system == "":
            traits |= Trait.EMPTY_SYSTEM
        if _has_control_elsewhere(sample):
            traits |= Trait.CONTROL_ELSEWHERE
    control = [text for text in texts if "<|" in text]
    if IMAGE_PLACEHOLDER in misread or any(map(_SPECIAL.search, control)):
        traits |= Trait.CONTROL_TEXT
    if not sample.is_plain:
        traits |= Trait.NOT_PLAIN
    roles = {role for turn in sample.turns for role, _ in (*turn.before, (turn.role, ""))}
    if roles & {"system", "developer"} or any(
        turn.weight != 1 or turn.truncated for turn in sample.turns
    ):
        traits |= Trait.UNTRAINED_OR_ROLES
    if any(_BREAK.match(turn.answer) for turn in sample.turns):
        traits |= Trait.BREAK_FIRST
    sides = [*itertools.chain(*image_sizes)]
    if not _LIKE_CHANNELS.isdisjoint(sides):
        traits |= Trait.THIN_IMAGE
    if sides and min(sides) < _LEAST_SIDE:
        traits |= Trait.SMALL_IMAGE
    return traits


def _has_control_elsewhere(sample: SourceSample) -> bool:
    """Trait.CONTROL_ELSEWHERE of a conversation."""
    before = [text for turn in sample.turns for _, text in turn.before]
    as_text = [turn.answer for turn in sample.turns]
    if not sample.videos:
        as_text += [*before, *(turn.prompt for turn in sample.turns)]
    if any(VIDEO_PLACEHOLDER in text for text in as_text):
        return True
    others = [sample.system or "", sample.tools, *before]
    for turn in sample.turns:
        others += [turn.thought or "", *turn.calls]
    return any(map(_SPECIAL.search, others))


def modification_time(root: object, container: str) -> int:
    """Modification time in ns; 0 for a remote or missing file."""
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
    """Stamp of 64 bits, which changes when a file of the sample is written to or removed, even if
    its size does not.

    They cover the modification times of the files that the sample lies in. Hashing their content
    would mean reading all media twice; a time costs one call per file. Remote objects have no
    stamp: they are replaced as a whole, and their size is checked when they are read. Data that
    were copied without their times look edited: `--accept-mismatch modification_time` takes their
    word for it.

    Args:
        time_of: `modification_time`, or a cache of it.
    """
    times = [time_of(source.root, record.container)]
    for locator in media:
        # Same as in Source.read_media: a medium that is a file of its own may lie under image_root.
        root = source.media if locator.kind == "file" else source.root
        times.append(time_of(root, locator.container))
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(times)}q", *times))


def prefix_row(
    prefix: Prefix | None, media_hashes: Iterable[int], media: Sequence[int]
) -> Mapping[str, int]:
    """Return a row's columns of a prefix.

    Args:
        media_hashes: `hash_medium` of its media.
        media: a hash of all bytes of each of its media where they were at hand, otherwise of its
            place (`hash_place`). The other hashes cover some bytes only: samples share a prefix
            where these are equal, too, or where the files are found to be.
    """
    if prefix is None:
        return _NO_PREFIX
    spans = [(span[0], span[1], *span[3:]) for span in prefix.spans]
    content = orjson.dumps([spans, [*media_hashes]], option=orjson.OPT_SERIALIZE_NUMPY)
    values = xxhash.xxh3_64_intdigest(content) or 1, join_hashes(media), *prefix[1:]
    return dict(zip(_PREFIX, values, strict=True))


def join_hashes(hashes: Sequence[int]) -> int:
    """One hash of several, in order."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(hashes)}Q", *hashes))


def hash_medium(num_bytes: int, beginning: bytes) -> int:
    """xxh3_64 of a medium's size and its first HASHED_BYTES bytes, so that equal files have one
    hash wherever they lie: in remote storage any other place would be a request."""
    digest = xxhash.xxh3_64(num_bytes.to_bytes(8, "little"))
    digest.update(beginning[:HASHED_BYTES])
    return digest.intdigest()


def hash_place(source_id: int, medium: Locator) -> int:
    """xxh3_64 of where a medium lies."""
    return xxhash.xxh3_64_intdigest(orjson.dumps([source_id, *medium]))

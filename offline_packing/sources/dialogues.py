"""Samples that are not one whole record: dialogues of several, and parts of one conversation.

`source.merge_same_image` makes one dialogue of several records:

    {"image": "a.jpg", "question": "What?", "answer": "A cat."}        <image>What?  A cat.
    {"image": "a.jpg", "question": "Which colour?", "answer": "Red."}  Which colour?  Red.

A picture is shown where it first stands; where later records name it again, their marks go.

`pack.on_overlong: split_turns` cuts a conversation between turns. A part may show earlier turns in
front of its own, without loss, and earlier images:

    <image>A? B. C? D. | E? F. | G? H.      conversation[2:3] = <image>C? D. E? F.  with loss on F.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
import xxhash

from offline_packing.sources.base import Source
from offline_packing.sources.reading.locators import Locator
from task_encoders.samples import (
    IMAGE_PLACEHOLDER,
    SourceSample,
    Turn,
    count_placeholders,
    place_media,
)

#: A mark of an image, with the line break that sets it apart.
_MARK: Final = re.compile(f"{IMAGE_PLACEHOLDER}\n|\n{IMAGE_PLACEHOLDER}$|{IMAGE_PLACEHOLDER}")


@dataclass(frozen=True, slots=True)
class TurnRange:
    """Turns of a conversation that a part of it has."""

    #: the first that is shown; those before `first` carry no loss
    begin: int
    first: int
    end: int
    #: characters of the last answer, if it is truncated
    answer_length: int | None = None


@dataclass(frozen=True, slots=True)
class RecordPart:
    """A record that a sample is made of. `media` are, of each of its images and then videos, its
    place among those of the sample; -1: it is not shown."""

    key: str
    content_hash: int
    json: Locator
    media: tuple[int, ...]
    num_videos: int = 0
    #: None: all its turns
    turns: TurnRange | None = None

    def read(self, source: Source) -> SourceSample:
        """The whole record. Raises StageError if it changed after it was measured."""
        num_images = len(self.media) - self.num_videos
        return source.read_sample(self.key, self.json, num_images, self.num_videos)


def read_dialogue(source: Source, key: str, parts: Sequence[RecordPart]) -> SourceSample:
    """The sample of several records, or of turns of one. Raises StageError if one changed after it
    was measured."""
    samples = [part.read(source) for part in parts]
    if parts[0].turns is not None:
        return take_turns(key, samples[0], parts[0].turns, parts[0].media)
    return merge_samples(key, samples, [part.media for part in parts])


def take_turns(
    key: str, sample: SourceSample, taken: TurnRange, places: Sequence[int]
) -> SourceSample:
    """Some turns of a conversation, with its system message and tools, and those of its media that
    have places, see `RecordPart.media`. Images of turns before the first one stand in front."""
    turns = list(place_media(sample)[taken.begin : taken.end])
    for i in range(taken.first - taken.begin):
        turns[i] = replace(turns[i], weight=0.0)
    if taken.answer_length is not None:
        answer = turns[-1].answer[: taken.answer_length]
        turns[-1] = replace(turns[-1], answer=answer, truncated=True)
    shown = [name for name, at in zip(sample.media, places, strict=True) if at >= 0]
    num_images = sum(at >= 0 for at in places[: len(sample.images)])
    front = IMAGE_PLACEHOLDER * (num_images - count_placeholders(turns, IMAGE_PLACEHOLDER))
    turns[0] = _put_in_front(turns[0], front) if front else turns[0]
    images, videos = tuple(shown[:num_images]), tuple(shown[num_images:])
    return replace(sample, key=key, turns=tuple(turns), images=images, videos=videos)


def _put_in_front(turn: Turn, front: str) -> Turn:
    """The turn with marks before its first message of a user, or the first that has marks."""
    for i, (role, text) in enumerate(turn.before):
        if role == "user" or IMAGE_PLACEHOLDER in text:
            before = (*turn.before[:i], (role, front + text), *turn.before[i + 1 :])
            return replace(turn, before=before)
    return replace(turn, prompt=front + turn.prompt)


def merge_samples(
    key: str, samples: Sequence[SourceSample], places: Sequence[Sequence[int]]
) -> SourceSample:
    """One dialogue of all turns of samples with the same system message and tools, and no video.
    `places` are those of `RecordPart.media`."""
    if len(samples) == 1:
        return replace(samples[0], key=key)
    shown: dict[int, str] = {}
    turns = []
    for sample, own in zip(samples, places, strict=True):
        left = iter(zip(own, sample.images, strict=True))

        def show(mark: re.Match[str], left: Iterator[tuple[int, str]] = left) -> str:
            place, name = next(left)
            if place in shown:
                return ""
            shown[place] = name
            return mark[0]

        for turn in place_media(sample):
            before = tuple((role, _MARK.sub(show, text)) for role, text in turn.before)
            prompt = _MARK.sub(show, turn.prompt)
            turns.append(replace(turn, before=before, prompt=prompt))
    images = tuple(shown[place] for place in sorted(shown))
    return replace(samples[0], key=key, turns=tuple(turns), images=images)


def hash_of_dialogue(
    source: Source, content: Mapping[str, Any], sample: SourceSample, media_hashes: Sequence[int]
) -> int:
    """Number that samples share which may become one dialogue; 0: this one stays by itself. So do
    those with videos, or one picture twice, those that ask nothing, and those with thoughts: in a
    dialogue, templates show only the thoughts of the last answers."""
    options = source.merge
    if options is None or sample.videos or len(set(media_hashes)) < len(media_hashes):
        return 0
    what = content.get("group")
    if options.by is None:
        what = media_hashes[0] if len(sample.images) == 1 else None
    thinks = any(turn.thought is not None or "</think>" in turn.answer for turn in sample.turns)
    asks = all(turn.prompt.replace(IMAGE_PLACEHOLDER, "").strip() for turn in sample.turns)
    if what is None or thinks or not asks:
        return 0
    groups = content.get("group") if "group" in source.fields.named else None
    identity = orjson.dumps([what, groups, sample.system, sample.tools])
    return xxhash.xxh3_64_intdigest(identity) or 1

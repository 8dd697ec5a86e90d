"""A sample: one conversation with the names of its media, whatever file it came from.

Every source format and every pack is read into `SourceSample`; every sample encoder takes one. The
media themselves travel alongside it, as bytes in the order of `SourceSample.media`.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, Final

from task_encoders.samples.medium_options import AS_FAMILY, MediumOptions, read_options

#: The three kinds of training sample. "bmr" is multi-turn and mixed data (blend, multi-round).
TASKS: Final = ("captioning", "vqa", "bmr")

#: Marks the place of the next image in a prompt, or in a caption, which is then a document. In the
#: answer of a conversation it is ordinary text.
IMAGE_PLACEHOLDER: Final = "<image>"

#: The same for videos. In a sample without videos it is ordinary text.
VIDEO_PLACEHOLDER: Final = "<video>"

#: Kind of medium of each placeholder.
MEDIA_KINDS: Final[Mapping[str, str]] = {IMAGE_PLACEHOLDER: "image", VIDEO_PLACEHOLDER: "video"}
_PLACEHOLDERS: Final = re.compile(f"({'|'.join(map(re.escape, MEDIA_KINDS))})")
_BLANK_LINES: Final = re.compile(r"\n\s*\n")

#: Label of a position that carries no loss, as in torch's cross_entropy and transformers.
IGNORE_INDEX: Final = -100

#: Who speaks before an answer. A first system message is the sample's own.
ROLES: Final = ("user", "tool", "system", "developer")

#: Why a sample can be set aside. A reason is part of the artifacts: never rename one.
REASONS: Final[Mapping[str, str]] = {
    "bad_json": "the JSON cannot be parsed (also: not UTF-8, a lone surrogate, NaN)",
    "damaged_source": "the file that holds the sample, and perhaps more, ends or is damaged there",
    "bad_record": "the JSON parses but does not hold what its task needs",
    "bad_roles": "messages are not [system,] user, assistant, ...; results of tools count as user",
    "empty_answer": "an answer or caption is empty or only white space",
    "lost_prompt": "captioning would not show the record's prompt to the model",
    "image_count_mismatch": "the number of <image> placeholders is not the number of images",
    "video_count_mismatch": "the number of <video> placeholders is not the number of videos",
    "missing_image": "an image or video the record names does not exist",
    "ambiguous_image": "several images or videos share the record's name and it names none",
    "path_outside_root": "the path of an image or video leads outside the source's folder",
    "bad_image": "an image is empty or of no supported format",
    "truncated_image": "an image's data ends before the image does, or is corrupt",
    "image_too_large": "an image has more pixels than max_image_pixels",
    "bad_video": "a video is empty, of no supported format, or has too few readable frames",
    "truncated_video": "a video's data ends before the video does, or is corrupt",
    "video_too_large": "a video's frames have more pixels than a quarter of max_image_pixels",
    "video_too_long": "a video has more frames than max_video_frames",
    "aspect_ratio": "a medium's longer side is more than max_aspect_ratio times the shorter",
    "not_in_template": "the chat template cannot write such a sample (tools, thoughts, roles)",
    "not_drawn": "the repeat or weight of its source is below 1 and left it out",
    "not_chosen": "pack.where, or source.min_rating in all of its turns, left it out",
    "trained": "an earlier run trained it already",
    "duplicate_key": "an earlier sample of the same source has the same key",
    "not_in_layout": "the output layout cannot hold such a sample (its plan says what)",
    "overlong": "the sample has more tokens than seq_length",
    "over_budget": "the sample alone is over a budget of its pack (vision patches, images, videos)",
    "too_costly": "reading it would take more than one sample may: text, messages, media, headers",
    "unexpected_error": "reading it raised an error that no other reason covers (the detail is it)",
}


class SampleError(ValueError):
    """A sample that cannot be used: it is set aside, or dropped from its pack; the rest goes on."""

    def __init__(self, reason: str, detail: str) -> None:
        if reason not in REASONS:
            raise KeyError(f"unknown reason {reason!r}; valid: {', '.join(REASONS)}")
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type["SampleError"], tuple[str, str]]:
        return type(self), (self.reason, self.detail)  # errors cross process boundaries


@dataclass(slots=True, unsafe_hash=True)  # not frozen: making one would take four times as long
class Turn:
    """One exchange. A caption or document is a turn whose prompt is not shown to the model."""

    prompt: str
    answer: str
    #: who says the prompt, one of ROLES; "tool" if it is a tool's result
    role: str = "user"
    #: (role, text) of each message between the last answer and the prompt
    before: tuple[tuple[str, str], ...] = ()
    #: what the model thought before it answered, if kept apart from the answer
    thought: str | None = None
    #: the tool calls in the answer, each as JSON: {"name": str, "arguments": object or text}
    calls: tuple[str, ...] = ()
    #: of the answer's tokens in the loss; 0: it carries none
    weight: float = 1.0
    #: the answer goes on: no end token follows it. Of the last one only
    truncated: bool = False

    @property
    def details(self) -> dict[str, Any]:
        """Everything besides a user's prompt and an answer: {} for most turns."""
        values = _details(self)
        if values == _NO_DETAILS:
            return {}
        found = dict(zip(_DETAILS, values, strict=True))
        if not self.weight:  # as packs spell it
            del found["weight"]
            found["trained"] = False
        return {name: value for name, value in found.items() if value != _DETAILS.get(name)}


_DETAILS: Final[Mapping[str, Any]] = {field.name: field.default for field in fields(Turn)[2:]}
_NO_DETAILS: Final = tuple(_DETAILS.values())
_details = attrgetter(*_DETAILS)


def make_turn(prompt: str, answer: str, details: Mapping[str, Any]) -> Turn:
    """Make a turn with details read from JSON.

    Raises:
        SampleError: they are not the details of a turn.
    """
    if not details:
        return Turn(prompt, answer)
    held = {**_DETAILS, **details} if isinstance(details, Mapping) else {}
    if held.get("trained") is False:
        held["weight"] = 0.0
        del held["trained"]
    if held.keys() != _DETAILS.keys():
        raise SampleError("bad_record", f"not the details of a turn: {details!r}"[:200])
    role, before, thought, calls, weight, truncated = (held[name] for name in _DETAILS)
    pairs = before if isinstance(before, list | tuple) else [before]
    if not (
        role in ROLES
        and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs)
        and all(who in ROLES and isinstance(text, str) for who, text in pairs)
        and isinstance(thought, str | None)
        and isinstance(calls, list | tuple)
        and all(map(_is_call, calls))
        and is_weight(weight)
        and isinstance(truncated, bool)
    ):
        raise SampleError("bad_record", f"not the details of a turn: {details!r}"[:200])
    told = tuple(map(tuple, before))
    return Turn(prompt, answer, role, told, thought, tuple(calls), float(weight), truncated)


def is_weight(value: Any) -> bool:
    """Tell whether a value can weigh tokens: 0, or a number that float32 holds precisely."""
    return isinstance(value, int | float) and (value == 0 or 1e-6 <= value <= 1e6)


def _is_call(text: Any) -> bool:
    try:
        call = json.loads(text)
    except (TypeError, ValueError):
        return False
    return isinstance(call, dict) and isinstance(call.get("name"), str)


@dataclass(slots=True, unsafe_hash=True)  # see Turn
class SourceSample:
    """One conversation.

    `images` and `videos` hold names, in the order of their placeholders: relative paths in a
    source, member names (`img000.jpg`, `vid000.mp4`) in a pack. `system` None means the chat
    template's default.
    """

    key: str
    task: str
    turns: tuple[Turn, ...]
    images: tuple[str, ...] = ()
    system: str | None = None
    videos: tuple[str, ...] = ()
    #: JSON list of the tools that the model may call; "": none
    tools: str = ""
    #: of each of its `media`; (): none has any
    options: tuple[MediumOptions, ...] = ()

    @property
    def media(self) -> tuple[str, ...]:
        """Names of all media: images first, then videos."""
        return self.images + self.videos

    @property
    def by_kind(self) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
        """Kind, placeholder and names: of its images, and of its videos."""
        return (
            ("image", IMAGE_PLACEHOLDER, self.images),
            ("video", VIDEO_PLACEHOLDER, self.videos),
        )

    @property
    def media_options(self) -> tuple[MediumOptions, ...]:
        """Options of each of its media."""
        return self.options or (AS_FAMILY,) * len(self.media)

    def showing(self, kept: Sequence[int]) -> "SourceSample":
        """Return the sample with only these of its media."""
        images = tuple([self.images[i] for i in kept if i < len(self.images)])
        videos = tuple([self.media[i] for i in kept if i >= len(self.images)])
        options = tuple([self.options[i] for i in kept]) if self.options else ()
        options = options if any(options) else ()
        return replace(self, images=images, videos=videos, options=options)

    @property
    def is_plain(self) -> bool:
        """Whether it has nothing but turns without details and a system message."""
        return not self.tools and all(_details(turn) == _NO_DETAILS for turn in self.turns)


def check_sample(sample: SourceSample) -> None:
    """Raise SampleError where no encoder could use the sample: no turn, an empty answer, or
    placeholders that do not match the media (without any of a kind, its media go in front)."""
    if sample.task not in TASKS:
        raise ValueError(f"unknown task {sample.task!r}; valid: {', '.join(TASKS)}")
    if not sample.turns:
        raise SampleError("bad_record", "no turns")
    for i, turn in enumerate(sample.turns):
        if not (turn.answer.strip() or turn.calls):
            raise SampleError("empty_answer", f"turn {i} has an empty answer")
        if turn.truncated and (i + 1 < len(sample.turns) or turn.calls or not turn.weight):
            raise SampleError(
                "bad_record",
                f"the answer of turn {i} is truncated; only the last one can be, trained and "
                "without calls",
            )
    if sample.task == "captioning":
        if len(sample.turns) != 1:
            raise SampleError("bad_record", f"{len(sample.turns)} captions; one is expected")
        if sample.tools or sample.turns[0].details.keys() - {"truncated"}:
            raise SampleError("bad_record", "a caption has no tools, thoughts or weights")
        texts = split_at_media(sample, sample.turns[0].answer)[::2]
        if sample.media and not any(map(str.strip, texts)):
            raise SampleError("empty_answer", "a caption has media and no text")
    for kind, placeholder, names in sample.by_kind if sample.videos else sample.by_kind[:1]:
        found = count_placeholders(sample.turns, placeholder, sample.task)
        if found not in (0, len(names)):
            why = "" if names else f"; name them, or write {placeholder} otherwise if it is text"
            raise SampleError(
                f"{kind}_count_mismatch",
                f"{found} {placeholder} placeholders for {len(names)} {kind}s{why}",
            )


def options_of_media(asked: Any, num_images: int, num_videos: int) -> tuple[MediumOptions, ...]:
    """Return `SourceSample.options` from a list of them as JSON holds it, with null or nothing for
    media without. Raises SampleError: bad_record."""
    kinds = ["image"] * num_images + ["video"] * num_videos
    if not isinstance(asked, list) or len(asked) != len(kinds):
        raise SampleError("bad_record", f"not the options of {len(kinds)} media: {asked!r}"[:200])
    try:
        found = tuple(map(read_options, [one or {} for one in asked], kinds))
    except (AttributeError, ValueError) as error:
        raise SampleError("bad_record", str(error)) from error
    return found if any(found) else ()


def refuse_codec_input(positions: Any, fps: Any = None) -> None:
    """Raise SampleError for codec input of LLaVA-OneVision-2, whose images are no pictures by
    themselves: files named in the `patch_positions` of a record or a pack, or a pack's `fps`."""
    if fps is not None or any(positions if isinstance(positions, list) else [positions]):
        what = "fps" if fps is not None else "patch_positions"
        raise SampleError("bad_record", f"codec input ({what} of LLaVA-OneVision-2) is not packed")


def count_placeholders(turns: Iterable[Turn], placeholder: str, task: str) -> int:
    """Count a placeholder where it marks media: in the prompts and in the messages before them; of
    captions, in their text."""
    if task == "captioning":
        return sum([turn.answer.count(placeholder) for turn in turns])
    found = 0
    for turn in turns:
        found += turn.prompt.count(placeholder)
        for _, text in turn.before:
            found += text.count(placeholder)
    return found


def media_in_front(sample: SourceSample) -> str:
    """Return placeholders for all images, then all videos, of each kind that no text places."""
    front = ""
    for _, placeholder, names in sample.by_kind if sample.media else ():
        if names and not count_placeholders(sample.turns, placeholder, sample.task):
            front += placeholder * len(names)
    return front


def place_media(sample: SourceSample) -> tuple[Turn, ...]:
    """Put the placeholders of `media_in_front` before the first prompt, or a caption's text."""
    front = media_in_front(sample)
    if not front:
        return sample.turns
    first, *rest = sample.turns
    if sample.task == "captioning":
        return (replace(first, answer=front + first.answer),)
    return replace(first, prompt=front + first.prompt), *rest


def split_at_media(sample: SourceSample, text: str) -> list[str]:
    """Split a prompt or a caption at placeholders: 'a<image>b' -> ['a', '<image>', 'b']. Texts and
    placeholders alternate, and a text comes first. `<video>` is text in a sample without videos."""
    if sample.videos:
        return _PLACEHOLDERS.split(text)
    parts = [IMAGE_PLACEHOLDER] * (2 * text.count(IMAGE_PLACEHOLDER) + 1)
    parts[::2] = text.split(IMAGE_PLACEHOLDER)
    return parts


def sections(sample: SourceSample) -> tuple[Turn, ...]:
    """Return the turns between which a sample may be cut, its media placed. Turns of a caption are
    the sections of its text, which end at blank lines and in front of media. Each has text: media
    stay with the text after them or, at the end of a document, with the text before them."""
    turns = place_media(sample)
    if sample.task != "captioning":
        return turns
    (turn,) = turns
    parts = split_at_media(sample, turn.answer)
    last = max((i for i in range(0, len(parts), 2) if parts[i].strip()), default=0)
    end_of_text = len("".join(parts[:last]) + parts[last].rstrip())
    cuts, place, has_text = [0], 0, False
    for number, part in enumerate(parts):
        if number % 2:
            if has_text and place < end_of_text:
                cuts.append(place)
                has_text = False
        else:
            begin = 0
            for blank in _BLANK_LINES.finditer(part):
                has_text |= bool(part[begin : blank.start()].strip())
                begin = blank.end()
                if has_text and place + begin < end_of_text:
                    cuts.append(place + begin)
                    has_text = False
            has_text |= bool(part[begin:].strip())
        place += len(part)
    found = [
        Turn("", turn.answer[begin:end], truncated=True)
        for begin, end in itertools.pairwise([*cuts, place])
    ]
    found[0] = replace(found[0], prompt=turn.prompt)
    found[-1] = replace(found[-1], truncated=turn.truncated)
    return tuple(found)


def join_sections(sample: SourceSample, turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Join consecutive `sections` of a sample to the turns of a part that holds only these."""
    if sample.task != "captioning":
        return tuple(turns)
    text = "".join([turn.answer for turn in turns])
    return (replace(turns[0], answer=text, truncated=turns[-1].truncated),)

"""One JSON object to one sample. The forms that are read:

    {"messages": [{"role": "user", "content": str}, {"role": "assistant", "content": str}, ...],
     "images": [str, ...]}                                     a leading system message is allowed
    {"conversations": [{"from": "human", "value": str}, {"from": "gpt", "value": str}, ...],
     "image": str, "system": str}                              ShareGPT, LLaVA
    {"captions": [{"content": str}]}, {"captions": [str]}, {"caption": str}
    {"question" | "prompt" | "context": str, "answer" | "answers": str}

The prompts and answers of the last form may also be two lists of equal length: turns. Images are
named by "images" or "image", videos by "videos" or "video". Other fields are ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import orjson

from task_encoders.pack_format import is_video_name
from task_encoders.samples import (
    IMAGE_PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    SampleError,
    SourceSample,
    Turn,
    check_sample,
    count_placeholders,
)

_UTF8_BOM: Final = b"\xef\xbb\xbf"
_PROMPT_FIELDS: Final = ("question", "prompt", "context")
_ANSWER_FIELDS: Final = ("answer", "answers", "captions", "caption")
_DIALOGUE_FIELDS: Final = ("messages", "conversations")

#: Every field that `to_sample` reads, and "id".
RECORD_FIELDS: Final = (
    *("id", "image", "images", "video", "videos", "system"),
    *(*_DIALOGUE_FIELDS, *_PROMPT_FIELDS, *_ANSWER_FIELDS),
)

#: Names that roles have in one form or another.
_ROLES: Final[Mapping[str, str]] = {"human": "user", "gpt": "assistant"}


def load_json(data: bytes) -> Mapping[str, Any]:
    """Parse a record.

    Raises:
        SampleError: bad_json, or bad_record if it is no object.
    """
    try:
        content = orjson.loads(data.removeprefix(_UTF8_BOM))
    except orjson.JSONDecodeError as error:
        raise SampleError("bad_json", " ".join(str(error).split())[:200]) from error
    if not isinstance(content, dict):
        raise SampleError("bad_record", f"the JSON is {_kind(content)}, not an object")
    return content


def to_sample(
    content: Mapping[str, Any],
    key: str,
    task: str,
    paired_media: Sequence[str] | None = None,
) -> SourceSample:
    """Make a sample of a parsed record.

    Args:
        paired_media: images and videos with the record's name, where the format pairs by name.

    Raises:
        SampleError: the record cannot be used.
    """
    dialogue = next((name for name in _DIALOGUE_FIELDS if content.get(name) is not None), None)
    if dialogue is not None:
        system, turns = _dialogue(content[dialogue], dialogue)
        system = _system(content) if system is None else system
    else:
        system, turns = None, _turns(content, task)
    images, videos = _media(content, paired_media)
    if videos and not images:
        turns = _mark_videos(turns, len(videos))
    sample = SourceSample(key, task, tuple(turns), tuple(images), system, tuple(videos))
    check_sample(sample)
    return sample


def has_dialogue(content: Mapping[str, Any]) -> bool:
    """Whether a record holds a list of messages, and not questions and answers."""
    return any(content.get(name) is not None for name in _DIALOGUE_FIELDS)


def has_answer(content: Mapping[str, Any]) -> bool:
    """Whether a record holds what is to be learned, in any of the forms."""
    return any(content.get(name) is not None for name in (*_DIALOGUE_FIELDS, *_ANSWER_FIELDS))


def image_names(content: Mapping[str, Any]) -> list[Any] | None:
    """What a record names as its images, unchecked; None where it names none."""
    named = content.get("image") if content.get("images") is None else content["images"]
    return named if named is None or isinstance(named, list) else [named]


def video_names(content: Mapping[str, Any]) -> list[Any] | None:
    """What a record names as its videos, unchecked; None where it names none."""
    named = content.get("videos") or content.get("video") or None
    return named if named is None or isinstance(named, list) else [named]


def _mark_videos(turns: list[Turn], num_videos: int) -> list[Turn]:
    """LLaVA-Video's records mark the places of videos by `<image>`: those marks as our own."""
    if count_placeholders(turns, IMAGE_PLACEHOLDER) != num_videos or count_placeholders(
        turns, VIDEO_PLACEHOLDER
    ):
        return turns
    return [
        Turn(turn.prompt.replace(IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER), turn.answer)
        for turn in turns
    ]


def _system(content: Mapping[str, Any]) -> str | None:
    system = content.get("system")
    if system is not None and not isinstance(system, str):
        raise SampleError("bad_record", f"'system' is {_kind(system)}, not text")
    return system or None


def _dialogue(messages: Any, name: str) -> tuple[str | None, list[Turn]]:
    """[system,] user, assistant, user, assistant, ..."""
    if not isinstance(messages, list) or not messages:
        raise SampleError("bad_record", f"{name!r} is {_kind(messages)}, not a list of messages")
    pairs = [_message(message) for message in messages]
    system = pairs.pop(0)[1] if pairs[0][0] == "system" else None
    roles = [role for role, _ in pairs]
    if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
        raise SampleError("bad_roles", f"roles are {', '.join(roles[:8]) or 'system only'}")
    texts = [text for _, text in pairs]
    return system, [Turn(*turn) for turn in zip(texts[::2], texts[1::2], strict=True)]


def _message(message: Any) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise SampleError("bad_record", f"a message is {_kind(message)}, not an object")
    if "from" in message:
        role, text = message["from"], message.get("value")
        role = _ROLES.get(role, role) if isinstance(role, str) else role
    else:
        role, text = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(text, str):
        raise SampleError(
            "bad_record", "a message needs the texts 'role' and 'content', or 'from' and 'value'"
        )
    return role, text


def _turns(content: Mapping[str, Any], task: str) -> list[Turn]:
    answers = _texts(content, _ANSWER_FIELDS)
    if answers is None:
        raise SampleError("bad_record", f"none of 'messages', {_names(_ANSWER_FIELDS)}")
    prompts = _texts(content, _PROMPT_FIELDS)
    if prompts is None:
        if task != "captioning":
            raise SampleError("bad_record", f"no prompt: none of {_names(_PROMPT_FIELDS)}")
        prompts = [""] * len(answers)
    if len(prompts) != len(answers):
        raise SampleError("bad_record", f"{len(prompts)} prompts for {len(answers)} answers")
    return [Turn(*turn) for turn in zip(prompts, answers, strict=True)]


def _texts(content: Mapping[str, Any], names: Sequence[str]) -> list[str] | None:
    """The first of the fields that is there, as a list: 'x', ['x'] and [{"content": 'x'}]."""
    name = next((name for name in names if content.get(name) is not None), None)
    if name is None:
        return None
    values = content[name] if isinstance(content[name], list) else [content[name]]
    texts = [value.get("content") if isinstance(value, dict) else value for value in values]
    if any(not isinstance(text, str) for text in texts):
        raise SampleError("bad_record", f"{name!r} holds something other than text")
    return cast(list[str], texts)


def _media(
    content: Mapping[str, Any], paired_media: Sequence[str] | None
) -> tuple[Sequence[str], Sequence[str]]:
    """Names of the images and of the videos."""
    images, videos = image_names(content), video_names(content)
    if images is not None or videos is not None:
        for field, names in (("images", images), ("videos", videos)):
            if not all(isinstance(name, str) for name in names or ()):
                raise SampleError("bad_record", f"{field!r} holds something other than file names")
        return images or (), videos or ()
    if paired_media is None:
        return (), ()
    if not paired_media:
        raise SampleError("missing_image", "no image of the record's name beside it")
    if len(paired_media) > 1:
        raise SampleError("ambiguous_image", f"the record names none of {_names(paired_media)}")
    return ((), paired_media) if is_video_name(paired_media[0]) else (paired_media, ())


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"

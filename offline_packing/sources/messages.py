"""A list of messages to turns, in the forms that datasets have it:

    {"role": "user", "content": str}, {"role": "assistant", "content": str}, ...
    {"from": "human", "value": str}, {"from": "gpt", "value": str}, ...   ShareGPT, LLaVA
    {"user": str, "assistant": str}, ...                            the_cauldron, FineVision

`content` may be a list of texts and media, in the order in which the model sees them:

    [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": "What is it?"}]
    [{"type": "image_url", "image_url": {"url": "a.jpg"}}, ...]     also "video", "video_url"
    [{"type": "image"}, ...]                                        the record's next image

What a message says and packs cannot hold (tools, reasoning, a loss weight) is refused: the sample
would be trained as another one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from task_encoders.samples import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, SampleError, Turn

#: Names that roles have in one form or another.
_ROLES: Final[Mapping[str, str]] = {"human": "user", "gpt": "assistant"}
#: What a message or a record may hold besides its text, and would be lost.
_UNPACKED: Final = (
    *("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"),
    *("image", "images", "video", "videos", "audio", "audios"),
)
_LOSS_FIELDS: Final = ("loss_weight", "weight", "loss", "train")
#: Type of a part of a content list -> what marks its place.
_MEDIA_TYPES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("image", "image_url"), IMAGE_PLACEHOLDER),
    **dict.fromkeys(("video", "video_url"), VIDEO_PLACEHOLDER),
}


@dataclass(slots=True)
class Dialogue:
    """System text, turns, and the media that content lists name; None is one that has no name."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    images: list[str | None] = field(default_factory=list)
    videos: list[str | None] = field(default_factory=list)


def read_dialogue(messages: Any, name: str) -> Dialogue:
    """[system,] user, assistant, user, assistant, ... Raises SampleError: bad_roles, or bad_record
    where a message cannot be packed as it is."""
    if not isinstance(messages, list) or not messages:
        raise SampleError("bad_record", f"{name!r} is {kind_of(messages)}, not a list of messages")
    found = Dialogue()
    said = [one for message in messages for one in _messages(message, found)]
    if said[0][0] == "system":
        found.system = said.pop(0)[1]
    roles = [role for role, _ in said]
    if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
        raise SampleError("bad_roles", f"roles are {', '.join(roles[:8]) or 'system only'}")
    texts = [text for _, text in said]
    found.turns = [Turn(*turn) for turn in zip(texts[::2], texts[1::2], strict=True)]
    return found


def media_name(value: Any) -> Any:
    """The name of a medium, which may stand in an object: {"path": "a.jpg"} -> "a.jpg". Anything
    else is returned unchanged."""
    if not isinstance(value, Mapping):
        return value
    return next((value[name] for name in ("path", "url", "image_url") if value.get(name)), value)


def kind_of(value: Any) -> str:
    """'a list' of a list, for messages."""
    return "nothing" if value is None else f"a {type(value).__name__}"


def _messages(message: Any, found: Dialogue) -> Iterator[tuple[str, str]]:
    """Role and text of a message; of an object that holds a whole turn, two."""
    if not isinstance(message, dict):
        raise SampleError("bad_record", f"a message is {kind_of(message)}, not an object")
    lost = next((name for name in _UNPACKED if message.get(name)), None)
    if lost is not None:
        raise SampleError("bad_record", f"a message has {lost!r}, which is not packed")
    if "from" in message:
        role, content = message["from"], message.get("value")
        role = _ROLES.get(role, role) if isinstance(role, str) else role
    elif "role" not in message and "user" in message and "assistant" in message:
        yield "user", _text("user", message["user"], found)
        yield "assistant", _text("assistant", message["assistant"], found)
        return
    else:
        role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise SampleError("bad_record", f"the role of a message is {kind_of(role)}, not text")
    _check_loss(role, message)
    yield role, _text(role, content, found)


def _check_loss(role: str, message: Mapping[str, Any]) -> None:
    """Answers carry loss, and nothing else does: a message may say so, and nothing else."""
    weight = _first(message, _LOSS_FIELDS)
    if weight is not None and weight != (role == "assistant"):
        raise SampleError(
            "bad_record",
            f"a message of {role!r} has the loss weight {weight!r}; answers are packed with 1, all "
            "else with 0",
        )


def _text(role: str, content: Any, found: Dialogue) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise SampleError(
            "bad_record",
            f"the content of a message of {role!r} is {kind_of(content)}; it needs the text "
            "'content', or 'value' beside 'from'",
        )
    return "".join(_part(role, part, found) for part in content)


def _part(role: str, part: Any, found: Dialogue) -> str:
    """The text of one part of a content list; of a medium, what marks its place."""
    if not isinstance(part, dict):
        raise SampleError("bad_record", f"a part of a message is {kind_of(part)}, not an object")
    fields = [name for name, value in part.items() if value is not None]
    kind: Any = part.get("type") or (fields[0] if len(fields) == 1 else None)  # {"text": "..."}
    if kind == "text":
        text = _first(part, ("text", "value", "content"))
        if not isinstance(text, str):
            raise SampleError("bad_record", f"a text in a message is {kind_of(text)}")
        return text
    if kind not in _MEDIA_TYPES or role != "user":
        raise SampleError("bad_record", f"a part {kind!r} of {role!r}, which is not packed")
    placeholder = _MEDIA_TYPES[kind]
    name = media_name(_first(part, (kind, kind.removesuffix("_url"), "path", "url", "value")))
    if name is not None and not isinstance(name, str):
        raise SampleError("bad_record", f"a part {kind!r} names {kind_of(name)}, not a file")
    (found.images if placeholder == IMAGE_PLACEHOLDER else found.videos).append(name)
    return placeholder


def _first(part: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((part[name] for name in names if part.get(name) is not None), None)

"""A list of messages to turns, in the forms that datasets have it.

    {"role": "user", "content": str}, {"role": "assistant", "content": str}, ...
    {"from": "human", "value": str}, {"from": "gpt", "value": str}, ...   ShareGPT, LLaVA
    {"user": str, "assistant": str}, ...                            the_cauldron, FineVision
    {"human": str, "assistant": str}, ...                           ms-swift, in "conversation"

`content` may be a list of texts and media, in the order in which the model sees them:

    [{"type": "image", "image": "a.jpg"}, {"type": "text", "text": "What is it?"}]
    [{"type": "image_url", "image_url": {"url": "a.jpg"}}, ...]     also "video", "video_url"
    [{"type": "image"}, ...]                                        the record's next image

Under captioning, a message of an assistant alone is a document, which may hold media.

Calls of tools, their results, thoughts and weights in the loss are read in these forms; anything
else, such as audio, is refused, since the sample would be trained as another one:

    {"role": "assistant", "tool_calls": [{"function": {"name": str, "arguments": ...}}], ...}
    {"role": "assistant", "reasoning_content": str, "content": str}       also "reasoning"
    {"role": "tool", "content": str}
    {"from": "function_call", "value": '{"name": str, "arguments": ...}'}
    {"from": "observation", "value": str}
    {"role": "assistant", "content": str, "loss_weight": 0.5}   also "weight", "loss", "train"
    {"role": "assistant", "content": str, "truncated": true}    the last one: without an end token
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson

from task_encoders.samples import (
    IMAGE_PLACEHOLDER,
    ROLES,
    VIDEO_PLACEHOLDER,
    SampleError,
    Turn,
    is_weight,
)
from task_encoders.samples.limits import parse_json

#: Names that roles have in one form or another.
_ROLES: Final[Mapping[str, str]] = {
    "human": "user",
    "gpt": "assistant",
    **dict.fromkeys(("observation", "function", "function_response", "tool_response"), "tool"),
}
#: Messages of an assistant whose content is a call, or a list of them.
_CALL_ROLES: Final = ("function_call", "tool_call")
_THOUGHT_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
#: Fields that a message may hold besides its text, and that would be lost.
_UNPACKED: Final = ("image", "images", "video", "videos", "audio", "audios")
#: All that most messages hold: there is nothing else to look for in them.
_PLAIN: Final = frozenset(("role", "content", "from", "value"))
_QUESTIONS: Final = frozenset(("user", "tool"))
#: Names of the question in an object that holds a whole turn.
_ASKED: Final = frozenset(("user", "human"))
#: Names of a message's loss weight.
LOSS_FIELDS: Final = ("loss_weight", "weight", "loss", "loss_scale", "train")
#: Type of a part of a content list -> what marks its place.
_MEDIA_TYPES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("image", "image_url"), IMAGE_PLACEHOLDER),
    **dict.fromkeys(("video", "video_url"), VIDEO_PLACEHOLDER),
}


@dataclass(slots=True)
class Draft:
    """System text, turns, and the media that they name; None: it has no name. `is_document`: its
    only turn is a document."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    images: list[str | None] = field(default_factory=list)
    videos: list[str | None] = field(default_factory=list)
    #: parts of messages that name these, with the options of each
    parts: tuple[list[Any], list[Any]] = field(default_factory=lambda: ([], []))
    is_document: bool = False


class _Message(NamedTuple):
    """One message, under its role in ROLES or as "assistant"."""

    role: str
    text: str
    thought: str | None = None
    calls: tuple[str, ...] = ()
    weight: float = 1.0
    truncated: bool = False


def read_dialogue(content: Mapping[str, Any], names: Mapping[str, str | None], task: str) -> Draft:
    """Read messages in the order [system,] user, assistant, user, assistant, ...; results of tools
    count as user. Raises SampleError: bad_roles, or bad_record where a message cannot be packed as
    it is."""
    name = names["messages"]
    messages = content[name or ""]
    if not isinstance(messages, list) or not messages:
        raise SampleError("bad_record", f"{name!r} is {kind_of(messages)}, not a list of messages")
    found = Draft(is_document=task == "captioning" and len(messages) == 1)
    said: list[_Message] = []
    for message in messages:
        said += _messages(message, found)
    if any(one.calls for one in said):
        said = _joined(said)
    before: list[_Message] = []
    for i, one in enumerate(said):
        if one.role == "system" and i == 0:
            found.system = one.text
        elif one.role in ROLES:
            before.append(one)
        elif one.role == "assistant" and _may_answer([other.role for other in before]):
            *others, last = before
            pairs = tuple([(other.role, other.text) for other in others])
            found.turns.append(Turn(last.text, one.text, last.role, pairs, *one[2:]))
            before = []
        elif one.role == "assistant" and found.is_document and len(said) == 1:
            found.turns.append(Turn("", one.text, "user", (), *one[2:]))
        else:
            raise _bad_roles(said)
    if before or not found.turns:
        raise _bad_roles(said)
    return found


def _may_answer(asked: Sequence[str]) -> bool:
    """Tell whether an answer may follow these roles: one question, or results of tools."""
    return asked.count("user") <= 1 and not _QUESTIONS.isdisjoint(asked)


def _bad_roles(said: Sequence[_Message]) -> SampleError:
    roles = [one.role for one in said]
    unknown = next((role for role in roles if role not in (*ROLES, "assistant")), None)
    if roles == ["assistant"]:
        why = "an answer alone is a document: set source.task=captioning to pack it"
    elif unknown is None:
        why = "each answer must follow one question, the last message be an answer"
    else:
        names = ", ".join((*ROLES, "assistant", *_ROLES, *_CALL_ROLES))
        why = f"{unknown!r} is none of {names}"
    return SampleError("bad_roles", f"roles are {', '.join(roles[:8])}: {why}")


def read_tools(value: Any) -> str:
    """Return tools as the JSON of a list, "" if there are none; they may be given as JSON. A bare
    function is put into the object that chat templates expect. Raises SampleError: bad_record."""
    tools = parsed(value, "tools")
    if not tools:
        return ""
    tools = [parsed(tool, "a tool") for tool in tools] if isinstance(tools, list) else [tools]
    if not all(isinstance(tool, dict) for tool in tools):
        raise SampleError("bad_record", "'tools' is not a list of objects")
    return orjson.dumps(
        [{"type": "function", "function": tool} if "name" in tool else tool for tool in tools]
    ).decode()


def parsed(value: Any, what: str) -> Any:
    """Parse a text as JSON; return anything else as it is."""
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return parse_json(value.encode())
    except orjson.JSONDecodeError as error:
        raise SampleError("bad_record", f"{what} is no JSON: {error}") from error


def _joined(said: list[_Message]) -> list[_Message]:
    """Join messages that are only calls to the answer before them."""
    joined: list[_Message] = []
    calls: list[list[str]] = []
    for one in said:
        if joined and joined[-1].role == one.role == "assistant" and one.calls and not one.text:
            weights = {joined[-1].weight, one.weight}
            if len(weights) > 1 and 0 not in weights:
                raise SampleError(
                    "bad_record", f"an answer and its calls have the loss weights {weights}"
                )
            joined[-1] = joined[-1]._replace(weight=min(weights))
            calls[-1] += one.calls
        else:
            joined.append(one)
            calls.append([*one.calls])
    return [one._replace(calls=tuple(own)) for one, own in zip(joined, calls, strict=True)]


def media_name(value: Any) -> Any:
    """Return the name in an object, {"path": "a.jpg"} -> "a.jpg"; anything else unchanged."""
    if isinstance(value, str) or not isinstance(value, Mapping):
        return value
    return next((value[name] for name in ("path", "url", "image_url") if value.get(name)), value)


def kind_of(value: Any) -> str:
    """Name the type of a value for a message: 'a list', or 'nothing'."""
    return "nothing" if value is None else f"a {type(value).__name__}"


def _messages(message: Any, found: Draft) -> list[_Message]:
    """Read an entry of the list of messages: two if the object holds a whole turn."""
    if not isinstance(message, dict):
        raise SampleError("bad_record", f"a message is {kind_of(message)}, not an object")
    is_plain = message.keys() <= _PLAIN
    lost = None if is_plain else next((name for name in _UNPACKED if message.get(name)), None)
    if lost is not None:
        raise SampleError("bad_record", f"a message has {lost!r}, which is not packed")
    if "from" in message:
        role, content = message["from"], message.get("value")
    elif "role" not in message and "assistant" in message and not _ASKED.isdisjoint(message):
        asked = "user" if "user" in message else "human"
        said = (("user", message[asked]), ("assistant", message["assistant"]))
        return [_Message(role, _text(role, text, found)) for role, text in said]
    else:
        role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise SampleError("bad_record", f"the role of a message is {kind_of(role)}, not text")
    role = _ROLES.get(role, role)
    if is_plain and role not in _CALL_ROLES:
        return [_Message(role, _text(role, content, found))]
    calls = message.get("tool_calls") or message.get("function_call") or ()
    if role in _CALL_ROLES:
        role, content, calls = "assistant", "", content
    thought = _first(message, _THOUGHT_FIELDS)
    if not isinstance(thought, str | None):
        raise SampleError("bad_record", f"the thought of a message is {kind_of(thought)}, not text")
    if (calls or thought) and role != "assistant":
        raise SampleError("bad_record", f"a message of {role!r} has a call of a tool or a thought")
    text = "" if content is None and calls else _text(role, content, found)
    weight, truncated = _loss_weight(role, message), message.get("truncated") is True
    return [_Message(role, text, thought or None, _calls(calls), weight, truncated)]


def _calls(value: Any) -> tuple[str, ...]:
    """Return calls as JSON, from a list, an object, or the JSON of either; see `Turn.calls`."""
    calls = parsed(value, "a call")
    found = []
    for call in calls if isinstance(calls, list | tuple) else [calls] if calls else []:
        call = parsed(call, "a call")
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise SampleError("bad_record", f"a call of a tool names no function: {call!r}"[:200])
        arguments = function.get("arguments", function.get("parameters"))
        arguments = {} if arguments is None else arguments
        found.append(orjson.dumps({"name": function["name"], "arguments": arguments}).decode())
    return tuple(found)


def _loss_weight(role: str, message: Mapping[str, Any]) -> float:
    """Return the weight of an answer's tokens, 1 if the message names none. Raises SampleError for
    a weight of any other message."""
    weight = _first(message, LOSS_FIELDS)
    if weight is None:
        return 1.0
    if not is_weight(weight) or (weight and role != "assistant"):
        raise SampleError(
            "bad_record",
            f"a message of {role!r} has the loss weight {weight!r}; those of answers are 0 or from "
            "1e-6 to 1e6, all others 0",
        )
    return float(weight)


def _text(role: str, content: Any, found: Draft) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, int | float) and role == "assistant":
        return orjson.dumps(content).decode()  # a number, true or false; lost_fields.py reports it
    if not isinstance(content, list):
        raise SampleError(
            "bad_record",
            f"the content of a message of {role!r} is {kind_of(content)}; it needs the text "
            "'content', or 'value' next to 'from'",
        )
    return "".join(_part(role, part, found) for part in content)


def _part(role: str, part: Any, found: Draft) -> str:
    """Return the text of a part of a content list; note a medium's name, return its placeholder."""
    if not isinstance(part, dict):
        raise SampleError("bad_record", f"a part of a message is {kind_of(part)}, not an object")
    fields = [name for name, value in part.items() if value is not None]
    kind: Any = part.get("type") or (fields[0] if len(fields) == 1 else None)  # {"text": "..."}
    if kind == "text":
        text = _first(part, ("text", "value", "content"))
        if not isinstance(text, str):
            raise SampleError("bad_record", f"a text in a message is {kind_of(text)}")
        return text
    placeholder = _MEDIA_TYPES.get(str(kind))  # it may be a list
    if placeholder is None or not (role in ("user", "tool") or found.is_document):
        raise SampleError("bad_record", f"a part {kind!r} of {role!r}, which is not packed"[:200])
    name = media_name(_first(part, (kind, kind.removesuffix("_url"), "path", "url", "value")))
    is_image = placeholder == IMAGE_PLACEHOLDER
    (found.images if is_image else found.videos).append(name)
    found.parts[0 if is_image else 1].append(part)
    return placeholder


def first_field(content: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the first of some fields that a record or a message has."""
    for name in names:
        if content.get(name) is not None:
            return name
    return None


def _first(part: Mapping[str, Any], names: Sequence[str]) -> Any:
    name = first_field(part, names)
    return None if name is None else part[name]

"""A chat template in Jinja, cut into pieces: what it writes, and the places of a sample's texts.

A template is rendered once for each *shape* of conversation, with marks in place of texts, and
what it wrote is cut at the marks and at control tokens. Every sample of that shape is then
assembled from the cut parts and its own texts:

    user, assistant  ->  <|im_start|>user\\n⟨0⟩<|im_end|>\\n<|im_start|>assistant\\n⟨1⟩<|im_end|>\\n

A text becomes one mark, except for what the template could look at: white space at its ends if the
template trims texts, and words such as `</think>` if it searches for them. These stay in the shape,
as do tools and calls, which templates write as JSON or in a form of their own. So texts are never
searched for control tokens, and templates decide as they would with the real texts;
`template_proof` checks that against transformers.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from task_encoders.samples import SampleError, SourceSample
from task_encoders.text.jinja_template import JinjaTemplate
from task_encoders.text.pieces import (
    Answer,
    Control,
    Fixed,
    Image,
    Piece,
    Text,
    Video,
    media_in_front,
    number_media,
    split_at_media,
)

#: Spelling of control tokens in ChatML vocabularies.
_CONTROL: Final = re.compile(r"(<\|\w+\|>)")
_START: Final = "<|im_start|>"
_END: Final = "<|im_end|>"
#: Text before an answer, after the start token.
_HEADER: Final = "assistant\n"

# Noncharacters, which texts do not contain: around a text's number, and for '<' in tools and calls.
_MARK: Final = "\ufdd0"
_MARK_END: Final = "\ufdd1"
_LESS: Final = "\ufdd2"
_NUMBERED: Final = re.compile(f"{_MARK}(\\d+){_MARK_END}")
_RESERVED: Final = re.compile(f"[{_MARK}{_MARK_END}{_LESS}]")

#: Number of shapes that are kept; those with tools contain them in full.
_MAX_SHAPES: Final = 1024

#: A text in which marks replace what no template looks at.
_Skeleton = str
#: A conversation: tools, then each message as (role, skeleton), or a prompt with its answer as
#: (role, skeleton, skeleton, skeleton of the thought, calls).
_Shape = tuple[Any, ...]
_Slot = str | list[str | Image | Video]


class _Words(NamedTuple):
    """Words between control tokens: the first ones, then texts by number, each with the words that
    follow it. `turn`: the one whose answer they are part of."""

    begin: str
    texts: tuple[tuple[int, str], ...]
    header: str = ""
    turn: int = -1


class _AnswerControl(NamedTuple):
    """A control token in an answer, or at its end."""

    token: str
    turn: int


_Part = Control | Text | Fixed | _Words | _AnswerControl


class ChatTemplate:
    """Pieces of conversations, as a chat template writes them."""

    def __init__(self, jinja: JinjaTemplate) -> None:
        self.jinja = jinja
        words = "|".join(map(re.escape, self.jinja.words))
        self._words = re.compile(f"({words})") if words else None
        looks = bool(words) or self.jinja.trims
        self._skeleton = self._looked_at if looks else _one_mark
        self._shapes: dict[_Shape, tuple[_Part, ...]] = {}

    def pieces(self, sample: SourceSample, weights: Sequence[float]) -> list[Piece]:
        """The pieces of a checked conversation, without what follows the very last end token.

        Args:
            weights: each turn's, of its answer in the loss.

        Raises:
            SampleError: the template does not write all of the sample.
        """
        shape, slots = self._shape(sample)
        parts = self._shapes.get(shape)
        if parts is None:
            parts = self._cut(shape)
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = parts
        pieces: list[Piece] = []
        for part in parts:
            if isinstance(part, _Words):
                _fill(part, slots, weights, pieces)
            elif isinstance(part, _AnswerControl):
                pieces.append(Control(part.token, weights[part.turn]))
            else:
                pieces.append(part)
        return pieces

    def _shape(self, sample: SourceSample) -> tuple[_Shape, list[_Slot]]:
        """The shape of a conversation, and the texts in it."""
        slots: list[_Slot] = []
        shape: list[Any] = [sample.tools]
        skeleton = self._skeleton
        media = bool(sample.images or sample.videos)
        front, counts = media_in_front(sample) if media else "", Counter[str]()
        if sample.system is not None:
            shape.append(("system", skeleton(sample.system, slots)))
        for turn in sample.turns:
            begin = len(slots)
            for role, text in turn.before:
                shape.append((role, skeleton(text, slots)))
            prompt = skeleton(front + turn.prompt, slots)
            front = ""
            if media:
                parted = [split_at_media(sample, str(slot)) for slot in slots[begin:]]
                for one in parted if self.jinja.options.get("add_vision_id") else ():
                    number_media(one, counts)
                slots[begin:] = parted
            answer = skeleton(turn.answer, slots)
            thought = None if turn.thought is None else skeleton(turn.thought, slots)
            shape.append((turn.role, prompt, answer, thought, turn.calls))
        return tuple(shape), slots

    def _looked_at(self, text: str, slots: list[_Slot]) -> _Skeleton:
        """The skeleton of a text that the template looks at; see `_one_mark`."""
        skeleton = ""
        for i, part in enumerate(self._words.split(text) if self._words else (text,)):
            core = part.strip()
            if i % 2 or not core:
                skeleton += part
                continue
            begin = part.index(core)
            skeleton += part[:begin] + _MARK + part[begin + len(core) :]
            slots.append(core)
        return skeleton

    def _cut(self, shape: _Shape) -> tuple[_Part, ...]:
        """Cut the text of the template for a shape. Raises SampleError."""
        tools, messages, needed = self._messages(shape)
        written = self.jinja.render(messages, tools)
        missing = needed.difference(map(int, _NUMBERED.findall(written)))
        if missing:
            roles = ", ".join(message["role"] for message in messages)
            raise SampleError(
                "not_in_template", f"the chat template leaves out a message; roles: {roles}"[:200]
            )
        parts: list[_Part] = []
        turn, answering = -1, False
        for i, text in enumerate(_CONTROL.split(written)):
            if i % 2:
                parts.append(_AnswerControl(text, turn) if answering else Control(text))
                answering = answering and text != _END
            elif text.startswith(_HEADER) and parts and parts[-1] == Control(_START):
                turn, answering = turn + 1, True
                parts.append(_Words(*_numbers(text[len(_HEADER) :]), _HEADER, turn))
            elif answering and text:
                parts.append(_Words(*_numbers(text), "", turn))
            elif text:
                words = _Words(*_numbers(text))
                parts.append(words if words.texts else Text(words.begin))
        if parts and isinstance(parts[-1], Text) and not parts[-1].text.strip():
            parts.pop()
        if turn + 1 != sum(message["role"] == "assistant" for message in messages) or answering:
            raise SampleError(
                "not_in_template", f"the chat template begins answers without {_START}{_HEADER!r}"
            )
        # Parts that no sample changes are one wherever they follow each other.
        runs = itertools.groupby(parts, lambda part: isinstance(part, Control | Text))
        joined = [[Fixed(tuple(run))] if is_fixed else list(run) for is_fixed, run in runs]  # type: ignore
        return tuple(itertools.chain(*joined))

    def _messages(self, shape: _Shape) -> tuple[Any, list[dict[str, Any]], set[int]]:
        """Tools and messages as a template takes them, with numbered marks, and the numbers of the
        texts that it must write: all but thoughts, which it may show in only some answers."""
        tools = _protected(_parsed(shape[0], list)) if shape[0] else None
        if tools and not self.jinja.writes_tools:
            raise SampleError("not_in_template", "the chat template writes no tools")
        messages: list[dict[str, Any]] = []
        needed: set[int] = set()
        count = 0

        def number(skeleton: _Skeleton) -> str:
            nonlocal count
            first, *rest = skeleton.split(_MARK)
            for part in rest:
                first += f"{_MARK}{count}{_MARK_END}{part}"
                count += 1
            return first

        for role, said, *answered in shape[1:]:
            begin = count
            messages.append({"role": role, "content": number(said)})
            needed.update(range(begin, count))
            if not answered:
                continue
            begin, (answer, thought, calls) = count, answered
            messages.append({"role": "assistant", "content": number(answer)})
            if self._words is None or not self._words.search(answer):
                needed.update(range(begin, count))
            if thought is not None:
                if not self.jinja.writes_thoughts:
                    raise SampleError("not_in_template", "the chat template writes no thoughts")
                numbered = number(thought)
                messages[-1] |= {"reasoning_content": numbered, "thinking": numbered}
            if calls:
                messages[-1]["tool_calls"] = [self._call(call) for call in calls]
        return tools, messages, needed

    def _call(self, call: str) -> dict[str, Any]:
        if not self.jinja.writes_calls:
            raise SampleError("not_in_template", "the chat template writes no tool calls")
        function = _parsed(call, dict)
        if not self.jinja.takes_argument_text and isinstance(function.get("arguments"), str):
            function["arguments"] = _parsed(function["arguments"], dict)
        return {"type": "function", "function": _protected(function)}


def _parsed(text: str, kind: type) -> Any:
    """The list or object that a JSON text holds. Raises SampleError if it holds none."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SampleError("bad_record", f"tools or calls: {error}") from error
    if not isinstance(value, kind):
        raise SampleError("bad_record", f"tools or calls: not a {kind.__name__}: {text[:100]!r}")
    return value


def _protected(value: Any) -> Any:
    """The value, with nothing in its texts that could be taken for a control token or a mark."""
    text = json.dumps(value, ensure_ascii=False)
    if _RESERVED.search(text):
        raise SampleError("bad_record", "tools or calls contain noncharacters")
    return json.loads(text.replace("<", _LESS))


def _one_mark(text: str, slots: list[_Slot]) -> _Skeleton:
    """A text's skeleton; adds the texts that its marks replace to `slots`."""
    if not text:
        return ""
    slots.append(text)
    return _MARK


def _fill(
    words: _Words, slots: Sequence[_Slot], weights: Sequence[float], pieces: list[Piece]
) -> None:
    """Add words to `pieces`, with the texts in their places; media split them."""
    text = words.begin
    for number, after in words.texts:
        found = slots[number]
        if isinstance(found, str):
            text += found + after
            continue
        for piece in found:
            if isinstance(piece, str):
                text += piece
                continue
            if text:
                pieces.append(Text(text))
            text = ""
            pieces.append(piece)
        text += after
    if words.turn >= 0 and weights[words.turn]:
        pieces.append(Answer(words.header, text, weights[words.turn]))
    elif text or words.header:
        pieces.append(Text(words.header + text))


def _numbers(text: str) -> tuple[str, tuple[tuple[int, str], ...]]:
    """'a⟨3⟩b⟨4⟩' -> 'a', ((3, 'b'), (4, ''))"""
    begin, *rest = _NUMBERED.split(text.replace(_LESS, "<"))
    return begin, tuple(zip(map(int, rest[::2]), rest[1::2], strict=True))

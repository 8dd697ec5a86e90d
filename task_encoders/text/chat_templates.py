"""A chat template in Jinja, cut into pieces: what it writes, and the places of a sample's texts.

A template is rendered once for each *shape* of conversation, with marks in place of texts, and
what it wrote is cut at the marks, at media and at control tokens. Every sample of that shape is
then assembled from the cut parts and its own texts:

    user, assistant  ->  <|im_start|>user\\n⟨0⟩<|im_end|>\\n<|im_start|>assistant\\n⟨1⟩<|im_end|>\\n

A text becomes one mark, except for what the template could look at: white space at its ends if the
template trims texts, and words such as `</think>` if it searches for them. These stay in the shape,
as do the places of media, and tools and calls, which templates write as JSON or in a form of their
own. So texts are never searched for control tokens, and templates decide as they would with the
real texts; `template_proof` checks that against transformers.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from task_encoders.samples import SampleError, SourceSample
from task_encoders.text.dialect import CHATML, Dialect, hide, show
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
    split_at_media,
)

# Noncharacters, which texts do not contain: around a text's number, and for media.
_MARK: Final = "\ufdd0"
_MARK_END: Final = "\ufdd1"
_MEDIA: Final[Mapping[type, str]] = {Image: "\ufdd4", Video: "\ufdd5"}
_KINDS: Final = {mark: kind.__name__.lower() for kind, mark in _MEDIA.items()}
_NUMBERED: Final = re.compile(f"{_MARK}(\\d+){_MARK_END}")
_AT_MEDIA: Final = re.compile("([\ufdd4\ufdd5])")

#: Number of shapes that are kept; those with tools contain them in full.
_MAX_SHAPES: Final = 1024

#: A text in which marks replace what no template looks at.
_Skeleton = str
#: A conversation: tools, then each message as (role, skeleton), or a prompt with its answer as
#: (role, skeleton, skeleton, skeleton of the thought, calls).
_Shape = tuple[Any, ...]


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


_Part = Control | Text | Fixed | Image | Video | _Words | _AnswerControl


class ChatTemplate:
    """Pieces of conversations, as a chat template writes them."""

    def __init__(self, jinja: JinjaTemplate, dialect: Dialect = CHATML) -> None:
        self.jinja, self.dialect = jinja, dialect
        # Control tokens among them are data in a text, and not what the template searches for.
        words = "|".join(
            re.escape(word) for word in jinja.words if not dialect.controls.fullmatch(word)
        )
        self._words = re.compile(f"({words})") if words else None
        looks = bool(words) or self.jinja.trims
        self._skeleton = self._looked_at if looks else _one_mark
        self._shapes: dict[_Shape, tuple[_Part, ...]] = {}

    def pieces(self, sample: SourceSample, weights: Sequence[float]) -> list[Piece]:
        """The pieces of a checked conversation, without white space after the very last answer.

        Args:
            weights: each turn's, of its answer in the loss.

        Raises:
            SampleError: the template does not write all of the sample.
        """
        shape, texts = self._shape(sample)
        parts = self._shapes.get(shape)
        if parts is None:
            parts = self._cut(shape)
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = parts
        pieces: list[Piece] = []
        for part in parts:
            if isinstance(part, _Words):
                _fill(part, texts, weights, pieces)
            elif isinstance(part, _AnswerControl):
                pieces.append(Control(part.token, weights[part.turn]))
            else:
                pieces.append(part)
        return pieces

    def _shape(self, sample: SourceSample) -> tuple[_Shape, list[str]]:
        """The shape of a conversation, and the texts in it."""
        texts: list[str] = []
        shape: list[Any] = [sample.tools]
        skeleton = self._skeleton

        def with_media(text: str) -> _Skeleton:
            return "".join(
                skeleton(part, texts) if isinstance(part, str) else _MEDIA[type(part)]
                for part in split_at_media(sample, text)
            )

        asked = with_media if sample.media else partial(skeleton, texts=texts)
        front = media_in_front(sample)
        if sample.system is not None:
            shape.append(("system", skeleton(sample.system, texts)))
        for turn in sample.turns:
            for role, text in turn.before:
                shape.append((role, asked(text)))
            prompt = asked(front + turn.prompt)
            front = ""
            answer = skeleton(turn.answer, texts)
            thought = None if turn.thought is None else skeleton(turn.thought, texts)
            shape.append((turn.role, prompt, answer, thought, turn.calls))
        return tuple(shape), texts

    def _looked_at(self, text: str, texts: list[str]) -> _Skeleton:
        """The skeleton of a text that the template looks at; see `_one_mark`."""
        skeleton = ""
        for i, part in enumerate(self._words.split(text) if self._words else (text,)):
            core = part.strip()
            if i % 2 or not core:
                skeleton += part
                continue
            begin = part.index(core)
            skeleton += part[:begin] + _MARK + part[begin + len(core) :]
            texts.append(core)
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
        written = written.rstrip() + self.dialect.endings["tool_calls" in messages[-1]]
        parts: list[_Part] = []
        start = turn = 0
        for turn, found in enumerate(self.dialect.answers.finditer(written), 1):
            parts += self._parts(written[start : found.start(1)])
            header = ""
            if parts and isinstance(parts[-1], Text):
                header = parts[-1].text
                del parts[-1]
            parts += self._parts(found[1], header, turn - 1)
            start = found.end(1)
        parts += self._parts(written[start:])
        num_answers = sum(message["role"] == "assistant" for message in messages)
        if turn != num_answers:
            raise SampleError(
                "not_in_template",
                f"the chat template writes {turn} of {num_answers} answers as its family's does",
            )
        asked = [message["content"] for message in messages]
        kinds = [part["type"] for one in asked if not isinstance(one, str) for part in one]
        for kind in _MEDIA:
            if kinds.count(kind.__name__.lower()) != sum(type(part) is kind for part in parts):
                raise SampleError("not_in_template", "the chat template leaves out a medium")
        # Parts that no sample changes are one wherever they follow each other.
        runs = itertools.groupby(parts, lambda part: isinstance(part, Control | Text))
        joined = [[Fixed(tuple(run))] if is_fixed else list(run) for is_fixed, run in runs]  # type: ignore
        return tuple(itertools.chain(*joined))

    def _parts(self, written: str, header: str = "", turn: int = -1) -> Iterator[_Part]:
        """The parts of what a template wrote, of a turn's answer with its header or outside all."""
        for i, text in enumerate(self.dialect.cut(written)):
            if i % 2:
                medium = self.dialect.media.get(text)
                control = Control(text) if turn < 0 else _AnswerControl(text, turn)
                yield control if medium is None else medium
                continue
            words = _Words(*_numbers(text), header if i == 0 else "", turn)
            if words.texts or (turn >= 0 and (text or words.header)):
                yield words
            elif text:
                yield Text(words.begin)

    def _messages(self, shape: _Shape) -> tuple[Any, list[dict[str, Any]], set[int]]:
        """Tools and messages as a template takes them, with numbered marks, and the numbers of the
        texts that it must write: all but thoughts, which it may show in only some answers."""
        tools = hide(_parsed(shape[0], list)) if shape[0] else None
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
            messages.append({"role": role, "content": _contents(number(said))})
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
        return {"type": "function", "function": hide(function)}


def _parsed(text: str, kind: type) -> Any:
    """The list or object that a JSON text holds. Raises SampleError if it holds none."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SampleError("bad_record", f"tools or calls: {error}") from error
    if not isinstance(value, kind):
        raise SampleError("bad_record", f"tools or calls: not a {kind.__name__}: {text[:100]!r}")
    return value


def _one_mark(text: str, texts: list[str]) -> _Skeleton:
    """A text's skeleton; adds the texts that its marks replace to `texts`."""
    if not text:
        return ""
    texts.append(text)
    return _MARK


def _contents(skeleton: _Skeleton) -> str | list[dict[str, str]]:
    """A message's text; or its parts, where there are media."""
    parts = _AT_MEDIA.split(skeleton)
    if len(parts) == 1:
        return skeleton
    return [
        {"type": _KINDS[part]} if part in _KINDS else {"type": "text", "text": part}
        for part in parts
        if part
    ]


def _fill(
    words: _Words, texts: Sequence[str], weights: Sequence[float], pieces: list[Piece]
) -> None:
    """Add words to `pieces`, with the texts in their places."""
    text = words.begin + "".join(texts[number] + after for number, after in words.texts)
    if words.turn >= 0 and weights[words.turn]:
        pieces.append(Answer(words.header, text, weights[words.turn]))
    else:
        pieces.append(Text(words.header + text))


def _numbers(text: str) -> tuple[str, tuple[tuple[int, str], ...]]:
    """'a⟨3⟩b⟨4⟩' -> 'a', ((3, 'b'), (4, ''))"""
    begin, *rest = _NUMBERED.split(show(text))
    return begin, tuple(zip(map(int, rest[::2]), rest[1::2], strict=True))

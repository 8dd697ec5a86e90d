"""Pieces, which a sample is rendered to so that control tokens, text and answers stay apart, and
how chat templates spell them.

Rendering to one string and tokenizing that would turn `<|im_end|>` inside a user's text into a
control token, and would lose where the answers are.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from task_encoders.samples import (
    IMAGE_PLACEHOLDER,
    MEDIA_KINDS,
    SampleError,
    SourceSample,
    media_in_front,
    place_media,
    split_at_media,
)


class Control(NamedTuple):
    """A control token. One that ends an answer has the answer's weight in the loss."""

    token: str
    weight: float = 0.0


class Text(NamedTuple):
    """Text that carries no loss."""

    text: str


class Fixed(NamedTuple):
    """Text of a template around a sample's texts, the same in many samples."""

    pieces: tuple[Control | Text, ...]


class Answer(NamedTuple):
    """Text that carries loss, after a header that does not. Both are tokenized together: the
    header's newline merges with newlines at the start of an answer."""

    header: str
    text: str
    weight: float = 1.0


class Image(NamedTuple):
    """The place of the next image."""


class Video(NamedTuple):
    """The place of the next video."""


Piece = Control | Text | Fixed | Answer | Image | Video


def caption_pieces(sample: SourceSample, end: str = "", *, after_media: bool) -> Iterator[Piece]:
    """Yield the text and media of a caption in order, and `end` after its text, without a template.
    With `after_media`, text in front of the first medium carries no loss."""
    is_trained = not (after_media and sample.media)
    text = media_in_front(sample) + sample.turns[0].answer + end
    for i, part in enumerate(split_at_media(sample, text)):
        if i % 2:
            is_trained = True
            yield Image() if part == IMAGE_PLACEHOLDER else Video()
        elif part:
            yield Answer("", part) if is_trained else Text(part)


def without_end(pieces: Iterable[Piece]) -> list[Piece]:
    """Drop the pieces after the last answer. It is truncated, so that no end token may follow."""
    found = list(pieces)
    last = max(i for i, piece in enumerate(found) if isinstance(piece, Answer))
    return found[: last + 1]


#: An empty thought, with GLM's line break before it.
_EMPTY_THOUGHT: Final = re.compile(r"\s*<think>\s*</think>\s*")


def without_empty_thought(piece: Piece) -> Piece:
    """Move an empty thought at the beginning of an answer into its header, out of the loss."""
    found = _EMPTY_THOUGHT.match(piece.text) if isinstance(piece, Answer) else None
    if not isinstance(piece, Answer) or found is None:
        return piece
    return piece._replace(header=piece.header + found[0], text=piece.text[found.end() :])


def to_messages(sample: SourceSample) -> list[dict[str, Any]]:
    """Return a conversation as chat messages, with placeholders in the texts."""
    messages: list[dict[str, Any]] = []
    if sample.system is not None:
        messages.append({"role": "system", "content": sample.system})
    for turn in sample.turns:
        messages += [{"role": role, "content": text} for role, text in turn.before]
        messages.append({"role": turn.role, "content": turn.prompt})
        messages.append({"role": "assistant", "content": turn.answer})
        if turn.thought is not None:
            messages[-1]["reasoning_content"] = turn.thought
        if turn.calls:
            called = [{"type": "function", "function": json.loads(call)} for call in turn.calls]
            messages[-1]["tool_calls"] = called
        if turn.weight != 1:
            messages[-1]["loss_weight"] = turn.weight or 0
        if turn.truncated:
            messages[-1]["truncated"] = True
    return messages


def to_chat(sample: SourceSample) -> list[dict[str, Any]]:
    """Return chat messages as transformers takes them, with media as parts of contents."""
    messages = to_messages(replace(sample, turns=place_media(sample)))
    for message in messages if sample.media else ():
        if message["role"] in ("system", "assistant"):
            continue
        parts = split_at_media(sample, message["content"])
        if len(parts) > 1:
            message["content"] = [
                {"type": MEDIA_KINDS[part]} if i % 2 else {"type": "text", "text": part}
                for i, part in enumerate(parts)
                if part
            ]
    return messages


class Dialect:
    """How the templates of a vocabulary write control tokens, answers and media.

    Args:
        controls: a regular expression of control tokens.
        answers: one of answers; its only group is an answer's own part, with its end token.
        media: spelling of the place of an image and, where there are any, of a video.
        endings: text after the very last answer where templates leave it open, without calls and
            with calls.
    """

    def __init__(
        self,
        controls: str,
        answers: str,
        media: Mapping[str, Image | Video],
        endings: tuple[str, str] = ("", ""),
    ) -> None:
        self.controls: Final = re.compile(controls)
        self.answers: Final = re.compile(answers, re.DOTALL)
        self.media: Final = media
        self.endings: Final = endings
        spelled = "|".join(map(re.escape, sorted(media, key=len, reverse=True)))
        self.cut: Final = re.compile(f"({spelled}|{controls})").split

    def spell(self, piece: Piece) -> str:
        """Write a piece as templates do."""
        match piece:
            case Control(token=token):
                return token
            case Answer(header=header, text=text):
                return header + text
            case Text(text=text):
                return text
            case Fixed(pieces=pieces):
                return "".join(map(self.spell, pieces))
        return next(text for text, medium in self.media.items() if type(medium) is type(piece))


#: Qwen's vocabularies.
CHATML: Final = Dialect(
    r"<\|\w+\|>",
    r"<\|im_start\|>assistant\n((?:(?!<\|im_start\|>).)*?<\|im_end\|>)",
    {
        "<|vision_start|><|image_pad|><|vision_end|>": Image(),
        "<|vision_start|><|video_pad|><|vision_end|>": Video(),
    },
)

# Noncharacters (chat_templates uses others) that stand for the first characters of control tokens.
_HIDDEN: Final = str.maketrans("<[", "\ufdd2\ufdd3")
#: Undoes `hide` in what a template wrote.
SHOWN: Final = str.maketrans("\ufdd2\ufdd3", "<[")
_RESERVED: Final = re.compile("[\ufdd0-\ufdd5]")


def hide(value: Any) -> Any:
    """Hide the first characters of control tokens in the texts of tools or of a call; see `SHOWN`.

    Raises:
        SampleError: they contain noncharacters.
    """
    if isinstance(value, str):
        if _RESERVED.search(value):
            raise SampleError("bad_record", "tools or calls contain noncharacters")
        return value.translate(_HIDDEN)
    if isinstance(value, Mapping):
        return {hide(name): hide(one) for name, one in value.items()}
    return [hide(one) for one in value] if isinstance(value, list) else value

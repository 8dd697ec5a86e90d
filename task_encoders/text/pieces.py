"""Pieces, which a sample is rendered to so that control tokens, text and answers stay apart.

Rendering to one string and tokenizing that would turn `<|im_end|>` inside a user's text into a
control token, and would lose where the answers are.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from task_encoders.samples import MEDIA_KINDS, SourceSample, place_media, split_at_media


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


def caption_pieces(sample: SourceSample, end: Control) -> Iterator[Piece]:
    """Images, videos, caption, end token; no template."""
    yield from [Image()] * len(sample.images)
    yield from [Video()] * len(sample.videos)
    yield Answer("", sample.turns[0].answer)
    yield end


def without_end(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces up to the last answer, which goes on: its end token would be a lie."""
    found = list(pieces)
    last = max(i for i, piece in enumerate(found) if isinstance(piece, Answer))
    return found[: last + 1]


def to_messages(sample: SourceSample) -> list[dict[str, Any]]:
    """A conversation as chat messages, with placeholders in the texts."""
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
    """The same messages as transformers takes them, with media as parts of contents."""
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

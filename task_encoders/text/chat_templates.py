"""The chat template as a list of pieces, so that control tokens, text and answers stay apart.

Rendering to one string and tokenizing that would turn `<|im_end|>` inside a user's text into a
control token, and would lose where the answers are. `check_chat_template` proves that the pieces
spell what the checkpoint's own Jinja template writes.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from task_encoders.samples import (
    IMAGE_PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    SourceSample,
    Turn,
    count_placeholders,
)

#: Qwen2-VL's chat template, for processors that come without one.
QWEN2_VL_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

DEFAULT_SYSTEM: Final = "You are a helpful assistant."


class Control(NamedTuple):
    """A control token. `labelled`: it ends an answer, so the model learns to write it."""

    token: str
    labelled: bool = False


class Text(NamedTuple):
    """Text that carries no loss."""

    text: str


class Answer(NamedTuple):
    """Text that carries loss, behind a header that does not. Both are tokenized as one: the
    header's newline merges with newlines that begin an answer."""

    header: str
    text: str


class Image(NamedTuple):
    """The place of the next image."""


class Video(NamedTuple):
    """The place of the next video."""


Piece = Control | Text | Answer | Image | Video

#: A prompt is cut at both placeholders where the sample has videos.
_MEDIA: Final[Mapping[str, Image | Video]] = {
    IMAGE_PLACEHOLDER: Image(),
    VIDEO_PLACEHOLDER: Video(),
}
_PLACEHOLDERS: Final = re.compile(f"({'|'.join(map(re.escape, _MEDIA))})")

_START, _END = Control("<|im_start|>"), Control("<|im_end|>")
_ANSWER_END = Control("<|im_end|>", labelled=True)


def caption_pieces(sample: SourceSample, end: Control) -> Iterator[Piece]:
    """Images, videos, caption, end token; no template."""
    yield from [Image()] * len(sample.images)
    yield from [Video()] * len(sample.videos)
    yield Answer("", sample.turns[0].answer)
    yield end


def render(sample: SourceSample, default_system: str | None = DEFAULT_SYSTEM) -> Iterator[Piece]:
    """The pieces of a checked sample (`samples.check_sample`).

    Conversations: ChatML with the default system message, if any, where the sample has none, and
    without the newline behind the very last end token.
    """
    if sample.task == "captioning":
        return caption_pieces(sample, _ANSWER_END)
    system = sample.system if sample.system is not None else default_system
    return conversation_pieces(sample, place_media(sample), system)


def conversation_pieces(
    sample: SourceSample, turns: Sequence[Turn], system: str | None
) -> Iterator[Piece]:
    """ChatML of turns in which every medium has its placeholder."""
    if system is not None:
        yield from _message("system", system)
    for i, turn in enumerate(turns):
        yield _START
        # '<image>\nWhat?' -> 'user\n', image, '\nWhat?'
        first, *parts = _split_at_media(sample, turn.prompt)
        yield Text(f"user\n{first}")
        for part in parts:
            if not isinstance(part, str):
                yield part
            elif part:
                yield Text(part)
        yield _END
        yield Text("\n")
        yield _START
        yield Answer("assistant\n", turn.answer)
        yield _ANSWER_END
        if i + 1 < len(turns):
            yield Text("\n")


def _message(role: str, content: str) -> Iterator[Piece]:
    yield _START
    yield Text(f"{role}\n{content}")
    yield _END
    yield Text("\n")


def place_media(sample: SourceSample) -> tuple[Turn, ...]:
    """The turns, with all images, and then all videos, in front where no prompt says where they
    belong."""
    front = ""
    for placeholder, names in (
        (IMAGE_PLACEHOLDER, sample.images),
        (VIDEO_PLACEHOLDER, sample.videos),
    ):
        if names and not count_placeholders(sample.turns, placeholder):
            front += placeholder * len(names)
    if not front:
        return sample.turns
    first, *rest = sample.turns
    return Turn(front + first.prompt, first.answer), *rest


def _split_at_media(sample: SourceSample, prompt: str) -> list[str | Image | Video]:
    """'a<image>b' -> ['a', Image(), 'b']; texts and media alternate, and a text comes first."""
    if not sample.videos:
        first, *rest = prompt.split(IMAGE_PLACEHOLDER)
        return [first, *(piece for text in rest for piece in (Image(), text))]
    return [_MEDIA.get(part, part) for part in _PLACEHOLDERS.split(prompt)]


def to_messages(sample: SourceSample) -> list[dict[str, Any]]:
    """A conversation as transformers' chat messages, with media as content parts."""
    messages: list[dict[str, Any]] = []
    if sample.system is not None:
        messages.append({"role": "system", "content": [{"type": "text", "text": sample.system}]})
    for turn in place_media(sample):
        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image" if isinstance(part, Image) else "video"}
            for part in _split_at_media(sample, turn.prompt)
            if part != ""
        ]
        messages.append({"role": "user", "content": content})
        answer = [{"type": "text", "text": turn.answer}]
        messages.append({"role": "assistant", "content": answer})
    return messages


def check_checkpoint(
    processor: str, render: Callable[[SourceSample], Iterator[Piece]], family: str
) -> None:
    """Refuse a checkpoint whose chat template is not its family's; see check_chat_template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(processor, trust_remote_code=False)
    if tokenizer.chat_template:
        check_chat_template(tokenizer, processor, render, family)


def check_chat_template(
    template_renderer: Any,
    name: str,
    render: Callable[[SourceSample], Iterator[Piece]],
    family: str,
) -> None:
    """Prove that a checkpoint's Jinja template writes what its family's `render` does.

    Args:
        template_renderer: a transformers processor or tokenizer with `apply_chat_template`.
        name: what to call it in the error.

    Raises:
        ValueError: it writes something else.
    """
    turns = (
        Turn("<image>\nWhat is <image> this?", "A cat.\n"),
        Turn(" And <video>?", "\n\nA dog."),
    )
    for system in (None, "Be brief."):
        sample = SourceSample("probe", "bmr", turns, ("a", "b"), system, ("c",))
        ours = "".join(_spell(piece) for piece in render(sample)) + "\n"
        theirs = template_renderer.apply_chat_template(to_messages(sample), tokenize=False)
        if ours != theirs:
            raise ValueError(
                f"the chat template of {name!r} is not that of {family}: for a probe dialogue it "
                f"writes {theirs!r}, expected {ours!r}; name a checkpoint of the configured family"
            )


def _spell(piece: Piece) -> str:
    match piece:
        case Control(token=token):
            return token
        case Answer(header=header, text=text):
            return header + text
        case Text(text=text):
            return text
        case Video():
            return "<|vision_start|><|video_pad|><|vision_end|>"
    return "<|vision_start|><|image_pad|><|vision_end|>"

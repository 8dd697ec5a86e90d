"""The chat template as a list of pieces, so that control tokens, text and answers stay apart.

Rendering to one string and tokenizing that would turn `<|im_end|>` inside a user's text into a
control token, and would lose where the answers are. `check_chat_template` proves that the pieces
spell what the checkpoint's own Jinja template writes.
"""

import re
from collections.abc import Iterator, Mapping
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


def render(sample: SourceSample) -> Iterator[Piece]:
    """The pieces of a checked sample (`samples.check_sample`).

    Captioning: images, videos, caption, end token; no template. Conversations: ChatML with the
    default system message where the sample has none, without the newline behind the very last end
    token.
    """
    if sample.task == "captioning":
        yield from [Image()] * len(sample.images)
        yield from [Video()] * len(sample.videos)
        yield Answer("", sample.turns[0].answer)
        yield _ANSWER_END
        return
    yield from _message("system", sample.system if sample.system is not None else DEFAULT_SYSTEM)
    for i, turn in enumerate(_place_media(sample)):
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
        if i + 1 < len(sample.turns):
            yield Text("\n")


def _message(role: str, content: str) -> Iterator[Piece]:
    yield _START
    yield Text(f"{role}\n{content}")
    yield _END
    yield Text("\n")


def _place_media(sample: SourceSample) -> tuple[Turn, ...]:
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
    for turn in _place_media(sample):
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


def check_chat_template(template_renderer: Any, name: str) -> None:
    """Prove that a checkpoint's Jinja template writes what `render` does.

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
                f"the chat template of {name!r} is not Qwen2-VL's: for a probe dialogue it writes "
                f"{theirs!r}, expected {ours!r}; name a checkpoint of the configured family"
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

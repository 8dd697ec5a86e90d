"""The chat template as a list of pieces, so that control tokens, text and answers stay apart.

Rendering to one string and tokenizing that would turn `<|im_end|>` inside a user's text into a
control token, and would lose where the answers are. `check_chat_template` proves that the pieces
spell what the checkpoint's own Jinja template writes.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from task_encoders.samples import IMAGE_PLACEHOLDER, SourceSample, Turn

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


Piece = Control | Text | Answer | Image

_START, _END = Control("<|im_start|>"), Control("<|im_end|>")
_ANSWER_END = Control("<|im_end|>", labelled=True)


def render(sample: SourceSample) -> Iterator[Piece]:
    """The pieces of a checked sample (`samples.check_sample`).

    Captioning: images, caption, end token; no template. Conversations: ChatML with the default
    system message where the sample has none, without the newline behind the very last end token.
    """
    if sample.task == "captioning":
        yield from [Image()] * len(sample.images)
        yield Answer("", sample.turns[0].answer)
        yield _ANSWER_END
        return
    yield from _message("system", sample.system if sample.system is not None else DEFAULT_SYSTEM)
    for i, turn in enumerate(_place_images(sample)):
        yield from _message("user", turn.prompt)
        yield _START
        yield Answer("assistant\n", turn.answer)
        yield _ANSWER_END
        if i + 1 < len(sample.turns):
            yield Text("\n")


def _message(role: str, content: str) -> Iterator[Piece]:
    yield _START
    # '<image>\nWhat?' -> 'user\n', image, '\nWhat?'; a system message holds no images.
    parts = content.split(IMAGE_PLACEHOLDER) if role == "user" else [content]
    yield Text(f"{role}\n{parts[0]}")
    for part in parts[1:]:
        yield Image()
        if part:
            yield Text(part)
    yield _END
    yield Text("\n")


def _place_images(sample: SourceSample) -> tuple[Turn, ...]:
    """The turns, with all images in front where no prompt says where they belong."""
    if not sample.images or any(IMAGE_PLACEHOLDER in turn.prompt for turn in sample.turns):
        return sample.turns
    first, *rest = sample.turns
    prompt = IMAGE_PLACEHOLDER * len(sample.images) + first.prompt
    return Turn(prompt, first.answer), *rest


def to_messages(sample: SourceSample) -> list[dict[str, Any]]:
    """A conversation as transformers' chat messages, with images as content parts."""
    messages: list[dict[str, Any]] = []
    if sample.system is not None:
        messages.append({"role": "system", "content": [{"type": "text", "text": sample.system}]})
    for turn in _place_images(sample):
        first, *parts = turn.prompt.split(IMAGE_PLACEHOLDER)
        content = [{"type": "text", "text": first}]
        for part in parts:
            content += [{"type": "image"}, {"type": "text", "text": part}]
        content = [part for part in content if part.get("text") != ""]
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
    turns = (Turn("<image>\nWhat is <image> this?", "A cat.\n"), Turn(" And?", "\n\nA dog."))
    for system in (None, "Be brief."):
        sample = SourceSample("probe", "bmr", turns, ("a", "b"), system)
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
    return "<|vision_start|><|image_pad|><|vision_end|>"

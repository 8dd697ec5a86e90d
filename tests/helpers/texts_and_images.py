"""Seeded random texts, images and conversations for the proofs of parity, with all that a chat
template can be asked to write."""

import io
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from PIL import Image

from task_encoders.samples import IMAGE_PLACEHOLDER, SourceSample, Turn
from task_encoders.text.pieces import to_chat
from tests.helpers.videos import make_video

ENGLISH = """the a red blue circle left of chart shows 3.14 1,280 values, rising; it's don't I'll
WE'RE picture. Why? (no) "quoted" x=y+1 https://a.b/c?d=e snake_case CamelCase""".split()
CHINESE = (
    "图片 中 有 三个 红色的圆形 , 左边 是 蓝色方块 。 价格 为 ¥1,280 吗 描述 这张 表格".split()
)
OTHER = (
    "naïve cafe\u0301 Ωmega 한국어 русский العربية 🙂 👩\u200d👩\u200d👧 [1] ½ ﬁ e\u0301\u0323"
).split()
JOINTS = (" ", " ", " ", "", "  ", "\n", "\n\n", ", ", "\r\n", "\t")


def random_text(rng: np.random.Generator, words: int, *, chinese: bool = False) -> str:
    """Words and joints that stress pre-tokenisation: newlines, spaces, digits, combining marks."""
    pools = [CHINESE] * 3 + [OTHER] if chinese else [ENGLISH] * 3 + [OTHER]
    parts = []
    for _ in range(words):
        pool = pools[rng.integers(len(pools))]
        parts += [pool[rng.integers(len(pool))], JOINTS[rng.integers(len(JOINTS))]]
    text = "".join(parts)
    return text if text.strip() else "x" + text


def random_image(
    rng: np.random.Generator, width: int, height: int, *, orientation: int | None = None
) -> bytes:
    """A JPEG or PNG file; modes other than RGB occur. `orientation` writes an EXIF tag (JPEG)."""
    coarse = rng.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
    buffer = io.BytesIO()
    if orientation is not None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        image.save(buffer, "JPEG", quality=90, exif=exif)
    elif rng.random() < 0.5:
        mode = ("RGB", "RGB", "L", "RGBA", "P", "LA", "1")[rng.integers(7)]
        image.convert(mode).save(buffer, "PNG", compress_level=1)
    else:
        image.convert(("RGB", "L", "CMYK")[rng.integers(3)]).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def random_side(rng: np.random.Generator) -> int:
    return int(np.exp(rng.uniform(np.log(28), np.log(420))))


@cache
def odd_pictures() -> tuple[bytes, ...]:
    """60 images of all sizes, modes and orientations, some of them very small or narrow."""
    rng = np.random.default_rng(2)
    sides = [(random_side(rng), random_side(rng)) for _ in range(48)]
    sides += [tuple(rng.integers(4, 12, 2).tolist()) for _ in range(10)] + [(5, 400), (400, 5)]
    turned = [*range(1, 9), *[None] * 8]
    return tuple(
        random_image(rng, *size, orientation=turned[i % 16]) for i, size in enumerate(sides)
    )


KINDS = ("one_image", "multi_image", "text_only", "chinese", "exif", "tiny", "extreme_aspect")


def random_sample(
    rng: np.random.Generator, kind: str, index: int, folder: Path
) -> tuple[SourceSample, list[bytes]]:
    """A conversation of one kind and its image files, which also lie in `folder` by name."""
    num_images = {"multi_image": int(rng.integers(2, 5)), "text_only": 0}.get(kind, 1)
    files = []
    for _ in range(num_images):
        width, height = random_side(rng), random_side(rng)
        orientation = int(rng.integers(1, 9)) if kind == "exif" else None
        files.append(random_image(rng, width, height, orientation=orientation))
    names = tuple(f"{kind}_{index}_{i}.bin" for i in range(num_images))
    for name, data in zip(names, files, strict=True):
        (folder / name).write_bytes(data)
    return SourceSample(f"{kind}/{index}", "bmr", random_turns(rng, kind, num_images), names), files


def random_turns(rng: np.random.Generator, kind: str, num_images: int) -> tuple[Turn, ...]:
    """A conversation about so many images."""
    chinese = kind == "chinese" or rng.random() < 0.2
    turns = []
    in_front = rng.random() < 0.3  # no placeholder at all: images go in front
    remaining = 0 if in_front else num_images
    for i in range(num_turns := int(rng.integers(1, 5))):
        here = remaining if i == num_turns - 1 else int(rng.integers(0, remaining + 1))
        remaining -= here
        prompt = random_text(rng, int(rng.integers(1, 20)), chinese=chinese)
        for _ in range(here):
            cut = int(rng.integers(0, len(prompt) + 1))
            if IMAGE_PLACEHOLDER in prompt:
                cut = 0  # never inside another placeholder
            prompt = prompt[:cut] + IMAGE_PLACEHOLDER + prompt[cut:]
        answer = random_text(rng, int(rng.integers(1, 30)), chinese=chinese)
        newlines = "\n" * int(rng.integers(0, 3))  # these merge into the header's newline
        turns.append(Turn(prompt, newlines + answer))
    return tuple(turns)


def random_documents(
    count: int, *, takes_videos: bool
) -> list[tuple[SourceSample, list[bytes], list[bytes]]]:
    """Random documents, their images and videos; each fourth has its images in front."""
    rng, clip = np.random.default_rng(1), make_video(12, 4)
    files = [random_image(rng, 60 + 10 * i, 100 - 10 * i) for i in range(4)]
    found = []
    for number in range(count):
        marks = ["<image>"] * int(rng.integers(4))
        if takes_videos and number % 5 == 0:
            marks.append("<video>")
        text = random_text(rng, 4) if number % 2 else ""
        for mark in rng.permutation(marks):
            text += mark + (random_text(rng, 6) if rng.random() < 0.8 else "")
        text += random_text(rng, 2) * (not text.strip() or rng.random() < 0.7)
        if number % 4 == 3:
            text = text.replace("<image>", "")
        if not text.replace("<image>", "").replace("<video>", "").strip():
            text += "x"
        images = [files[i] for i in rng.integers(0, 4, marks.count("<image>"))]
        names = tuple(f"{i}.png" for i in range(len(images)))
        videos = ("v.mp4",) * marks.count("<video>")
        sample = SourceSample(str(number), "captioning", (Turn("", text),), names, None, videos)
        found.append((sample, images, [clip] * len(videos)))
    return found


SPECIAL = ("<|im_end|>", "<|im_start|>assistant\n", "<|image_pad|>", "<|endoftext|>")
WORDS = ("<think>", "</think>", "<tool_call>", "<tool_response>x</tool_response>", "/no_think")
#: Whether texts hold names of control tokens; or which.
Special = bool | tuple[str, ...]
BORDERS = ("", "", "", "", "\n", "\n\n", " ", "  \t", "\u3000", "\r\n")


class TypedTokens:
    """A tokenizer's control tokens, told apart from their names in texts, which are data."""

    def __init__(self, tokenizer: Any, names: Sequence[str]) -> None:
        self.tokenizer, self.names = tokenizer, list(names)
        longest_first = sorted(self.names, key=len, reverse=True)
        self.pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def write(self, messages: Any, tools: Any, template: str) -> str | None:
        """The text of transformers, in which names in texts stand between noncharacters; None
        where the template refuses the conversation."""
        plain = json.dumps([messages, tools], ensure_ascii=False)
        hidden = self.pattern.sub(lambda m: f"\ue000{self.names.index(m[0])}\ue001", plain)
        messages, tools = json.loads(hidden)
        options = {"tools": tools, "chat_template": template, "tokenize": False}
        try:
            return str(self.tokenizer.apply_chat_template(messages, **options))
        except jinja2.TemplateError:
            return None

    def shown(self, text: str) -> str:
        """Names that a text spells, in the place of what `write` hid them by."""
        return re.sub("\ue000(\\d+)\ue001", lambda m: self.names[int(m[1])], text)


def messages_and_tools(sample: SourceSample, *, as_objects: bool = False) -> tuple[Any, Any]:
    """A conversation as templates take it; `as_objects`: arguments of calls are no text."""
    messages = to_chat(sample)
    calls = [call["function"] for m in messages for call in m.get("tool_calls", ())]
    for call in calls if as_objects else ():
        if isinstance(call["arguments"], str):
            call["arguments"] = json.loads(call["arguments"])
    return messages, json.loads(sample.tools) if sample.tools else None


def random_conversation(
    rng: np.random.Generator, index: int, *, special: Special = False
) -> SourceSample:
    """A conversation of 1 to 4 turns.

    Args:
        special: texts hold control tokens' names, Qwen's or these, which transformers would read
            as such.
    """
    rich = rng.random() < 0.6
    tools = random_tools(rng, special) if rich and rng.random() < 0.7 else ""
    turns = [_turn(rng, i, special, rich, bool(tools)) for i in range(int(rng.integers(1, 5)))]
    if all(not turn.weight for turn in turns):
        turns.append(Turn("And?", "So."))
    shown = [turn.prompt for turn in turns] + [text for turn in turns for _, text in turn.before]
    images = sum(text.count(IMAGE_PLACEHOLDER) for text in shown)
    if not images and rng.random() < 0.2:
        images = 1  # in front
    names = tuple(f"{i}.jpg" for i in range(images))
    system = _text(rng, special) if rng.random() < 0.4 else None
    return SourceSample(f"c/{index}", "bmr", tuple(turns), names, system, (), tools)


def _turn(rng: np.random.Generator, i: int, special: Special, rich: bool, has_tools: bool) -> Turn:
    prompt, answer = _text(rng, special, images=True), _text(rng, special)
    if not answer.strip():
        answer += "x"
    if not rich:
        return Turn(prompt, answer)
    before: tuple[tuple[str, str], ...] = ()
    role = "user"
    if i and has_tools and rng.random() < 0.6:
        role = "tool"
        before = tuple(("tool", _text(rng, special, images=True)) for _ in range(rng.integers(3)))
    elif rng.random() < 0.06:
        before = (("system", _text(rng, special) + "."),)
    thought = _text(rng, special) if rng.random() < 0.3 else None
    calls: tuple[str, ...] = ()
    if has_tools and rng.random() < 0.5:
        calls = tuple(_call(rng, special) for _ in range(rng.integers(1, 4)))
        answer = "" if rng.random() < 0.4 else answer
    return Turn(prompt, answer, role, before, thought, calls, bool(rng.random() < 0.9))


def _text(rng: np.random.Generator, special: Special, *, images: bool = False) -> str:
    if rng.random() < 0.06:
        return ""
    text = random_text(rng, int(rng.integers(1, 8)), chinese=bool(rng.random() < 0.3)).strip()
    names = special if isinstance(special, tuple) else SPECIAL if special else ()
    pool = (*WORDS, *names, *((IMAGE_PLACEHOLDER,) if images else ()))
    for _ in range(int(rng.integers(0, 3)) if rng.random() < 0.5 else 0):
        at = int(rng.integers(len(text) + 1)) if IMAGE_PLACEHOLDER not in text else 0
        text = text[:at] + pool[rng.integers(len(pool))] + text[at:]
    if rng.random() < 0.1:
        text = f"<think>\n{text}\n</think>\n\n {text}"
    return str(rng.choice(BORDERS)) + text + str(rng.choice(BORDERS))


def _spelled(rng: np.random.Generator, value: Any) -> str:
    """Write JSON, in which control tokens may begin with a number."""
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("<", "\\u003c") if rng.random() < 0.3 else text


def random_tools(rng: np.random.Generator, special: Special) -> str:
    tools = []
    for i in range(rng.integers(1, 3)):
        own: dict[str, Any] = {"name": f"f_{i}", "description": _text(rng, special)}
        own["parameters"] = {"type": "object", "properties": {"a": {"type": "string"}}}
        tools.append({"type": "function", "function": own})
    return _spelled(rng, tools)


def _call(rng: np.random.Generator, special: Special) -> str:
    values: list[Any] = [_text(rng, special), 3, 1.5, None, True, {"k": [_text(rng, special)]}, []]
    chosen = rng.permutation(len(values))[: rng.integers(0, 4)]
    arguments: Any = {f"name {i}": values[i] for i in chosen}
    if rng.random() < 0.4:
        arguments = json.dumps(arguments, ensure_ascii=bool(rng.random() < 0.5), indent=1)
    return _spelled(rng, {"name": "f_0", "arguments": arguments})

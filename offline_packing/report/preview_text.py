"""A pack for the terminal: a table of its sub-samples, and their text with trained parts marked."""

import re
import unicodedata
from collections.abc import Iterator
from typing import Final

import click

from offline_packing.report.preview import PackPreview
from offline_packing.report.spelled import Span

#: Everything that could move the cursor or change colours, but tab and newline.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_NEWLINE: Final = "⏎"
_BAR_WIDTH: Final = 60
_WORDS: Final = 28
_MOST_CHARACTERS: Final = 400


def render_pack(pack: PackPreview, *, full: bool = False) -> str:
    """Render one pack as text, with colours that click drops if there is no terminal. Unless
    `full`, only the beginning and the end of spans above `_MOST_CHARACTERS` are shown."""
    tokens = pack.cu_lengths[-1]
    loss = sum(sub.num_loss_tokens for sub in pack.sub_samples)
    head = (
        f"{pack.key}  {pack.shard} ({pack.split})  {tokens:,} of {pack.seq_length:,} tokens, "
        f"{pack.fill:.1%} full, {loss:,} with loss"
    )
    lines = [click.style(head, bold=True), _bar(pack), "", *_table(pack), ""]
    lines.append(f"cu_lengths {list(pack.cu_lengths)}")
    lines += [click.style(f"dropped: {safe(line)}", fg="red") for line in pack.dropped]
    for number, sub in enumerate(pack.sub_samples):
        title = f"#{number} {safe(sub.title)}  {sub.num_tokens:,} tokens"
        lines += ["", click.style(title, bold=True)]
        lines += [line for span in sub.spans for line in _span(span, full)]
    return "\n".join(lines) + "\n"


def safe(text: str) -> str:
    """Escape what could harm a terminal in a text of the dataset."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def first_words(text: str, length: int = _WORDS) -> str:
    """Return the beginning of a text on one line."""
    words = " ".join(text.split())
    return words if len(words) <= length else words[: length - 1] + "…"


def _column(text: str) -> str:
    """Pad or cut a text to the width of a column; a Chinese character is two places wide."""
    shown, room = "", _WORDS
    for character in first_words(safe(text), _WORDS):
        places = 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if places > room:
            break
        shown, room = shown + character, room - places
    return shown + " " * room


def _bar(pack: PackPreview) -> str:
    """Draw sub-samples in turn as full and as shaded blocks, and dots where the sequence is
    empty."""
    bar = ""
    for number, end in enumerate(pack.cu_lengths[1:]):
        width = max(1, round(end / pack.seq_length * _BAR_WIDTH)) - len(bar)
        bar += "█▒"[number % 2] * width
    return bar + "·" * (_BAR_WIDTH - len(bar))


def _table(pack: PackPreview) -> Iterator[str]:
    yield (
        f"{'#':>3} {'tokens':>7} {'loss':>7} {'turns':>5}  {'prompt':<{_WORDS}}  "
        f"{'answer':<{_WORDS}}  images and videos (pixels -> patches)"
    )
    for number, sub in enumerate(pack.sub_samples):
        turns = () if sub.num_branches else sub.sample.turns
        prompt = "↳ " * sub.is_branch + turns[0].prompt if turns else sub.title
        answer = turns[0].answer if turns else ""
        sizes = [f"{image.width}x{image.height} -> {image.patches}" for image in sub.images]
        for video in sub.videos:
            size = f"{video.width}x{video.height} -> {video.patches}"
            sizes.append(f"{video.num_frames} frames {size}")
        yield (
            f"{number:>3} {sub.num_tokens:>7,} {sub.num_loss_tokens:>7,} "
            f"{len(turns):>5}  {_column(prompt)}  {_column(answer)}  "
            f"{', '.join(sizes)}"
        )


def _span(span: Span, full: bool) -> Iterator[str]:
    """Yield the lines of a span, with its number of tokens and whether they are trained."""
    text = safe("".join(piece.text for piece in span.pieces))
    if not full and len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        left = len(text) - 2 * half
        text = f"{text[:half]} … {left:,} characters … {text[-half:]}"
    mark = f"{span.weight:4.2g}" if span.weight not in (0, 1) else "loss" if span.weight else "    "
    shown = text.replace("\n", f"{_NEWLINE}\n").removesuffix("\n")
    for i, line in enumerate(shown.split("\n")):
        gutter = f"{span.num_tokens:>6,} {mark} │ " if i == 0 else f"{'':6} {mark} │ "
        styled = click.style(line, fg="green", bold=True) if span.weight else line
        yield click.style(gutter, dim=True) + styled

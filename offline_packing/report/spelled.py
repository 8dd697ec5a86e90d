"""The tokens of a segment spelled out, with the trained parts marked, and its media."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from task_encoders.families.base.family import FamilyEncoder
from task_encoders.samples import (
    IMAGE_PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    SourceSample,
    place_media,
    split_at_media,
)
from task_encoders.text.tokenizer import control_pattern


@dataclass(frozen=True)
class Piece:
    """Tokens shown as one: `kind` is text, control, vision or padding, or literal: text that spells
    a control token."""

    kind: str
    text: str


@dataclass(frozen=True)
class Span:
    """Tokens in a row that have one weight in the loss; 0: they carry none."""

    weight: float
    num_tokens: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class MediumPreview:
    """One image or video of a sub-sample, upright: size in pixels, grid (t, h, w) in patches."""

    name: str
    width: int
    height: int
    grid: tuple[int, ...]
    #: the image's file; of a video the first frame that is trained on, as PNG
    picture: bytes
    #: that are trained on; None: an image
    num_frames: int | None = None

    @property
    def patches(self) -> str:
        """Rows and columns of patches: '34x46'."""
        return f"{self.grid[1]}x{self.grid[2]}"


def in_order(
    sample: SourceSample, images: Sequence[MediumPreview], videos: Sequence[MediumPreview]
) -> list[MediumPreview]:
    """Return the media in the order in which the sample shows them."""
    of_kind = {IMAGE_PLACEHOLDER: iter(images), VIDEO_PLACEHOLDER: iter(videos)}
    texts = (
        text
        for turn in place_media(sample)
        for text in (
            [turn.answer]
            if sample.task == "captioning"
            else [*(before for _, before in turn.before), turn.prompt]
        )
    )
    return [next(of_kind[mark]) for text in texts for mark in split_at_media(sample, text)[1::2]]


def spell_segment(
    tokens: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float32],
    is_padding: npt.NDArray[np.bool_],
    encoder: FamilyEncoder,
    media_in_order: Sequence[MediumPreview],
) -> Iterator[Span]:
    """Spell a segment as text, in spans of one weight in the loss. Arrays are (num_tokens,)."""
    tokenizer = encoder.tokenizer
    literal = re.compile(f"({control_pattern(tokenizer).pattern})")  # a group: splits keep it
    spelled = tokenizer.spell(tokens.tolist())
    counts = Counter(token for token, is_control in spelled if is_control)
    # token -> the medium of each occurrence in turn; videos may use the tokens of images
    own: dict[str, list[MediumPreview]] = {}
    for medium in media_in_order:
        kinds = ("video", "image") if medium.num_frames else ("image",)
        ids = [encoder.media_token_ids.get(f"{kind}_token_id") for kind in kinds]
        names = [name for name, _ in tokenizer.spell([one for one in ids if one is not None])]
        own.setdefault(next(name for name in names if counts[name]), []).append(medium)
    media = {token: _medium_of_tokens(some, counts[token]) for token, some in own.items()}
    # [0 0 0 1 1 0] -> 3, 5
    changes = np.diff(weights).astype(bool) | np.diff(is_padding)
    cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), len(tokens)]
    for start, end in itertools.pairwise(cuts):
        if is_padding[start]:
            pieces = [Piece("padding", f"[padding: {end - start:,} tokens]")]
        else:
            spelled = tokenizer.spell(tokens[start:end].tolist())
            pieces = list(_pieces(spelled, media, literal))
        yield Span(float(weights[start]), end - start, tuple(pieces))


def _medium_of_tokens(media: Sequence[MediumPreview], num_tokens: int) -> Iterator[str]:
    """Name the medium of each of these tokens in turn; every token stands for the same number of
    patches."""
    patches = [math.prod(medium.grid) for medium in media]
    per_token = sum(patches) // max(num_tokens, 1)
    for medium, count in zip(media, patches, strict=True):
        name = f"video {medium.num_frames} frames" if medium.num_frames else "image"
        yield from itertools.repeat(f"{name} {medium.patches}", count // per_token)


def _pieces(
    spelled: Iterator[tuple[str, bool]],
    media: Mapping[str, Iterator[str]],
    literal: re.Pattern[str],
) -> Iterator[Piece]:
    """Yield text and control tokens. Tokens of pixels are merged into one piece per image, or per
    run of a video's tokens (Qwen3-VL writes a time before each step)."""
    for (text, is_control), some in itertools.groupby(spelled):
        count = len(list(some))
        if is_control and text in media:
            for medium, own in itertools.groupby(itertools.islice(media[text], count)):
                yield Piece("vision", f"[{medium}: {len(list(own)):,} tokens]")
        elif is_control:
            yield from [Piece("control", text)] * count
        else:
            yield from _literals(text, literal) * count


def _literals(text: str, literal: re.Pattern[str]) -> list[Piece]:
    """Split 'a<|im_end|>b' of text into 'a', '[text: <|im_end|>]', 'b'."""
    return [
        Piece("literal", f"[text: {part}]") if number % 2 else Piece("text", part)
        for number, part in enumerate(literal.split(text))
        if part
    ]

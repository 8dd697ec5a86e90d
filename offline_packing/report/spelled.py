"""The tokens of a segment spelled out, with the trained parts marked, and its media."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from task_encoders.families.base.family import FamilyEncoder
from task_encoders.sample_encoder import Place
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

    @property
    def name_of_tokens(self) -> str:
        """Words for its tokens: 'image 34x46', or 'video 8 frames 34x46'."""
        kind = f"video {self.num_frames} frames" if self.num_frames else "image"
        return f"{kind} {self.patches}"


def spell_segment(
    tokens: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float32],
    is_padding: npt.NDArray[np.bool_],
    encoder: FamilyEncoder,
    media: Sequence[tuple[Place, MediumPreview]],
) -> Iterator[Span]:
    """Spell a segment as text, in spans of one weight in the loss. Arrays are (num_tokens,);
    `media` are those of the segment, with their places in it."""
    # A group: splits keep what it matches.
    literal = re.compile(f"({control_pattern(encoder.tokenizer).pattern})")
    medium_of = np.full(len(tokens), -1)
    for number, ((first, count), _) in enumerate(media):
        medium_of[first : first + count] = number
    is_pixels = np.isin(tokens, [encoder.image_token_id, encoder.video_token_id])
    medium_of[~is_pixels] = -1  # such as the times between a video's steps

    def pieces(start: int, end: int) -> Iterator[Piece]:
        """Spell tokens. Those of pixels are one piece per image, or per run of a video's tokens
        (Qwen3-VL writes a time before each step)."""
        for number, places in itertools.groupby(range(start, end), medium_of.item):
            run = tokens[[*places]].tolist()
            if number >= 0:
                name = media[number][1].name_of_tokens
                yield Piece("vision", f"[{name}: {len(run):,} tokens]")
                continue
            for text, is_control in encoder.tokenizer.spell(run):
                if is_control:
                    yield Piece("control", text)
                    continue
                # 'a<|im_end|>b' of text is 'a', '[text: <|im_end|>]', 'b'
                for i, part in enumerate(literal.split(text)):
                    if part:
                        yield Piece("literal", f"[text: {part}]") if i % 2 else Piece("text", part)

    # [0 0 0 1 1 0] -> 3, 5
    changes = np.diff(weights).astype(bool) | np.diff(is_padding)
    cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), len(tokens)]
    for start, end in itertools.pairwise(cuts):
        padding = Piece("padding", f"[padding: {end - start:,} tokens]")
        own = (padding,) if is_padding[start] else tuple(pieces(start, end))
        yield Span(float(weights[start]), end - start, own)

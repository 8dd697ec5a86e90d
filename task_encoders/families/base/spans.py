"""A sample's tokens as spans of text and of media, and their positions."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from task_encoders.media.video import SampledVideo
from task_encoders.text.pieces import Answer, Control, Fixed, Text
from task_encoders.text.tokenizer import Tokenizer

Grid = tuple[int, int, int]


class Span(NamedTuple):
    """Consecutive tokens: `ids`, all of one `weight` in the loss, or `ids[0]` for all of a medium's
    `grid` of tokens, whose steps in time are `interval` positions apart."""

    ids: Sequence[int]
    num_tokens: int
    weight: float = 0.0
    grid: Grid | None = None
    interval: float = 1.0


class Medium(NamedTuple):
    """Grid of an image or a video, from which its tokens and positions follow."""

    grid: Grid  #: in patches
    video: SampledVideo | None = None


class BlankImage(NamedTuple):
    """An image with nothing in it, as small as a model takes it."""

    shape: tuple[int, int]  #: of its rows of pixel values
    grid: Grid  #: in patches
    num_tokens: int


class TextSpans:
    """The tokens of a sample's texts; tokens of short texts and of the template are cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: dict[Text | Control | Fixed, list[Span]] = {}

    def spans(self, piece: Text | Control | Fixed | Answer) -> list[Span]:
        """Return the spans of a piece other than a medium: one; of an answer, its header and the
        rest."""
        if isinstance(piece, Answer):
            ids, begin = self._tokenizer.encode_answer(piece.header, piece.text)
            header = Span(ids[:begin], begin)
            del ids[:begin]  # a slice would copy all the others
            parts = header, Span(ids, len(ids), piece.weight)
            return [part for part in parts if part.num_tokens]
        kept = self._kept.get(piece)
        if kept is not None:
            return kept
        weight = 0.0
        if isinstance(piece, Control):
            ids, weight = [self._tokenizer.special_id(piece.token)], piece.weight
        elif isinstance(piece, Text):
            ids = self._tokenizer.encode(piece.text)
        else:
            ids = [one for part in piece.pieces for span in self.spans(part) for one in span.ids]
        found = [Span(ids, len(ids), weight)]
        if not isinstance(piece, Text) or len(piece.text) <= 64:
            if len(self._kept) > 4096:
                self._kept.clear()
            self._kept[piece] = found
        return found


def two_tokens(patch_size: int, merge_size: int, depth: int = 1) -> BlankImage:
    """Make a blank image of two tokens, each of merge_size² patches that hold `depth` frames."""
    # One of a single patch makes transformers 5.23's Mistral 3 fail if it is a row's only image.
    values = 3 * depth * patch_size**2
    return BlankImage((2 * merge_size**2, values), (1, merge_size, 2 * merge_size), 2)


def tokens_and_weights(
    spans: Sequence[Span],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Write out the tokens and the loss weights of spans, (S,) each."""
    num_tokens = sum(span.num_tokens for span in spans)
    tokens = np.empty(num_tokens, dtype=np.int64)
    loss_weights = np.empty(num_tokens, dtype=np.float32)
    start = 0
    for span in spans:
        end = start + span.num_tokens
        tokens[start:end] = span.ids  # a medium's single one is repeated
        loss_weights[start:end] = span.weight
        start = end
    loss_weights[0] = 0  # there is nothing to predict it from
    return tokens, loss_weights


def position_ids(spans: Sequence[Span], num_rows: int, video_end: str) -> npt.NDArray[np.int64]:
    """Return positions, (1, S), or (3, S) multimodal rotary positions (M-RoPE,
    https://arxiv.org/abs/2409.12191, §2.1).

    Text counts up on all three rows. The tokens of a medium take their place in its grid, with
    `interval` temporal positions (in float32, rounded down) from one step in time to the next. The
    text after it goes on after the grid's longer side, as in transformers from 5 on, even if
    temporal positions reach further; with `video_end: last_position`, after the last of them.
    """
    num_tokens = sum(span.num_tokens for span in spans)
    if num_rows == 1:
        return np.arange(num_tokens)[None]
    positions = np.empty((3, num_tokens), dtype=np.int64)
    start = next_position = 0
    for span in spans:
        end = start + span.num_tokens
        if span.grid is None:
            positions[:, start:end] = np.arange(next_position, next_position + end - start)
            next_position += end - start
        else:
            places = np.indices(span.grid).reshape(3, -1)
            if span.interval != 1:
                places[0] = (places[0].astype(np.float32) * np.float32(span.interval)).astype(
                    np.int64
                )
            positions[:, start:end] = places + next_position
            if video_end == "last_position":
                next_position += int(places.max()) + 1
            else:
                next_position += max(span.grid[1:])
        start = end
    return positions

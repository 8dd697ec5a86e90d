"""A sample's tokens as spans of text and of media, and their positions."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from task_encoders.media.video import SampledVideo
from task_encoders.packs.tokenized import TokenizedText
from task_encoders.text.pieces import Answer, Control, Fixed, Text
from task_encoders.text.tokenizer import Tokenizer

Grid = tuple[int, int, int]


class Span(NamedTuple):
    """Consecutive tokens: `ids` with loss from `loss_from` on, or `ids[0]` for all of a medium's
    `grid` of tokens, whose steps in time are `interval` positions apart."""

    ids: Sequence[int]
    num_tokens: int
    loss_from: int
    grid: Grid | None = None
    interval: float = 1.0


class Medium(NamedTuple):
    """What the tokens and positions of an image or a video follow from."""

    grid: Grid  #: in patches
    video: SampledVideo | None = None


class TextSpans:
    """The tokens of a sample's texts; those of short texts and of the template's own are kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: dict[Text | Control | Fixed, Span] = {}

    def span(self, piece: Text | Control | Fixed | Answer) -> Span:
        """Of a piece that is no medium."""
        if isinstance(piece, Answer):
            ids, loss_from = self._tokenizer.encode_answer(piece.header, piece.text)
            return Span(ids, len(ids), loss_from)
        if isinstance(piece, Text) and len(piece.text) > 64:
            ids = self._tokenizer.encode(piece.text)
            return Span(ids, len(ids), len(ids))
        return self._kept.get(piece) or self._keep(piece)

    def _keep(self, piece: Text | Control | Fixed) -> Span:
        if len(self._kept) > 4096:
            self._kept.clear()
        if isinstance(piece, Control):
            span = Span([self._tokenizer.special_id(piece.token)], 1, 1 - piece.labelled)
        elif isinstance(piece, Text):
            ids = self._tokenizer.encode(piece.text)
            span = Span(ids, len(ids), len(ids))
        else:
            ids = [token_id for one in piece.pieces for token_id in self.span(one).ids]
            span = Span(ids, len(ids), len(ids))
        self._kept[piece] = span
        return span


def stored_parts(tokenized: TokenizedText) -> Iterator[Span | int]:
    """What was tokenized as spans, each with loss throughout or without any, and its media."""
    ids = np.asarray(tokenized.ids, dtype=np.int64)
    media = np.flatnonzero(ids < 0)
    cuts = np.unique(np.concatenate([[0], media, media + 1, tokenized.loss, [len(ids)]]))
    starts, ends = set(tokenized.loss[::2]), set(tokenized.loss[1::2])
    with_loss = False
    for start, end in itertools.pairwise(cuts.astype(np.int64).tolist()):
        with_loss = start in starts or (with_loss and start not in ends)
        if ids[start] < 0:
            yield int(ids[start])
        else:
            part = ids[start:end]
            yield Span(part, len(part), 0 if with_loss else len(part))  # type: ignore[arg-type]


def patch_spans(
    token_id: int, grid: Grid, merge_size: int, before: Span, behind: Span, interval: float = 1.0
) -> tuple[Span, Span, Span]:
    """A token per merge_size² patches, between two others."""
    t, h, w = grid
    merged = t, h // merge_size, w // merge_size
    num_tokens = math.prod(merged)
    return before, Span((token_id,), num_tokens, num_tokens, merged, interval), behind


def position_ids(spans: Sequence[Span], num_rows: int, video_end: str) -> npt.NDArray[np.int64]:
    """(1, S), or (3, S) multimodal rotary positions (M-RoPE, https://arxiv.org/abs/2409.12191,
    §2.1).

    Text counts up on all three rows. The tokens of a medium take their place in its grid, with
    `interval` temporal positions (in float32, rounded down) from one step in time to the next.
    What follows goes on behind the longer side of the grid, as in transformers from 5 on, also
    where temporal positions reach further; or, with `video_end: last_position`, behind those.
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

"""Parts of conversations that fit no pack, for `pack.on_overlong: split_turns`.

A part takes as many turns as fit. It is rendered and measured as it will be trained, so its length
is exact, whatever the chat template makes of turns that come last, or of their thoughts. A turn
that answers the result of a tool stays with the turn that called it.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from offline_packing.config.sections import SplitTurnsConfig
from offline_packing.errors import ChangedError
from offline_packing.index.measured import MeasuredSample, sample_stamp, sample_traits
from offline_packing.layouts.shard_tasks import COLUMNS, read_planned
from offline_packing.sources import Source
from offline_packing.sources.conversation_part import ConversationPart
from task_encoders.media.video_file import VideoHeader
from task_encoders.sample_encoder import SampleEncoder, SampleLength
from task_encoders.samples import (
    IMAGE_PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    SampleError,
    SourceSample,
    Turn,
    count_placeholders,
    place_media,
)


def fits(
    rows: pa.Table, rooms: npt.NDArray[np.int64], budgets: Mapping[str, int]
) -> npt.NDArray[np.bool_]:
    """(num_rows,) whether each sample fits a pack by itself."""
    found = rows["num_tokens"].to_numpy() <= rooms
    for name, limit in budgets.items():
        found &= rows[f"num_{name}"].to_numpy() <= limit
    return found


class _Cut(NamedTuple):
    """Exchanges from `first` to `end`, shown from `begin` on."""

    begin: int
    first: int
    end: int


class _Part(NamedTuple):
    cut: _Cut
    sample: SourceSample
    part: ConversationPart
    length: SampleLength


class Conversation:
    """One conversation, in exchanges: a turn, and those that answer its calls of tools."""

    def __init__(
        self,
        source: Source,
        encoder: SampleEncoder,
        row: pa.Table,
        options: SplitTurnsConfig,
        limits: Mapping[str, int],
    ) -> None:
        """Read it again. Raises StageError if it changed after it was measured. `row` is its row
        of the records' table, `limits` are tokens and whatever else a pack is limited in."""
        (record,) = read_planned(row.select(COLUMNS))
        kept = ["content_hash", "sample_hash", "group_hash", "traits"]
        (self.row,) = row.select(kept).to_pylist()
        self.record, self.hashes = record, row["media_hash"][0].as_py()
        self.source, self.encoder, self.options, self.limits = source, encoder, options, limits
        num_images = len(record.media) - record.num_videos
        self.sample = source.read_sample(record.key, record.json, num_images, record.num_videos)
        self.sizes, self.videos = self._headers()
        turns = place_media(self.sample)
        starts = [i for i, turn in enumerate(turns) if i == 0 or not _answers_a_tool(turn)]
        #: turns before each exchange, and of all; the same of images and videos
        self.bounds = [*starts, len(turns)]
        exchanges = [turns[begin:end] for begin, end in pairwise(self.bounds)]
        self.images = _counts(exchanges, IMAGE_PLACEHOLDER)
        self.clips = _counts(exchanges, VIDEO_PLACEHOLDER if self.sample.videos else "\0")
        self.is_trained = [any(turn.weight for turn in own) for own in exchanges]
        self._part = lru_cache(maxsize=4)(self._measure)

    def parts(self) -> list[MeasuredSample]:
        """The parts; together they train each turn once, and turns between them carry no loss. A
        turn that is too long by itself is a part that fits no pack. []: no part would fit one.
        Raises SampleError if no template takes them."""
        found: list[_Part] = []
        first, ends = 0, self._estimate()
        while first < len(self.is_trained):
            if self.is_trained[first]:
                found.append(self._next(first, ends))
                first = found[-1].cut.end
            else:
                first += 1
        return [*map(self._row, found)] if any(map(self._fits, found)) else []

    def _headers(self) -> tuple[list[tuple[int, int]], list[VideoHeader]]:
        """(height, width) of each image, and the headers of videos."""
        sizes, videos = [], []
        num_images = len(self.sample.images)
        for i, at in enumerate(self.record.media):
            try:
                with self.source.open_located(at) as file:
                    if i < num_images:
                        header = self.encoder.image_header(file)
                        sizes.append((header.height, header.width))
                    else:
                        videos.append(self.encoder.video_header(file))
            except SampleError as error:
                raise ChangedError(f"sample {self.record.key!r}", error) from error
        return sizes, videos

    def _measure(self, cut: _Cut) -> _Part:
        """Raises SampleError where no template takes such a part."""
        shown = range(self.images[cut.begin], self.images[cut.end])
        clips = range(self.clips[cut.begin], self.clips[cut.end])
        kept = [*shown, *(len(self.sizes) + clip for clip in clips)]
        places = [-1] * len(self.hashes)
        for place, medium in enumerate(kept):
            places[medium] = place
        begin, first, end = (self.bounds[at] for at in cut)
        part = ConversationPart(
            self.record.key,
            self.record.json,
            tuple(places),
            self.record.num_videos,
            begin,
            first,
            end,
        )
        sample = replace(part.take(self.sample), key=f"{self.record.key}[{first}:{end}]")
        sizes, videos = [self.sizes[i] for i in shown], [self.videos[i] for i in clips]
        return _Part(cut, sample, part, self.encoder.measure(sample, sizes, videos))

    def _fits(self, part: _Part) -> bool:
        sample, length = part.sample, part.length
        sizes = {
            "tokens": length.num_tokens,
            "vision_patches": length.num_vision_patches,
            "images": len(sample.images),
            "videos": len(sample.videos),
        }
        return all(sizes[name] <= limit for name, limit in self.limits.items())

    def _is_fit(self, cut: _Cut) -> bool:
        return self._fits(self._part(cut))

    def _estimate(self) -> npt.NDArray[np.int64]:
        """(num_exchanges + 1,) about how many tokens stand before each exchange, and in all."""
        plain = replace(self.sample, system=None, tools="", turns=place_media(self.sample))
        trained = [replace(turn, weight=1.0) for turn in plain.turns]

        def num_tokens(begin: int, end: int) -> int:
            images = slice(self.images[begin], self.images[end])
            clips = slice(self.clips[begin], self.clips[end])
            own = replace(
                plain,
                turns=tuple(trained[self.bounds[begin] : self.bounds[end]]),
                images=plain.images[images],
                videos=plain.videos[clips],
            )
            return self.encoder.measure(own, self.sizes[images], self.videos[clips]).num_tokens

        count = len(self.is_trained)
        alone = np.array([num_tokens(i, i + 1) for i in range(count)], np.int64)
        around = alone[:2].sum() - num_tokens(0, 2) if count > 1 else 0
        return np.concatenate([[0], np.cumsum(alone - around)])

    def _next(self, first: int, ends: npt.NDArray[np.int64]) -> _Part:
        """The part that begins with an exchange."""
        cut = _Cut(self._context(first), first, first + 1)
        if not self._is_fit(cut):
            return self._part(cut)
        last, room = len(self.is_trained), self.limits["tokens"] - self._part(cut).length.num_tokens
        guess = int(np.searchsorted(ends, ends[first + 1] + room, side="right")) - 1
        end = min(max(guess, first + 1), last)
        if self._is_fit(cut._replace(end=end)):
            while end < last and self._is_fit(cut._replace(end=end + 1)):
                end += 1
        else:
            fewer = range(first + 1, end)
            is_long = bisect_left(
                fewer, True, key=lambda one: not self._is_fit(cut._replace(end=one))
            )
            end = first + max(is_long, 1)
        while end > first + 1 and not (
            self.is_trained[end - 1] and self._is_fit(cut._replace(end=end))
        ):
            end -= 1
        return self._part(cut._replace(end=end))

    def _context(self, first: int) -> int:
        """The first exchange that is shown in front of an exchange: as much as is asked for and
        fits with it, the latest ones; without any, it need not fit."""
        earlier = range(max(0, first - self.options.context_turns), first)
        return earlier.start + bisect_left(
            earlier, True, key=lambda begin: self._is_fit(_Cut(begin, first, first + 1))
        )

    def _row(self, part: _Part) -> MeasuredSample:
        """A part as a row of the index."""
        record, sample = self.record, part.sample
        kept = [i for i, place in enumerate(part.part.media) if place >= 0]
        media = tuple((record.media[i], record.extensions[i]) for i in kept)
        hashes = tuple(self.hashes[i] for i in kept)
        turns = [(turn.prompt, turn.answer, turn.details) for turn in sample.turns]
        sizes = [self.sizes[i] for i in kept if i < len(self.sizes)]
        return MeasuredSample(
            sample.key,
            record.source_id,
            self.source.task,
            len(sample.turns),
            part.length,
            replace(record.json, size=len(orjson.dumps([sample.system, sample.tools, turns]))),
            media,
            sample_stamp(self.source, record.json, [at for at, _ in media]),
            None if self.row["traits"] is None else sample_traits(sample, sizes),
            len(sample.videos),
            self.row["content_hash"],
            self.row["sample_hash"],  # of the whole conversation, which stays in one split
            hashes,
            self.row["group_hash"],
            part.part,
        )


def _answers_a_tool(turn: Turn) -> bool:
    """Whether a turn begins with the result of a tool, which the turn before it called."""
    return (turn.before[0][0] if turn.before else turn.role) == "tool"


def _counts(exchanges: Sequence[Sequence[Turn]], placeholder: str) -> list[int]:
    """How often a placeholder stands before each exchange, and in all."""
    return [0, *accumulate(count_placeholders(own, placeholder) for own in exchanges)]

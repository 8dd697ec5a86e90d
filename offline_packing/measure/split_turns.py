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
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from offline_packing.config.sections import SplitTurnsConfig
from offline_packing.errors import ChangedError
from offline_packing.index.measured import MeasuredSample, sample_stamp, sample_traits
from offline_packing.layouts.shard_tasks import COLUMNS, read_planned
from offline_packing.measure.hashes import hash_sample
from offline_packing.sources import Source
from offline_packing.sources.dialogues import RecordPart, TurnRange, take_turns
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

#: Characters that a truncated answer gives up, at most, to end where a token of the whole one does.
_MOST_GIVEN_UP: Final = 256


def fits(
    rows: pa.Table, rooms: npt.NDArray[np.int64], budgets: Mapping[str, int]
) -> npt.NDArray[np.bool_]:
    """(num_rows,) whether each sample fits a pack by itself."""
    found = rows["num_tokens"].to_numpy() <= rooms
    for name, limit in budgets.items():
        found &= rows[f"num_{name}"].to_numpy() <= limit
    return found


class _Cut(NamedTuple):
    """Exchanges from `first` to `end`, shown from `begin` on, and images from number `image` on."""

    begin: int
    first: int
    end: int
    image: int
    answer_length: int | None = None


class _Part(NamedTuple):
    cut: _Cut
    sample: SourceSample
    #: see RecordPart.media
    places: tuple[int, ...]
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
        (self.row,) = row.select(["content_hash", "group_hash", "key_hash"]).to_pylist()
        self.record, self.hashes = record, row["media_hash"][0].as_py()
        self.source, self.encoder, self.options, self.limits = source, encoder, options, limits
        places = tuple(range(len(record.media)))
        self.whole = RecordPart(
            record.key, self.row["content_hash"], record.json, places, record.num_videos
        )
        self.sample = self.whole.read(source)
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
        shown = range(cut.image, self.images[cut.end])
        clips = range(self.clips[cut.begin], self.clips[cut.end])
        kept = [*shown, *(len(self.sizes) + clip for clip in clips)]
        places = [-1] * len(self.hashes)
        for place, medium in enumerate(kept):
            places[medium] = place
        taken = self._turns(cut)
        key = f"{self.record.key}[{taken.first}:{taken.end}]"
        sample = take_turns(key, self.sample, taken, places)
        sizes, videos = [self.sizes[i] for i in shown], [self.videos[i] for i in clips]
        return _Part(cut, sample, tuple(places), self.encoder.measure(sample, sizes, videos))

    def _turns(self, cut: _Cut) -> TurnRange:
        begin, first, end = (self.bounds[at] for at in cut[:3])
        return TurnRange(begin, first, end, cut.answer_length)

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
        begin, image = self._context(first)
        cut = _Cut(begin, first, first + 1, image)
        if not self._is_fit(cut):
            return self._truncated(cut) or self._part(cut)
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

    def _context(self, first: int) -> tuple[int, int]:
        """The first exchange and the first image that are shown in front of an exchange: as much
        as is asked for and fits with it, the latest ones; without any, it need not fit."""
        earliest = max(0, first - self.options.context_turns)
        image = 0 if self.options.context_images else self.images[earliest]
        choices = [(earliest, one) for one in range(image, self.images[earliest] + 1)]
        choices += [(begin, self.images[begin]) for begin in range(earliest + 1, first + 1)]
        fewer = bisect_left(
            choices[:-1],
            True,
            key=lambda one: self._is_fit(_Cut(one[0], first, first + 1, one[1])),
        )
        return choices[fewer]

    def _truncated(self, cut: _Cut) -> _Part | None:
        """The longest beginning of an exchange that fits, its last answer cut where one of its
        tokens ends; None if there is none, or none is asked for."""
        turn = self.sample.turns[self.bounds[cut.end] - 1]
        if not self.options.truncate_answer or turn.calls or not turn.weight:
            return None
        shortest = len(turn.answer) - len(turn.answer.lstrip()) + 1

        def of_length(length: int) -> _Part:
            return self._part(cut._replace(answer_length=length))

        lengths = range(shortest, len(turn.answer))
        longest = (
            shortest
            - 1
            + bisect_left(lengths, True, key=lambda one: not self._fits(of_length(one)))
        )
        whole = self.encoder.tokenize(of_length(len(turn.answer)).sample).ids
        for length in range(longest, max(shortest, longest - _MOST_GIVEN_UP) - 1, -1):
            part = of_length(length)
            ids = self.encoder.tokenize(part.sample).ids
            if ids == whole[: len(ids)] and self._fits(part):
                return part
        return None

    def _row(self, part: _Part) -> MeasuredSample:
        """A part as a row of the index."""
        record, sample = self.record, part.sample
        kept = [i for i, place in enumerate(part.places) if place >= 0]
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
            sample_stamp(self.source, [record.json], [at for at, _ in media]),
            sample_traits(sample, sizes),
            len(sample.videos),
            self.row["content_hash"],
            hash_sample(sample, hashes),
            hashes,
            self.row["group_hash"],
            self.row["key_hash"],
            (replace(self.whole, media=part.places, turns=self._turns(part.cut)),),
        )


def _answers_a_tool(turn: Turn) -> bool:
    """Whether a turn begins with the result of a tool, which the turn before it called."""
    return (turn.before[0][0] if turn.before else turn.role) == "tool"


def _counts(exchanges: Sequence[Sequence[Turn]], placeholder: str) -> list[int]:
    """How often a placeholder stands before each exchange, and in all."""
    return [0, *accumulate(count_placeholders(own, placeholder) for own in exchanges)]

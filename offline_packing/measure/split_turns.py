"""Parts of conversations that fit no pack, for `pack.on_overlong: split_turns`.

A part takes as many turns as fit. It is rendered and measured as it will be trained, so its length
is exact, whatever the chat template makes of turns that come last, or of their thoughts. A turn
that answers the result of a tool stays with the turn that called it.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from offline_packing.config.sections import SplitTurnsConfig
from offline_packing.layouts import LAYOUTS
from offline_packing.sources import Locator
from offline_packing.sources.base import ConversationPart
from task_encoders.media.video_file import VideoHeader
from task_encoders.sample_encoder import SampleEncoder, SampleLength
from task_encoders.samples import (
    IMAGE_PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    SourceSample,
    Turn,
    count_placeholders,
    place_media,
)


@dataclass(frozen=True)
class Cutting:
    """What a sample may have, and how longer conversations are cut."""

    options: SplitTurnsConfig
    #: of a pack: tokens, and whatever else it is limited in
    limits: Mapping[str, int]
    #: a name in LAYOUTS, and the model's part of the fingerprint: what its reader adds to a sample
    layout: str
    model: Mapping[str, str | int]

    def limits_of(self, length: SampleLength) -> Mapping[str, int]:
        """The limits of the parts of a sample."""
        added = LAYOUTS[self.layout].added_tokens(self.model, length.grid_thw)
        return {**self.limits, "tokens": self.limits["tokens"] - added}


def fits(sample: SourceSample, length: SampleLength, limits: Mapping[str, int]) -> bool:
    """Whether a sample fits a pack by itself."""
    sizes = {
        "tokens": length.num_tokens,
        "vision_patches": length.num_vision_patches,
        "images": len(sample.images),
        "videos": len(sample.videos),
    }
    return all(sizes[name] <= limit for name, limit in limits.items())


class _Cut(NamedTuple):
    """Exchanges from `first` to `end`, shown from `begin` on."""

    begin: int
    first: int
    end: int


class Part(NamedTuple):
    """A part, as the sample that it becomes."""

    cut: _Cut
    sample: SourceSample
    place: ConversationPart
    length: SampleLength


class Conversation:
    """One conversation, in exchanges: a turn, and those that answer its calls of tools."""

    def __init__(
        self,
        encoder: SampleEncoder,
        sample: SourceSample,
        record: Locator,
        sizes: Sequence[tuple[int, int]],
        videos: Sequence[VideoHeader],
        options: SplitTurnsConfig,
        limits: Mapping[str, int],
    ) -> None:
        """`sizes` (height, width) and `videos` are those of the sample's images and videos,
        `limits` are tokens and whatever else a pack is limited in."""
        self.encoder, self.sample, self.record = encoder, sample, record
        self.sizes, self.videos, self.options, self.limits = sizes, videos, options, limits
        turns = place_media(self.sample)
        starts = [i for i, turn in enumerate(turns) if i == 0 or not _answers_a_tool(turn)]
        #: turns before each exchange, and of all; the same of images and videos
        self.bounds = [*starts, len(turns)]
        exchanges = [turns[begin:end] for begin, end in pairwise(self.bounds)]
        self.images = _counts(exchanges, IMAGE_PLACEHOLDER)
        self.clips = _counts(exchanges, VIDEO_PLACEHOLDER if self.sample.videos else "\0")
        self.is_trained = [any(turn.weight for turn in own) for own in exchanges]
        self._part = lru_cache(maxsize=4)(self._measure)

    def parts(self) -> list[Part]:
        """The parts; together they train each turn once, and turns between them carry no loss. A
        turn that is too long by itself is a part that fits no pack. []: no part would fit one.
        Raises SampleError if no template takes them."""
        found: list[Part] = []
        first, ends = 0, self._estimate()
        while first < len(self.is_trained):
            if self.is_trained[first]:
                found.append(self._next(first, ends))
                first = found[-1].cut.end
            else:
                first += 1
        return found if any(fits(one.sample, one.length, self.limits) for one in found) else []

    def _measure(self, cut: _Cut) -> Part:
        """Raises SampleError where no template takes such a part."""
        shown = range(self.images[cut.begin], self.images[cut.end])
        clips = range(self.clips[cut.begin], self.clips[cut.end])
        kept = [*shown, *(len(self.sizes) + clip for clip in clips)]
        places = [-1] * len(self.sample.media)
        for place, medium in enumerate(kept):
            places[medium] = place
        begin, first, end = (self.bounds[at] for at in cut)
        part = ConversationPart(
            key=self.sample.key,
            json=self.record,
            media=tuple(places),
            num_videos=len(self.videos),
            begin=begin,
            first=first,
            end=end,
        )
        sample = replace(part.take(self.sample), key=f"{self.sample.key}[{first}:{end}]")
        sizes, videos = [self.sizes[i] for i in shown], [self.videos[i] for i in clips]
        return Part(cut, sample, part, self.encoder.measure(sample, sizes, videos))

    def _is_fit(self, cut: _Cut) -> bool:
        part = self._part(cut)
        return fits(part.sample, part.length, self.limits)

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

    def _next(self, first: int, ends: npt.NDArray[np.int64]) -> Part:
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


def _answers_a_tool(turn: Turn) -> bool:
    """Whether a turn begins with the result of a tool, which the turn before it called."""
    return (turn.before[0][0] if turn.before else turn.role) == "tool"


def _counts(exchanges: Sequence[Sequence[Turn]], placeholder: str) -> list[int]:
    """How often a placeholder stands before each exchange, and in all."""
    return [0, *accumulate(count_placeholders(own, placeholder) for own in exchanges)]

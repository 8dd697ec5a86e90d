"""Parts of one conversation, which `pack.on_overlong: split_turns` cuts between turns.

A part may show earlier turns in front of its own, without loss:

    <image>A? B. C? D. | E? F. | G? H.      conversation[2:3] = C? D. E? F.  with loss on F.
"""

from dataclasses import dataclass, replace

from offline_packing.sources.base import Source
from offline_packing.sources.reading.locators import Locator
from task_encoders.samples import SourceSample, place_media


@dataclass(frozen=True, slots=True)
class ConversationPart:
    """The record that a sample is a part of, and which of its turns and media the sample has."""

    key: str
    json: Locator
    #: of each image and then video of the record, its place among those of the sample; -1: it is
    #: not shown
    media: tuple[int, ...]
    num_videos: int
    #: the first turn that is shown; those before `first` carry no loss
    begin: int
    first: int
    end: int

    def read(self, source: Source, key: str) -> SourceSample:
        """The sample of this part. Raises StageError if its record changed after it was
        measured."""
        num_images = len(self.media) - self.num_videos
        return self.take(source.read_sample(key, self.json, num_images, self.num_videos))

    def take(self, sample: SourceSample) -> SourceSample:
        """The part of a whole sample, with its system message and tools."""
        turns = list(place_media(sample)[self.begin : self.end])
        for i in range(self.first - self.begin):
            turns[i] = replace(turns[i], weight=0.0)
        shown = [name for name, at in zip(sample.media, self.media, strict=True) if at >= 0]
        num_images = sum(at >= 0 for at in self.media[: len(sample.images)])
        images, videos = tuple(shown[:num_images]), tuple(shown[num_images:])
        return replace(sample, turns=tuple(turns), images=images, videos=videos)

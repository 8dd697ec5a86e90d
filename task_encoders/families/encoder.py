"""Base of the encoders of all families. `measure` and `encode` go through `_layout`, so they
cannot disagree; a family says what its template, its media and its positions are."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from PIL import Image as PillowImage

from task_encoders.families.options import ModelOptions
from task_encoders.families.spans import (
    Grid,
    Medium,
    Span,
    TextSpans,
    position_ids,
    stored_parts,
)
from task_encoders.limits import MAX_IMAGE_PIXELS
from task_encoders.media.image import decode_image
from task_encoders.media.pixel_values import Bytes, Normalisation
from task_encoders.media.video import SampledVideo
from task_encoders.media.video_file import VideoHeader
from task_encoders.packs.tokenized import (
    IMAGE_ID,
    VIDEO_ID,
    ExpandedText,
    Place,
    TokenizedText,
)
from task_encoders.sample_encoder import EncodedSample, SampleLength
from task_encoders.samples import SampleError, SourceSample, check_sample
from task_encoders.text.pieces import Image, Piece, Video
from task_encoders.text.tokenizer import Tokenizer


class FamilyEncoder(ABC):
    """A `SampleEncoder` on a chat template and media tokens.

    Captioning is the form of pretraining: media, caption, end token, no chat template; everything
    but the media carries loss. In conversations answers and their end tokens carry loss.
    """

    #: Families with the same name here have the same lengths, by construction.
    LENGTHS_OF: ClassVar[str]
    #: Raised by one with every change that alters a sample's tokens: older artifacts are refused.
    TEMPLATE_VERSION: ClassVar[int] = 1
    #: Fingerprint of a checkpoint's chat template, if it writes something else than the family's.
    own_template: str = ""
    #: Rows of position_ids.
    POSITION_ROWS: ClassVar[int] = 3
    #: Options of every family on which lengths depend in this one, beside its own.
    LENGTHS_FOLLOW: ClassVar[tuple[str, ...]] = ()
    #: Position of the text after a video, see `spans.position_ids`.
    video_end: str = "longer_side"
    #: See SampleEncoder.
    media_token_ids: Mapping[str, int]

    def __init__(
        self,
        options: ModelOptions,
        tokenizer: Tokenizer,
        *,
        pad_token: str,
        patch_area: int,
        normalisation: Normalisation,
    ) -> None:
        """`patch_area`: pixels of a patch."""
        self.options = options
        self.tokenizer = tokenizer
        self.pad_token_id = tokenizer.special_id(pad_token)
        self.max_image_pixels = options.max_image_pixels or MAX_IMAGE_PIXELS
        self._patch_area = patch_area
        self.normalisation = normalisation
        self.texts = TextSpans(tokenizer)

    # Decided by a family.

    @abstractmethod
    def render(self, sample: SourceSample) -> Iterable[Piece]:
        """The pieces of a checked sample, media included."""

    @abstractmethod
    def image_medium(self, height: int, width: int) -> Medium:
        """Medium of an image of this size. Raises SampleError where it cannot be used."""

    @abstractmethod
    def encode_image(self, image: PillowImage.Image) -> tuple[Bytes, Medium]:
        """Patches (P, C·p·p) of a decoded image. Raises SampleError."""

    @abstractmethod
    def sample_video(self, header: VideoHeader) -> SampledVideo:
        """Frames and grid of a video. Raises SampleError where it cannot be used."""

    @abstractmethod
    def encode_video(self, data: bytes) -> tuple[Bytes, Medium]:
        """Patches (Q, C·T·p·p) of a video file. Raises SampleError."""

    @abstractmethod
    def medium_spans(self, medium: Medium) -> Iterable[Span]:
        """The tokens of an image or a video."""

    # Common to all.

    @cached_property
    def fingerprint(self) -> Mapping[str, str | int]:
        return {
            "family": self.LENGTHS_OF,
            "template": self.TEMPLATE_VERSION,
            "tokenizer": self.tokenizer.fingerprint,
            "max_image_pixels": self.max_image_pixels,
            **{
                name: _stored(self.options, name)
                for name in (*self.options.own(), *self.LENGTHS_FOLLOW)
                if self.options.changes_lengths(name)
            },
            # Only where they differ from the default: fingerprints written before them stay valid.
            **({"chat_template": self.own_template} if self.own_template else {}),
            **({"loss_on": self.options.loss_on} if self.options.loss_on != "all" else {}),
        }

    def measure(
        self,
        sample: SourceSample,
        image_sizes: Sequence[tuple[int, int]],
        videos: Sequence[VideoHeader] = (),
    ) -> SampleLength:
        images = [self.image_medium(height, width) for height, width in image_sizes]
        clips = [Medium(video.grid, video) for video in map(self.sample_video, videos)]
        spans = self._layout(sample, images, clips)
        num_tokens = sum([span.num_tokens for span in spans])
        num_loss_tokens = sum([span.num_tokens for span in spans if span.weight])
        if spans[0].weight:  # the very first token has nothing to be predicted from
            num_loss_tokens -= 1
        grids = tuple(medium.grid for medium in images + clips)
        patches = sum([t * h * w for t, h, w in grids])
        return SampleLength(num_tokens, num_loss_tokens, patches, grids)

    def tokenize(self, sample: SourceSample) -> TokenizedText:
        check_sample(sample)
        ids: list[int] = []
        loss: list[int] = []
        weights: list[float] = []
        media = (itertools.repeat([Span((one,), 1)]) for one in (IMAGE_ID, VIDEO_ID))
        for span in self._sample_spans(sample, *media):
            if span.weight:
                loss += [len(ids), len(ids) + span.num_tokens]
                weights.append(span.weight)
            ids += span.ids
        return TokenizedText(ids, loss, weights if set(weights) - {1.0} else [])

    def expand(
        self,
        text: TokenizedText,
        image_grids: Sequence[Grid],
        videos: Sequence[SampledVideo] = (),
    ) -> ExpandedText:
        clips = [Medium(video.grid, video) for video in videos]
        media = {IMAGE_ID: map(Medium, image_grids), VIDEO_ID: iter(clips)}
        places: dict[int, list[Place]] = {IMAGE_ID: [], VIDEO_ID: []}
        spans: list[Span] = []
        start = 0
        for part in stored_parts(text):
            own = [part] if isinstance(part, Span) else list(self.medium_spans(next(media[part])))
            num_tokens = sum(span.num_tokens for span in own)
            if not isinstance(part, Span):
                places[part].append((start, num_tokens))
            spans += own
            start += num_tokens
        return ExpandedText(*_tokens_and_weights(spans), places[IMAGE_ID], places[VIDEO_ID])

    def decode_image(self, data: bytes) -> PillowImage.Image:
        return decode_image(data, max_image_pixels=self.max_image_pixels)

    def encode(
        self,
        sample: SourceSample,
        images: Sequence[bytes | PillowImage.Image],
        videos: Sequence[bytes] = (),
        tokenized: TokenizedText | None = None,
    ) -> EncodedSample:
        image_rows = [
            self.encode_image(self.decode_image(image) if isinstance(image, bytes) else image)
            for image in images
        ]
        video_rows = [self.encode_video(data) for data in videos]
        image_media = [medium for _, medium in image_rows]
        video_media = [medium for _, medium in video_rows]
        spans = self._layout(sample, image_media, video_media, tokenized)
        tokens, loss_weights = _tokens_and_weights(spans)
        return EncodedSample(
            key=sample.key,
            tokens=tokens,
            loss_weights=loss_weights,
            position_ids=position_ids(spans, self.POSITION_ROWS, self.video_end),
            image_pixels=self._concatenate([rows for rows, _ in image_rows], 1),
            image_grid_thw=_grid_array(image_media),
            video_pixels=self._concatenate(
                [rows for rows, _ in video_rows], self.normalisation.repeats
            ),
            video_grid_thw=_grid_array(video_media),
            normalisation=self.normalisation,
        )

    def answer_weights(self, sample: SourceSample) -> list[float]:
        """The weight of each answer of a conversation. Raises SampleError if all are 0."""
        weights = [turn.weight for turn in sample.turns]
        if self.options.loss_on == "last":
            weights[:-1] = [0.0] * (len(weights) - 1)
        if not any(weights):
            raise SampleError("bad_record", "none of the answers that may carry loss is trained")
        return weights

    def _concatenate(self, rows: Sequence[Bytes], depth: int) -> Bytes:
        if not rows:
            return np.empty((0, 3 * depth * self._patch_area), dtype=np.uint8)
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _layout(
        self,
        sample: SourceSample,
        images: Sequence[Medium],
        videos: Sequence[Medium],
        tokenized: TokenizedText | None = None,
    ) -> list[Span]:
        """The sample's tokens as spans, in order."""
        if len(images) != len(sample.images) or len(videos) != len(sample.videos):
            raise ValueError(
                f"{len(images)} images and {len(videos)} videos given for the "
                f"{len(sample.images)} and {len(sample.videos)} of {sample}"
            )
        check_sample(sample)
        of_images, of_videos = map(self.medium_spans, images), map(self.medium_spans, videos)
        if tokenized is None:
            return self._sample_spans(sample, of_images, of_videos)
        spans: list[Span] = []
        for part in stored_parts(tokenized):
            if isinstance(part, Span):
                spans.append(part)
            else:
                spans += next(of_images if part == IMAGE_ID else of_videos)
        return spans

    def _sample_spans(
        self,
        sample: SourceSample,
        images: Iterator[Iterable[Span]],
        videos: Iterator[Iterable[Span]],
    ) -> list[Span]:
        """Spans of a checked sample's texts, with the given ones of its media in their places."""
        spans: list[Span] = []
        for piece in self.render(sample):
            if isinstance(piece, Image):
                spans += next(images)
            elif isinstance(piece, Video):
                spans += next(videos)
            else:
                spans += self.texts.spans(piece)
        return spans


def _tokens_and_weights(
    spans: Sequence[Span],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """(S,) each."""
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


def _grid_array(media: Sequence[Medium]) -> npt.NDArray[np.int32]:
    """(N, 3)"""
    return np.array([medium.grid for medium in media], dtype=np.int32).reshape(-1, 3)


def _stored(options: ModelOptions, name: str) -> str | int:
    """An option as a fingerprint holds it. Its declared type decides: a family's default may be 200
    where a configuration gives 200.0, and both are the same option."""
    value: float | str | None = getattr(options, name)
    if type(options).model_fields[name].annotation is float:
        return f"{value:g}"
    assert not isinstance(value, float)
    return 0 if value is None else value

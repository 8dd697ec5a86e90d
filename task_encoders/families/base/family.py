"""The parts of every model family: options, an encoder, and its entry in FAMILIES.

`measure` and `encode` go through `_placed`, so they cannot disagree; a family says what its
template, its media and its positions are.
"""

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image as PillowImage
from pydantic import BaseModel, ConfigDict, Field

from task_encoders.families.base.cost import ModelCost
from task_encoders.families.base.spans import (
    BlankImage,
    Grid,
    Medium,
    Span,
    TextSpans,
    position_ids,
    tokens_and_weights,
    two_tokens,
)
from task_encoders.field_types import IF_ON, Count, LocalOrRemotePath, Values, if_other_than
from task_encoders.media.image import VisionSettings, decode_image, read_image_header
from task_encoders.media.patches import BACKENDS, Bytes, Normalisation, frame_patches
from task_encoders.media.video import SampledVideo, seconds_per_grid
from task_encoders.media.video_file import (
    MAX_VIDEO_FRAMES,
    VideoHeader,
    decode_frames,
    read_video_header,
)
from task_encoders.sample_encoder import (
    EncodedMedium,
    EncodedSample,
    Place,
    Prefix,
    SampleLength,
    TokenizedSample,
)
from task_encoders.samples import SampleError, SourceSample, Turn, check_sample, count_placeholders
from task_encoders.samples.limits import MAX_IMAGE_PIXELS
from task_encoders.samples.medium_options import MediumOptions
from task_encoders.text.chat_templates import ChatTemplate
from task_encoders.text.pieces import (
    CHATML,
    Answer,
    Control,
    Dialect,
    Fixed,
    Image,
    Piece,
    Text,
    Video,
    caption_pieces,
    without_empty_thought,
    without_end,
)
from task_encoders.text.qwen_vocabulary import BUILTIN
from task_encoders.text.template_proof import load_template
from task_encoders.text.tokenizer import load_tokenizer


def beside_lengths(default: Any) -> Any:
    """Declare an option that changes pixels or positions but no length. No artifact contains pixels
    or positions, so it is not in the fingerprint."""
    return Field(default, json_schema_extra={"changes_lengths": False})


class ModelOptions(BaseModel):
    """The `model:` section of a configuration; the same values must be used in training.

    A family declares its own options, with their defaults, in a subclass, `Family.Options`;
    `families.model_options` makes the right one.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    #: a name in FAMILIES
    family: str
    #: "builtin", a checkpoint folder, or a hub name
    processor: LocalOrRemotePath = "builtin"
    #: an image with more pixels in its file, or a video with more than a quarter of them in a
    #: frame, is set aside (default: Pillow's bomb threshold)
    max_image_pixels: Count | None = None
    #: a video with more frames in its file is set aside
    max_video_frames: Count = MAX_VIDEO_FRAMES
    #: what carries loss, if messages do not say otherwise: all answers, or all text of a caption or
    #: document; the last answer; or what follows a sample's first image or video
    loss_on: Literal["all", "last", "after_media"] = "all"
    #: special tokens of the vocabulary that texts may spell, such as ["<|box_start|>",
    #: "<|box_end|>"]; others are text. Not those of the chat template, of media and of ends
    control_tokens: Annotated[tuple[str, ...], IF_ON] = ()
    #: variables of the chat template, such as {enable_thinking: false} or {add_vision_id: true}
    template_options: Values = ()
    #: thoughts of the answers before the last question: as the chat template does by itself, or
    #: dropped, or kept and trained, by its variable preserve_thinking. Refused where it cannot
    earlier_thoughts: Annotated[Literal["template", "drop", "keep"], if_other_than("template")] = (
        "template"
    )
    #: whether an empty thought at the beginning of an answer (`<think>`, white space, `</think>`,
    #: white space) carries loss: train, or mask
    empty_thoughts: Annotated[Literal["train", "mask"], if_other_than("train")] = "train"

    def check_range(self, least: str, most: str, floor: int) -> None:
        """Check that two options are `floor` <= least <= most. Raises ValueError."""
        if not floor <= getattr(self, least) <= getattr(self, most):
            raise ValueError(
                f"{least} {getattr(self, least)} and {most} {getattr(self, most)} must satisfy "
                f"{floor} <= {least} <= {most}"
            )

    @classmethod
    def changes_lengths(cls, name: str) -> bool:
        """Tell whether an option belongs in the fingerprint of what was measured."""
        return not cls.model_fields[name].json_schema_extra

    def stored(self, name: str) -> str | int:
        """Return an option as a fingerprint holds it. Its declared type decides: a family's default
        may be 200 where a configuration gives 200.0, and both are the same option."""
        value: float | str | None = getattr(self, name)
        if type(self).model_fields[name].annotation is float:
            return f"{value:g}"
        assert not isinstance(value, float)
        return 0 if value is None else value


class ResizedOptions(ModelOptions):
    """Options of families whose processors resize with torch, if they are not told otherwise."""

    #: how images and frames are resized: pil, or torch, as transformers 5 does with torchvision
    resize: Literal["pil", "torch"] = beside_lengths("torch")


class FamilyEncoder(ABC):
    """Encoder of one sample: its length and its arrays by the same code, on a chat template and
    media tokens.

    Captioning is the form of pretraining: media, caption, end token, no chat template; everything
    but the media carries loss. In conversations answers and their end tokens carry loss.
    """

    #: Families with the same name here have the same lengths, by construction.
    LENGTHS_OF: ClassVar[str]
    #: Raised by one with every change that alters a sample's tokens: older artifacts are refused.
    TEMPLATE_VERSION: ClassVar[int] = 1
    #: Whether Qwen's built-in vocabulary is its own, and the tokens after the special ones there.
    HAS_BUILTIN: ClassVar[bool] = False
    TEXT_TOKENS: ClassVar[tuple[str, ...]] = ()
    PAD_TOKEN: ClassVar[str]
    #: Control tokens of media, by the names of their ids in transformers' configs.
    MEDIA_TOKENS: ClassVar[Mapping[str, str]]
    #: The chat template of published checkpoints, in Jinja; a checkpoint's own takes precedence.
    #: None: the family has none, but its own `render`.
    TEMPLATE: ClassVar[str | None] = None
    #: How templates of its vocabulary write control tokens, media and answers.
    DIALECT: ClassVar[Dialect] = CHATML
    #: Control tokens before a caption, and the one after it.
    CAPTION_START: ClassVar[tuple[Control, ...]] = ()
    CAPTION_END: ClassVar[Control]
    #: Rows of position_ids.
    POSITION_ROWS: ClassVar[int] = 3
    #: Control tokens before and after each picture.
    AROUND_PICTURE: ClassVar[tuple[str, ...]] = ()
    #: How transformers' model takes images: a name in model_inputs.IMAGE_LAYOUTS.
    IMAGE_LAYOUT: str = "patches"
    #: Whether a video's steps are pictures among the images of its row. Their patches are as wide
    #: as an image's: `normalisation` repeats no frame.
    VIDEOS_AS_IMAGES: ClassVar[bool] = False
    #: Frames of an image's patches.
    IMAGE_DEPTH: ClassVar[int] = 1
    template: ChatTemplate
    #: Fingerprint of a checkpoint's chat template, if it writes something else than the family's.
    own_template: str = ""

    def __init__(self, options: ModelOptions, vision: VisionSettings) -> None:
        """Load the tokenizer and the chat template; pictures are cut as `vision` says."""
        if options.processor == BUILTIN and not self.HAS_BUILTIN:
            raise ValueError(
                f"family {options.family} has no built-in vocabulary; name a checkpoint folder or "
                "a hub name as processor"
            )
        self.options, self.vision = options, vision
        tokenizer = load_tokenizer(options.processor, self.TEXT_TOKENS, options.control_tokens)
        self.tokenizer = tokenizer
        self.pad_token_id = tokenizer.special_id(self.PAD_TOKEN)
        self.max_image_pixels = pixels = options.max_image_pixels or MAX_IMAGE_PIXELS
        # Files of media within these limits: SampleError, and of videos MissingPyAVError.
        frames = options.max_video_frames
        self.image_header = partial(read_image_header, max_image_pixels=pixels)
        self.video_header = partial(read_video_header, max_frame_pixels=pixels, max_frames=frames)
        self.decode_image = partial(decode_image, max_image_pixels=pixels)
        _, table = BACKENDS[vision.resize]
        repeats = vision.temporal_patch_size // self.IMAGE_DEPTH
        self.normalisation = Normalisation(table(vision.mean, vision.std), repeats)
        self.texts = TextSpans(tokenizer)
        if self.TEMPLATE is not None:
            given = dict(options.template_options), options.earlier_thoughts
            loaded = load_template(options.processor, self.TEMPLATE, *given, self.DIALECT)
            self.template, self.own_template = loaded
        elif options.earlier_thoughts != "template":
            raise ValueError(f"family {options.family} has no earlier_thoughts; remove it")
        #: under the names of transformers' configs
        self.media_token_ids: Mapping[str, int] = {
            name: tokenizer.special_id(token) for name, token in self.MEDIA_TOKENS.items()
        }
        self.image_token_id = self.media_token_ids["image_token_id"]
        self.video_token_id = self.media_token_ids.get("video_token_id", self.image_token_id)
        self._around = tuple(Span([tokenizer.special_id(one)], 1) for one in self.AROUND_PICTURE)

    # Decided by a family.

    def render(self, sample: SourceSample, weights: Sequence[float]) -> Iterable[Piece]:
        """Return the pieces of a checked sample, media included; `weights` are those of the answers
        in the loss. Raises SampleError."""
        if sample.task == "captioning":
            pieces = caption_pieces(sample, after_media=self.options.loss_on == "after_media")
            end = () if sample.turns[0].truncated else (self.CAPTION_END,)
            return [*self.CAPTION_START, *pieces, *end]
        return self.template.pieces(sample, weights)

    def for_medium(self, options: MediumOptions) -> "FamilyEncoder":
        """Return the encoder of media with these options, which takes them in place of its own.
        Raises SampleError where the family reads none, as most do."""
        if options:
            raise SampleError(
                "bad_record",
                f"family {self.options.family} reads no options of a medium "
                f"({', '.join(options.given)}); leave them out",
            )
        return self

    @abstractmethod
    def image_medium(self, height: int, width: int) -> Medium:
        """Return the medium of an image of this size. Raises SampleError if it cannot be used."""

    def encode_image(self, image: PillowImage.Image) -> tuple[Bytes, Medium]:
        """Cut a decoded image into patches (P, C·p·p). Raises SampleError."""
        medium = self.image_medium(image.height, image.width)
        return self.cut([image], medium.grid, self.IMAGE_DEPTH), medium

    def sample_video(self, header: VideoHeader) -> SampledVideo:
        """Sample frames of a video. Raises SampleError if it cannot be used, as by default."""
        raise SampleError("bad_video", f"family {self.options.family} takes no videos")

    @property
    def takes_videos(self) -> bool:
        """Whether the family has a rule for frames."""
        return type(self).sample_video is not FamilyEncoder.sample_video

    def encode_video(self, data: bytes) -> tuple[Bytes, Medium]:
        """Decode frames of a video file and cut them into patches (Q, C·T·p·p). Raises SampleError,
        truncated_video if fewer frames can be decoded than the container has."""
        header = self.video_header(io.BytesIO(data))
        sampled = self.sample_video(header)
        frames = decode_frames(data, header, sampled.frames, self.max_image_pixels)
        rows = self.cut(frames, sampled.grid, self.vision.temporal_patch_size)
        return rows, Medium(sampled.grid, sampled)

    def grid_of(self, size: tuple[int, int], num_frames: int = 1) -> Grid:
        """Return the grid of frames that are resized to this height and width."""
        depth, patch = self.vision.temporal_patch_size, self.vision.patch_size
        return -(-num_frames // depth), size[0] // patch, size[1] // patch

    def sampled(
        self, header: VideoHeader, frames: Sequence[int], size: tuple[int, int]
    ) -> SampledVideo:
        """Describe frames of a video that are resized to this height and width."""
        seconds = seconds_per_grid(header, len(frames), self.vision.temporal_patch_size)
        return SampledVideo(self.grid_of(size, len(frames)), frames, seconds, header.fps)

    def cut(self, frames: Iterable[PillowImage.Image], grid: Grid, depth: int) -> Bytes:
        """Cut frames into patches (t·h·w, C·depth·p·p); an image is one frame."""
        return frame_patches(frames, grid, depth, self.vision)

    @abstractmethod
    def medium_spans(self, medium: Medium) -> Iterable[Span]:
        """Return the tokens of an image or a video."""

    def picture_spans(self, token_id: int, grid: Grid, interval: float = 1.0) -> list[Span]:
        """Return a token per merge_size² patches, between those of AROUND_PICTURE."""
        merge, (before, after) = self.vision.merge_size, self._around
        merged = grid[0], grid[1] // merge, grid[2] // merge
        return [before, Span((token_id,), math.prod(merged), 0.0, merged, interval), after]

    @staticmethod
    def blank_image(hf_config: Any) -> BlankImage:
        """Return a small image for rows without one; `hf_config` is transformers' of the whole
        model."""
        vision = hf_config.vision_config
        return two_tokens(vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)

    # Common to all.

    @cached_property
    def written_tokens(self) -> frozenset[str]:
        """Control tokens that samples have besides those of their texts."""
        names = {self.PAD_TOKEN, *self.MEDIA_TOKENS.values()}
        medium = self.image_medium(64, 64)
        ids = [token for span in self.medium_spans(medium) for token in span.ids]
        names |= {name for name, is_control in self.tokenizer.spell(ids) if is_control}
        for task in ("captioning", "bmr"):
            for piece in self.render(SourceSample("", task, (Turn("a", "b"),)), [1.0]):
                parts = piece.pieces if isinstance(piece, Fixed) else (piece,)
                names |= {part.token for part in parts if isinstance(part, Control)}
        return frozenset(names)

    @cached_property
    def fingerprint(self) -> Mapping[str, str | int]:
        """Everything that lengths depend on: family, tokenizer, template, pixel limits, frames."""
        spelled = sorted(self.options.control_tokens)
        names = [n for n in type(self.options).model_fields if n not in ModelOptions.model_fields]
        names += ["max_video_frames"] * self.takes_videos
        return {
            "family": self.LENGTHS_OF,
            "template": self.TEMPLATE_VERSION,
            "tokenizer": self.tokenizer.fingerprint,
            "max_image_pixels": self.max_image_pixels,
            **{
                name: self.options.stored(name)
                for name in names
                if self.options.changes_lengths(name) and name in self.options.model_dump()
            },
            # Only where they differ from the default: fingerprints written before them stay valid.
            **({"chat_template": self.own_template} if self.own_template else {}),
            **({"loss_on": self.options.loss_on} if self.options.loss_on != "all" else {}),
            **({"control_tokens": " ".join(spelled)} if spelled else {}),
            **({"empty_thoughts": "mask"} if self.options.empty_thoughts == "mask" else {}),
        }

    def measure(
        self,
        sample: SourceSample,
        image_sizes: Sequence[tuple[int, int]],
        videos: Sequence[VideoHeader] = (),
    ) -> SampleLength:
        """Measure a sample from the (height, width) of its images, EXIF orientation applied, and
        the headers of its videos. Raises SampleError if it cannot be encoded."""
        media, placed = self._from_headers(sample, image_sizes, videos)
        spans = [span for _, own in placed for span in own]
        num_tokens = num_loss_tokens = 0
        for span in spans:
            num_tokens += span.num_tokens
            if span.weight:
                num_loss_tokens += span.num_tokens
        if spans[0].weight:  # the very first token has nothing to be predicted from
            num_loss_tokens -= 1
        if not media:
            return SampleLength(num_tokens, num_loss_tokens, 0, ())
        grids = tuple([medium.grid for medium in media])
        num_patches = sum([t * h * w for t, h, w in grids])
        prefix = self._prefix(placed, spans)
        return SampleLength(num_tokens, num_loss_tokens, num_patches, grids, prefix)

    def _from_headers(
        self,
        sample: SourceSample,
        image_sizes: Sequence[tuple[int, int]],
        videos: Sequence[VideoHeader],
    ) -> tuple[list[Medium], list[tuple[Piece, Sequence[Span]]]]:
        """Return a sample's images and then its videos, and its pieces, each with its spans."""
        of_images, of_videos = self._of_media(sample, len(image_sizes), len(videos))
        images = [one.image_medium(*size) for one, size in zip(of_images, image_sizes, strict=True)]
        taken = [one.sample_video(video) for one, video in zip(of_videos, videos, strict=True)]
        clips = [Medium(video.grid, video) for video in taken]
        spans = map(self.medium_spans, images), map(self.medium_spans, clips)
        return images + clips, self._placed(sample, *spans)

    def _of_media(
        self, sample: SourceSample, num_images: int, num_videos: int
    ) -> tuple[Sequence["FamilyEncoder"], Sequence["FamilyEncoder"]]:
        """Return the encoder of each image, and of each video. Raises SampleError, and ValueError
        for another number of media than the sample's."""
        if (num_images, num_videos) != (len(sample.images), len(sample.videos)):
            raise ValueError(
                f"{num_images} images and {num_videos} videos given for the {len(sample.images)} "
                f"and {len(sample.videos)} of {sample}"
            )
        each = [self] * (num_images + num_videos)
        if sample.options:
            each = [self.for_medium(one) for one in sample.options]
        return each[:num_images], each[num_images:]

    def _prefix(
        self, placed: Sequence[tuple[Piece, Sequence[Span]]], spans: Sequence[Span]
    ) -> Prefix | None:
        """Return the prefix of a sample of these pieces, whose spans are all `spans`."""
        end = num_images = num_videos = num_spans = 0
        for part, own in placed:
            if any(span.weight for span in own):
                break
            if end and isinstance(part, Text | Answer) and part.text.strip():
                break
            num_spans += len(own)
            if isinstance(part, Image | Video):
                end = num_spans
                num_images += isinstance(part, Image)
                num_videos += isinstance(part, Video)
        following = next((span for span in spans[end:] if span.num_tokens), None)
        if not end or following is None:
            return None
        num_tokens = sum([span.num_tokens for span in spans[:end]])
        if following.weight:
            # The trunk's last token has to predict the first of each branch, so it heads each. One
            # that stands for part of a picture cannot: it would be another picture's.
            if spans[end - 1].ids[-1] in (self.image_token_id, self.video_token_id):
                return None
            num_tokens -= 1
        return Prefix(spans[:end], num_tokens, num_images, num_videos)

    def notes(self, sample: SourceSample) -> Iterator[tuple[str, str]]:
        """Yield warnings of a measured sample's tokens: a line for all such samples, an example."""
        line = "thoughts (reasoning_content, <think>) of earlier turns are cut by the chat template"
        is_asked = self.options.earlier_thoughts == "drop"
        if self.TEMPLATE is not None and sample.task != "captioning" and not is_asked:
            yield from ((line, repr(one[:60])) for one in self.template.left_out(sample)[:1])

    def tokenize(
        self,
        sample: SourceSample,
        image_sizes: Sequence[tuple[int, int]],
        videos: Sequence[VideoHeader] = (),
    ) -> TokenizedSample:
        """Return the tokens and loss weights that `encode` gives a sample. Arguments and errors are
        those of `measure`."""
        places: dict[type[Piece], list[Place]] = {Image: [], Video: []}
        spans: list[Span] = []
        start = 0
        for part, own in self._from_headers(sample, image_sizes, videos)[1]:
            num_tokens = sum(span.num_tokens for span in own)
            if isinstance(part, Image | Video):
                places[type(part)].append((start, num_tokens))
            spans += own
            start += num_tokens
        return TokenizedSample(*tokens_and_weights(spans), places[Image], places[Video])

    def encode(
        self,
        sample: SourceSample,
        images: Sequence[bytes | PillowImage.Image | EncodedMedium],
        videos: Sequence[bytes | EncodedMedium] = (),
    ) -> EncodedSample:
        """Return the arrays of a sample. Images are files, or what `decode_image` or `encode_image`
        returned for them; videos are files, or what `encode_video` returned.

        Raises:
            SampleError: the sample cannot be encoded.
            MissingPyAVError: it has videos, and PyAV is not installed.
        """
        decoded = [self.decode_image(one) if isinstance(one, bytes) else one for one in images]
        own_images, own_videos = self._of_media(sample, len(images), len(videos))
        image_rows = [
            one if isinstance(one, tuple) else own.encode_image(one)
            for own, one in zip(own_images, decoded, strict=True)
        ]
        video_rows = [
            one if isinstance(one, tuple) else own.encode_video(one)
            for own, one in zip(own_videos, videos, strict=True)
        ]
        of_images = [self.medium_spans(medium) for _, medium in image_rows]
        of_videos = [self.medium_spans(medium) for _, medium in video_rows]
        placed = self._placed(sample, of_images, of_videos)
        spans = [span for _, own in placed for span in own]
        tokens, loss_weights = tokens_and_weights(spans)
        video_end = getattr(self.options, "video_end", "longer_side")
        if self.VIDEOS_AS_IMAGES and videos:  # in the order of their tokens
            stills, clips = iter(image_rows), iter(video_rows)
            image_rows, video_rows = [], []
            for part, _ in placed:
                if isinstance(part, Image):
                    image_rows.append(next(stills))
                elif isinstance(part, Video):
                    rows, (grid, _) = next(clips)
                    picture = Medium((1, *grid[1:]))
                    image_rows += [(own, picture) for own in np.split(rows, grid[0])]
        image_pixels, image_grids = self._stacked(image_rows, self.IMAGE_DEPTH)
        video_pixels, video_grids = self._stacked(video_rows, self.vision.temporal_patch_size)
        return EncodedSample(
            key=sample.key,
            tokens=tokens,
            loss_weights=loss_weights,
            position_ids=position_ids(spans, self.POSITION_ROWS, video_end),
            image_pixels=image_pixels,
            image_grid_thw=image_grids,
            video_pixels=video_pixels,
            video_grid_thw=video_grids,
            normalisation=self.normalisation,
            image_layout=self.IMAGE_LAYOUT,
        )

    def _stacked(
        self, encoded: Sequence[tuple[Bytes, Medium]], depth: int
    ) -> tuple[Bytes, npt.NDArray[np.int32]]:
        """Stack the patches of all media of a kind, (P, C·depth·p·p), and their grids, (N, 3)."""
        grids = np.array([medium.grid for _, medium in encoded], dtype=np.int32).reshape(-1, 3)
        rows = [own for own, _ in encoded]
        if not rows:
            rows = [np.empty((0, 3 * depth * self.vision.patch_size**2), dtype=np.uint8)]
        return rows[0] if len(rows) == 1 else np.concatenate(rows), grids

    def parts(self, sample: SourceSample) -> Iterable[Piece]:
        """Render the texts and media of a checked sample. Raises SampleError."""
        weights = [turn.weight for turn in sample.turns]
        if self.options.loss_on == "last":
            weights[:-1] = [0.0] * (len(weights) - 1)
        elif self.options.loss_on == "after_media" and sample.task != "captioning":
            first = _first_with_media(sample)
            weights[:first] = [0.0] * first
        if not any(weights):
            raise SampleError("bad_record", "none of the answers that may carry loss is trained")
        if self.options.earlier_thoughts == "drop" and "</think>" not in self.template.jinja.words:
            asked = [i for i, turn in enumerate(sample.turns) if turn.role == "user"]
            if any("</think>" in turn.answer for turn in sample.turns[: max(asked, default=0)]):
                why = "the chat template drops no thoughts in texts: name them reasoning_content"
                raise SampleError("not_in_template", why)
        pieces = self.render(sample, weights)
        if self.options.empty_thoughts == "mask" and sample.task != "captioning":
            pieces = map(without_empty_thought, pieces)
        is_open = sample.turns[-1].truncated and sample.task != "captioning"
        return without_end(pieces) if is_open else pieces

    def _placed(
        self,
        sample: SourceSample,
        images: Iterable[Iterable[Span]],
        videos: Iterable[Iterable[Span]],
    ) -> list[tuple[Piece, Sequence[Span]]]:
        """Return the pieces of a sample in order, each with its tokens as spans: those given of its
        media in their places. Raises SampleError."""
        check_sample(sample)
        of_images, of_videos = iter(images), iter(videos)
        placed: list[tuple[Piece, Sequence[Span]]] = []
        for part in self.parts(sample):
            if isinstance(part, Image):
                placed.append((part, [*next(of_images)]))
            elif isinstance(part, Video):
                placed.append((part, [*next(of_videos)]))
            else:
                placed.append((part, self.texts.spans(part)))
        return placed


def _first_with_media(sample: SourceSample) -> int:
    """Return the number of the first turn of a conversation whose prompt shows an image or a video;
    0 if none does, or they go in front."""
    for number, turn in enumerate(sample.turns):
        for _, placeholder, names in sample.by_kind:
            if names and count_placeholders([turn], placeholder, sample.task):
                return number
    return 0


#: Prefixes of tensor names in published checkpoints: model and visual; model.language_model and
#: model.visual, as in transformers' memory; or language_model.model and vision_tower.
TensorNames = Literal["plain", "nested", "llava"]


#: Sizes of the tiny models: fields of transformers' text configs, and of towers' configs.
TINY: Final = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY_TOWER: Final = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def rope(theta: float, mrope_section: Sequence[int], **more: Any) -> dict[str, Any]:
    """Return `rope_parameters` of a tiny model."""
    own = {"rope_type": "default", "rope_theta": theta, "mrope_section": [*mrope_section]}
    return own | more


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of a model with random weights: fields of transformers' text and vision configs."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    #: fields of the whole config: ids of special tokens, tie_word_embeddings
    whole: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """A model family, as its own module declares it."""

    name: str
    #: its options, with their defaults
    Options: type[ModelOptions]
    #: its encoder's class, called with the options alone. Raises ValueError where these or the
    #: checkpoint do not fit
    build: type[FamilyEncoder]
    #: what its usual model costs, used where no checkpoint says otherwise
    cost: ModelCost
    #: what transformers' classes of its model begin with; None: it has none
    transformers_name: str | None
    #: its name in the config.json of checkpoints, if that is not its own
    other_names: tuple[str, ...] = ()
    #: transformers' class of its processor, where several families have one model type
    processor: str = ""
    #: the first transformers whose model takes its batches, where that is not the oldest accepted
    since: str = ""
    #: how its published checkpoints name tensors
    tensor_names: TensorNames = "plain"
    #: the model that is trained without a checkpoint
    tiny: Preset = Preset({}, {}, {})
    #: whether `launch` builds its language model of megatron-core's layers
    megatron_core: bool = False
    #: whether its language model has recurrent layers, which carry a state from token to token
    is_recurrent: bool = False

    @property
    def model_types(self) -> tuple[str, ...]:
        """Accepted values of `model_type` in config.json."""
        return self.other_names or (self.name,)

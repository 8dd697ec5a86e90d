"""Common parts of the Qwen-VL families: ChatML, patches in blocks of merge_size², vision tags."""

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from task_encoders.families.base.encoder import FamilyEncoder
from task_encoders.families.base.options import ModelOptions, beside_lengths
from task_encoders.families.base.spans import Medium, Span, patch_spans
from task_encoders.field_types import Count, Number
from task_encoders.media import image, patches, video
from task_encoders.media.image import CLIP_MEAN, CLIP_STD, VisionSettings
from task_encoders.media.patches import Bytes
from task_encoders.media.video import SampledVideo, VideoSettings
from task_encoders.media.video_file import VideoHeader
from task_encoders.samples.limits import MAX_IMAGE_PIXELS
from task_encoders.text.load_tokenizer import load_tokenizer
from task_encoders.text.pieces import Control
from task_encoders.text.qwen_vocabulary import MEDIA_TOKENS


class QwenVLOptions(ModelOptions):
    """Images and videos of any shape, resized within limits."""

    #: limits of an image after resizing, as in training
    min_pixels: Count
    #: see min_pixels
    max_pixels: Count
    #: an image longer than this in one direction is set aside
    max_aspect_ratio: Annotated[Number, Field(ge=1)] = 200.0
    #: frames taken per second of video
    video_fps: Annotated[Number, Field(gt=0)] = 2.0
    #: limits of the frames taken; never more than the video has
    video_min_frames: Count = 4
    #: see video_min_frames
    video_max_frames: Count = 768
    #: limits of a frame (qwen3_vl: of a whole video) after resizing
    video_min_pixels: Count
    #: see video_min_pixels
    video_max_pixels: Count
    #: frames of a video share 0.9 times that many tokens' pixels (default: no such limit)
    video_max_tokens: Count | None = None
    #: how images and frames are resized: pil, or torch, as transformers 5 does with torchvision,
    #: and for videos always. Values differ by up to .03 in images, .29 in videos; lengths do not
    resize: Literal["pil", "torch"] = beside_lengths("pil")

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"min_pixels {self.min_pixels} > max_pixels {self.max_pixels}; lower min_pixels, "
                "or raise max_pixels if it was meant in tokens"
            )
        _ = self.video
        return self

    @property
    def video(self) -> VideoSettings:
        """The options of videos. Raises ValueError where limits contradict each other."""
        return VideoSettings(
            fps=self.video_fps,
            min_frames=self.video_min_frames,
            max_frames=self.video_max_frames,
            min_pixels=self.video_min_pixels,
            max_pixels=self.video_max_pixels,
            max_tokens=self.video_max_tokens,
        )


class QwenVLEncoder(FamilyEncoder):
    """A family on Qwen's vocabulary and templates."""

    PATCH_SIZE: ClassVar[int]
    MEAN: ClassVar[tuple[float, float, float]] = CLIP_MEAN
    STD: ClassVar[tuple[float, float, float]] = CLIP_STD
    #: Tokens after the special ones in the built-in vocabulary.
    TEXT_TOKENS: ClassVar[tuple[str, ...]] = ()
    MEDIA_TOKENS = MEDIA_TOKENS
    CAPTION_END = Control("<|im_end|>", 1.0)
    #: Frames that a video's file may have.
    LENGTHS_FOLLOW = ("max_video_frames",)

    #: Temporal positions per second of a video; None: one per step of its grid.
    tokens_per_second: float | None = None

    options: QwenVLOptions

    def __init__(self, options: QwenVLOptions) -> None:
        self.vision = VisionSettings(
            options.min_pixels,
            options.max_pixels,
            options.max_aspect_ratio,
            options.max_image_pixels or MAX_IMAGE_PIXELS,
            patch_size=self.PATCH_SIZE,
            mean=self.MEAN,
            std=self.STD,
            resize=options.resize,
        )
        self.video = options.video
        super().__init__(
            options,
            load_tokenizer(options.processor, self.TEXT_TOKENS),
            pad_token="<|endoftext|>",
            patch_area=self.vision.patch_size**2,
            normalisation=patches.normalisation(self.vision),
        )
        ids = self.media_token_ids
        self.image_token_id = ids["image_token_id"]
        self.video_token_id = ids["video_token_id"]
        self._before = Span([ids["vision_start_token_id"]], 1)
        self._after = Span([ids["vision_end_token_id"]], 1)

    def image_medium(self, height: int, width: int) -> Medium:
        height, width = image.smart_resize(height, width, self.vision)
        patch = self.vision.patch_size
        return Medium((1, height // patch, width // patch))

    def sample_video(self, header: VideoHeader) -> SampledVideo:
        return video.sample_video(header, self.video, self.vision)

    def encode_video(self, data: bytes) -> tuple[Bytes, Medium]:
        most = self.options.max_video_frames
        rows, sampled = video.video_patches(data, self.sample_video, self.vision, most)
        return rows, Medium(sampled.grid, sampled)

    def medium_spans(self, medium: Medium) -> Iterable[Span]:
        token_id, interval = self.image_token_id, 1.0
        if medium.video is not None:
            token_id = self.video_token_id
            if self.tokens_per_second is not None:
                interval = self.tokens_per_second * medium.video.seconds_per_step
        merge, tags = self.vision.merge_size, (self._before, self._after)
        return patch_spans(token_id, medium.grid, merge, *tags, interval)

"""Common parts of the GLM-V families.

The limits of an image's pixels are of two frames, as of a video's of all. A video is a run of
pictures of two frames each, every one before its time:

    <|begin_of_video|> <|begin_of_image|> … <|end_of_image|> 0 <|begin_of_image|> … <|end_of_video|>

Their tokens are those of images, by which transformers' models take a row's images or its videos,
never both: here the pictures of videos are encoded as images.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from task_encoders.families.base.options import ModelOptions, beside_lengths
from task_encoders.families.base.spans import Medium, Span, patch_spans
from task_encoders.families.base.videos_as_images import VideosAsImagesEncoder
from task_encoders.field_types import Count, Number
from task_encoders.media import patches
from task_encoders.media.image import VisionSettings
from task_encoders.media.patches import Normalisation
from task_encoders.media.video import SampledVideo, seconds_per_grid, volume_resize
from task_encoders.media.video_file import VideoHeader
from task_encoders.samples import SampleError
from task_encoders.samples.limits import MAX_IMAGE_PIXELS
from task_encoders.text.glm_template import GLM, GLM_TEMPLATE
from task_encoders.text.load_tokenizer import load_tokenizer
from task_encoders.text.pieces import Control, Text

_PATCH: Final = 14
#: Pixels of one token: a square of 2 by 2 patches.
_TOKEN: Final = (2 * _PATCH) ** 2
#: Frames of a picture.
DEPTH: Final = 2


class GlmOptions(ModelOptions):
    """Defaults of transformers' processors; limits of pixels are `size` in a checkpoint's files."""

    #: limits of an image, counted twice (for its two frames), after resizing, as in training
    min_pixels: Count = 16 * _TOKEN
    #: see min_pixels
    max_pixels: Count = 15_000 * _TOKEN
    #: an image or a video longer than this in one direction is set aside
    max_aspect_ratio: Annotated[Number, Field(ge=1)] = 200.0
    #: limits of a whole video after resizing
    video_min_pixels: Count = 16 * _TOKEN
    #: see video_min_pixels
    video_max_pixels: Count = 60_000 * _TOKEN
    #: how images and frames are resized: pil, or torch, as transformers 5 does with torchvision
    resize: Literal["pil", "torch"] = beside_lengths("torch")

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        for kind in ("", "video_"):
            least, most = (getattr(self, f"{kind}{end}_pixels") for end in ("min", "max"))
            if not _TOKEN <= least <= most:
                raise ValueError(
                    f"{kind}min_pixels {least} and {kind}max_pixels {most} must satisfy {_TOKEN} "
                    f"<= {kind}min_pixels <= {kind}max_pixels"
                )
        return self


class GlmEncoder(VideosAsImagesEncoder):
    """Common parts: one picture per step of a video."""

    MEDIA_TOKENS: ClassVar = {
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    }
    TEMPLATE = GLM_TEMPLATE
    DIALECT = GLM
    CAPTION_START = (Control("[gMASK]"), Control("<sop>"))
    CAPTION_END = Control("<|endoftext|>", 1.0)
    IMAGE_DEPTH = DEPTH
    #: Frames that a video's file may have.
    LENGTHS_FOLLOW = ("max_video_frames",)

    options: GlmOptions

    def __init__(self, options: GlmOptions) -> None:
        options.require_checkpoint()
        self.vision = VisionSettings(
            options.min_pixels,
            options.max_pixels,
            options.max_aspect_ratio,
            options.max_image_pixels or MAX_IMAGE_PIXELS,
            patch_size=_PATCH,
            temporal_patch_size=DEPTH,
            resize=options.resize,
        )
        values = patches.normalisation(self.vision)
        super().__init__(
            options,
            load_tokenizer(options.processor),
            pad_token="<|endoftext|>",
            patch_area=DEPTH * _PATCH**2,  # an image's patches have both of its frames
            normalisation=Normalisation(values.table, repeats=1),
        )
        self._tags = {name: Span([one], 1) for name, one in self.media_token_ids.items()}

    def image_medium(self, height: int, width: int) -> Medium:
        limits = self.options.min_pixels, self.options.max_pixels
        return Medium(self._grid(DEPTH, height, width, limits))

    def _grid(
        self, num_frames: int, height: int, width: int, limits: tuple[int, int]
    ) -> tuple[int, int, int]:
        height, width = volume_resize(num_frames, height, width, self.vision, limits)
        return num_frames // DEPTH, height // _PATCH, width // _PATCH

    def sample_video(self, header: VideoHeader) -> SampledVideo:
        if header.fps is None:
            raise SampleError("bad_video", f"{header.num_frames} frames without a frame rate")
        frames = list(dict.fromkeys(self.frame_numbers(header.num_frames, header.fps)))
        if not frames:
            raise SampleError("bad_video", f"{header.num_frames / header.fps:.2f} s: no frame")
        num_frames = len(frames) + len(frames) % DEPTH  # the last one is repeated
        limits = self.options.video_min_pixels, self.options.video_max_pixels
        return SampledVideo(
            self._grid(num_frames, header.height, header.width, limits),
            frames,
            seconds_per_grid(header, num_frames, DEPTH),
            header.fps,
        )

    @abstractmethod
    def frame_numbers(self, total: int, fps: float) -> Sequence[int]:
        """Ascending numbers of the frames that are taken; repeated ones count once."""

    @abstractmethod
    def time_text(self, seconds: float) -> str:
        """The time of a picture, as it is written after it."""

    def medium_spans(self, medium: Medium) -> Iterator[Span]:
        tags, (_, height, width) = self._tags, medium.grid
        picture = patch_spans(
            self.media_token_ids["image_token_id"],
            (1, height, width),
            self.vision.merge_size,
            tags["image_start_token_id"],
            tags["image_end_token_id"],
        )
        if medium.video is None:
            yield from picture
            return
        yield tags["video_start_token_id"]
        for number in medium.video.frames[::DEPTH]:
            yield from picture
            yield from self.texts.spans(Text(self.time_text(number / (medium.video.fps or 1.0))))
        yield tags["video_end_token_id"]

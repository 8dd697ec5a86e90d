"""The options of a model, declared once: what lengths and tensors of samples depend on.

`families.ModelSettings` is the class to use: it knows which of them a family has, and its defaults.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from task_encoders.field_types import Count, LocalOrRemotePath, NonNegative, Number, Values
from task_encoders.media.video import VideoSettings
from task_encoders.media.video_file import MAX_VIDEO_FRAMES


def added(default: Any, **extra: Any) -> Any:
    """An option that is stored only where it differs from its default, so that artifacts written
    before it existed stay valid."""
    return Field(default, exclude_if=lambda value: value == default, **extra)


def beside_lengths(default: Any) -> Any:
    """An `added` option that changes pixels or positions but no length. No artifact contains
    those, so it is in no fingerprint."""
    return added(default, json_schema_extra={"changes_lengths": False})


def changes_lengths(name: str) -> bool:
    """Whether an option belongs into the fingerprint of what was measured."""
    return not ModelOptions.model_fields[name].json_schema_extra


class ModelOptions(BaseModel):
    """The `model:` section of a configuration; the same values must be used in training.

    A 0 stands for the family's default, or for an option that it does not have.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    #: a name in FAMILIES
    family: str = "qwen2_vl"
    #: "builtin", a checkpoint folder, or a hub name
    processor: LocalOrRemotePath = "builtin"
    #: limits of an image after resizing
    min_pixels: NonNegative = 0
    max_pixels: NonNegative = 0
    #: an image longer than this in one direction is set aside
    max_aspect_ratio: Number = 0.0
    #: an image with more pixels in its file is set aside (default: Pillow's bomb threshold)
    max_image_pixels: Count | None = None
    #: frames taken per second of video, and limits for a whole one, as far as it has them
    video_fps: Number = 0.0
    video_min_frames: NonNegative = 0
    video_max_frames: NonNegative = 0
    #: limits of a frame (qwen3_vl: of a whole video) after resizing
    video_min_pixels: NonNegative = 0
    video_max_pixels: NonNegative = 0
    #: frames of a video share 0.9 times that many tokens' pixels (default: no such limit)
    video_max_tokens: Count | None = None
    #: a video with more frames in its file is set aside
    max_video_frames: Count = MAX_VIDEO_FRAMES
    #: how images and frames are resized: by Pillow, or by torch, five times as fast, with other
    #: values; each as one of transformers' two backends. Lengths do not depend on it.
    resize: Literal["pil", "torch"] = beside_lengths("pil")
    #: position of the text after a video: after the longer side of its grid, as in transformers
    #: from 5 on, or after its last position, as in transformers 4 and the trainers built on it
    video_end: Literal["longer_side", "last_position"] = beside_lengths("longer_side")
    #: which answers of a conversation carry loss, if their messages do not say otherwise
    loss_on: Literal["all", "last"] = added("all")
    #: values of variables that the chat template reads, such as {enable_thinking: false}
    template_options: Values = added(())

    #: square images of one size: side in pixels, side of a patch, tokens (default: one per patch)
    image_size: NonNegative = added(0)
    patch_size: NonNegative = added(0)
    tokens_per_image: NonNegative = added(0)
    #: images that are not square: padded with the mean colour, or as the tower's processor does it
    image_aspect: Literal["", "pad", "square"] = added("")
    #: whose normalisation is used: CLIP's or SigLIP's
    tower: Literal["", "clip", "siglip"] = added("")
    #: how conversations are written
    template: Literal["", "v1", "plain", "neva"] = added("")

    @field_validator("max_aspect_ratio")
    @classmethod
    def _check_aspect_ratio(cls, ratio: float) -> float:
        if 0 < ratio < 1:
            raise ValueError("the longer side over the shorter is at least 1")
        return ratio

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
            max_file_frames=self.max_video_frames,
        )

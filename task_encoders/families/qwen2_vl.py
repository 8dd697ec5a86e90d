"""Qwen2-VL, Qwen2.5-VL, LLaVA-OneVision-1.5, and what they share with Qwen3-VL: ChatML, patches in
blocks of merge_size², vision tags. Qwen2.5-VL has the lengths of Qwen2-VL; positions of its videos
follow the time."""

import copy
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from task_encoders.families.base.cost import ModelCost, TransformerShape
from task_encoders.families.base.family import (
    TINY,
    Family,
    FamilyEncoder,
    ModelOptions,
    Preset,
    beside_lengths,
    rope,
)
from task_encoders.families.base.spans import Medium, Span
from task_encoders.field_types import Count, Number
from task_encoders.media.image import CLIP_MEAN, CLIP_STD, VisionSettings, smart_resize
from task_encoders.media.video import SampledVideo, sampled_frames
from task_encoders.media.video_file import VideoHeader
from task_encoders.samples import SampleError
from task_encoders.samples.medium_options import AS_FAMILY, MediumOptions
from task_encoders.text.pieces import Control
from task_encoders.text.qwen_templates import QWEN2_VL_TEMPLATE
from task_encoders.text.qwen_vocabulary import (
    MEDIA_TOKEN_IDS,
    MEDIA_TOKENS,
    QWEN2_5_TEXT_TOKENS,
    QWEN3_TEXT_TOKENS,
    VOCAB_SIZE,
)
from task_encoders.text.tokenizer import checkpoint_json

_PATCH: Final = 14
#: Pixels of one token: a square of 2 by 2 patches.
_TOKEN: Final = (2 * _PATCH) ** 2


class QwenImageOptions(ModelOptions):
    """Images of any shape, resized within limits."""

    #: limits of an image after resizing, as in training
    min_pixels: Count
    #: see min_pixels
    max_pixels: Count
    #: an image longer than this in one direction is set aside
    max_aspect_ratio: Annotated[Number, Field(ge=1)] = 200.0
    #: how images and frames are resized: pil, or torch, as transformers 5 does with torchvision,
    #: and for videos always. Values differ by up to .03 in images, .29 in videos; lengths do not
    resize: Literal["pil", "torch"] = beside_lengths("pil")

    @model_validator(mode="after")
    def _check_pixels(self) -> Self:
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"min_pixels {self.min_pixels} > max_pixels {self.max_pixels}; lower min_pixels, "
                "or raise max_pixels if it was meant in tokens"
            )
        return self


class QwenVLOptions(QwenImageOptions):
    """Options of transformers' processors, with `video_fps` 2 as published checkpoints were
    trained. 5,120 tokens is what trainers give an image; their files say 16,384."""

    min_pixels: Count = 4 * _TOKEN
    max_pixels: Count = 5120 * _TOKEN
    #: frames taken per second of video
    video_fps: Annotated[Number, Field(gt=0)] = 2.0
    #: limits of the frames taken; never more than the video has
    video_min_frames: Count = 4
    #: see video_min_frames
    video_max_frames: Count = 768
    #: limits of a frame (qwen3_vl: of a whole video) after resizing
    video_min_pixels: Count = 128 * _TOKEN
    #: see video_min_pixels
    video_max_pixels: Count = 768 * _TOKEN
    #: frames of a video share 0.9 times that many tokens' pixels (default: no such limit)
    video_max_tokens: Count | None = None

    @model_validator(mode="after")
    def _check_videos(self) -> Self:
        self.check_range("video_min_frames", "video_max_frames", 2)
        self.check_range("video_min_pixels", "video_max_pixels", 2)
        return self


class QwenVLEncoder(FamilyEncoder):
    """A family on Qwen's vocabulary and templates."""

    PATCH_SIZE: ClassVar[int]
    MEAN: ClassVar[tuple[float, float, float]] = CLIP_MEAN
    STD: ClassVar[tuple[float, float, float]] = CLIP_STD
    HAS_BUILTIN = True
    PAD_TOKEN = "<|endoftext|>"
    MEDIA_TOKENS = MEDIA_TOKENS
    CAPTION_END = Control("<|im_end|>", 1.0)
    AROUND_PICTURE = ("<|vision_start|>", "<|vision_end|>")

    #: Temporal positions per second of a video; None: one per step of its grid.
    tokens_per_second: float | None = None

    options: QwenImageOptions
    #: of the medium that this is the encoder of
    asked: MediumOptions = AS_FAMILY

    def __init__(self, options: QwenImageOptions, **patches: Any) -> None:
        """Check the limits of pixels. `patches`: sizes of VisionSettings other than the class's."""
        vision = VisionSettings(
            max_aspect_ratio=options.max_aspect_ratio,
            mean=self.MEAN,
            std=self.STD,
            resize=options.resize,
            **{"patch_size": self.PATCH_SIZE, **patches},
        )
        options.check_range("min_pixels", "max_pixels", vision.factor**2)  # pixels of a token
        super().__init__(options, vision)

    def for_medium(self, options: MediumOptions) -> FamilyEncoder:
        if not options or not isinstance(self.options, QwenVLOptions):
            return super().for_medium(options)
        names = ("fps", "min_frames", "max_frames")
        update = {f"video_{name}": options.given[name] for name in names if name in options.given}
        encoder = copy.copy(self)
        encoder.asked, encoder.options = options, self.options.model_copy(update=update)
        return encoder

    def _limits(self, least: int, most: int, volume: int = 1) -> tuple[int, int]:
        """Return the pixel limits of an image, or of `volume` frames: the medium's own options take
        the place of these."""
        asked = self.asked
        least = least if asked.min_pixels is None else asked.min_pixels * volume
        most = most if asked.max_pixels is None else asked.max_pixels * volume
        if least > most:
            raise SampleError("bad_record", f"option min_pixels {least} > max_pixels {most}")
        return least, most

    def image_medium(self, height: int, width: int) -> Medium:
        limits = self._limits(self.options.min_pixels, self.options.max_pixels)
        return Medium(self.grid_of(smart_resize(height, width, self.vision, limits)))

    def sample_video(self, header: VideoHeader) -> SampledVideo:
        # A clip has the frames between two times in seconds, as qwen_vl_utils 0.0.14 counts them
        # (`calculate_video_frame_range`).
        start, end, total = self.asked.video_start, self.asked.video_end, header.num_frames
        if start is None and end is None:
            return self._sample_clip(header, 0)
        if header.fps is None:
            raise SampleError("bad_video", f"a clip of {total} frames without a frame rate")
        seconds = total / header.fps
        begin, stop = (max(0.0, min(at or 0.0, seconds)) * header.fps for at in (start, end))
        first = math.ceil(begin)
        last = total - 1 if end is None else min(math.floor(stop), total - 1)
        if first >= last:
            raise SampleError(
                "bad_record",
                f"option video_start {start} and video_end {end} of a video of {seconds:g} "
                f"seconds: no two frames from {first} to {last}",
            )
        return self._sample_clip(replace(header, num_frames=last - first + 1), first)

    def _asked_frames(self, total: int) -> int | None:
        """Return the even number of frames that a video's own options ask for."""
        nframes = self.asked.nframes
        if nframes is None:
            return None
        even = round(nframes / 2) * 2
        if not 2 <= even <= total:
            raise SampleError(
                "bad_record", f"option nframes {nframes} of a video of {total} frames"
            )
        return even

    def _sample_clip(self, header: VideoHeader, first: int) -> SampledVideo:
        """Take frames that are spread evenly, and resize each by itself. Their number is a multiple
        of the frames in a patch, as transformers' `sample_frames` counts them; of a video with
        fewer frames, which transformers refuses, all are taken. `header` describes the frames from
        `first` on that are shown."""
        options, depth = self.options, self.vision.temporal_patch_size
        assert isinstance(options, QwenVLOptions)
        num_sampled = total = header.num_frames
        if total >= depth:
            if header.fps is None:
                raise SampleError("bad_video", f"{total} frames without a frame rate")
            most = min(options.video_max_frames, total) // depth * depth
            wanted = max(total / header.fps * options.video_fps, options.video_min_frames)
            num_sampled = math.floor(min(wanted, most, total) / depth) * depth
        num_sampled = self._asked_frames(total) or num_sampled
        least, most = self._limits(options.video_min_pixels, options.video_max_pixels)
        if options.video_max_tokens is not None:
            budget = int(options.video_max_tokens * self.vision.factor**2 * 0.9)
            most = max(min(most, budget * depth // num_sampled), int(least * 1.05))
        size = smart_resize(header.height, header.width, self.vision, (least, most))
        frames = [first + number for number in sampled_frames(total, num_sampled)]
        return self.sampled(header, frames, size)

    def medium_spans(self, medium: Medium) -> Iterable[Span]:
        token_id, interval = self.image_token_id, 1.0
        if medium.video is not None:
            token_id = self.video_token_id
            if self.tokens_per_second is not None:
                interval = self.tokens_per_second * medium.video.seconds_per_step
        return self.picture_spans(token_id, medium.grid, interval)


class Qwen2VLOptions(QwenVLOptions):
    """Options of Qwen2-VL and Qwen2.5-VL."""

    #: where the text after a video begins: after the longer side of its grid (transformers 5), or
    #: after its last position (transformers 4 and forks of it)
    video_end: Literal["longer_side", "last_position"] = beside_lengths("longer_side")


class Qwen2VLEncoder(QwenVLEncoder):
    """One temporal position per step of a video's grid."""

    LENGTHS_OF = "qwen2_vl"
    PATCH_SIZE = _PATCH
    TEMPLATE = QWEN2_VL_TEMPLATE


class Qwen25VLEncoder(Qwen2VLEncoder):
    """Temporal positions count the seconds of a video, 2 for each, unless the checkpoint's
    config.json says otherwise."""

    TEXT_TOKENS = QWEN2_5_TEXT_TOKENS

    def __init__(self, options: Qwen2VLOptions) -> None:
        super().__init__(options)
        vision = checkpoint_json(options.processor, "config.json").get("vision_config", {})
        self.tokens_per_second = float(vision.get("tokens_per_second", 2.0))


_TINY: Final = {
    **TINY,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-6,
    "rope_parameters": rope(1e6, [2, 3, 3]),
}
#: Towers since Qwen2.5-VL.
TINY_VISION: Final = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
}
_TIED: Final = {**MEDIA_TOKEN_IDS, "tie_word_embeddings": True}

QWEN2_VL: Final = Family(
    "qwen2_vl",
    Qwen2VLOptions,
    Qwen2VLEncoder,
    ModelCost(
        "Qwen2-VL-7B",
        TransformerShape(3584, 28, 18944, kv_share=1 / 7, query_size=3584),
        TransformerShape(1280, 32, 5120, ffn_matrices=2, causal=False),
        head=3584 * 152_064,
        merger=11_141_120,
    ),
    "Qwen2VL",
    tiny=Preset(_TINY, {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}, _TIED),
    megatron_core=True,
)
QWEN2_5_VL: Final = Family(
    "qwen2_5_vl",
    Qwen2VLOptions,
    Qwen25VLEncoder,
    replace(
        QWEN2_VL.cost,
        name="Qwen2.5-VL-7B",
        vision=TransformerShape(1280, 32, 3420, causal=False, num_quadratic_layers=4),
    ),
    "Qwen2_5_VL",
    tiny=Preset(_TINY, {**TINY_VISION, "fullatt_block_indexes": [1]}, _TIED),
    megatron_core=True,
)


class LlavaOneVision15Encoder(Qwen2VLEncoder):
    """Lengths are Qwen2-VL's, with the same tokenizer."""

    POSITION_ROWS = 1
    TEXT_TOKENS = QWEN3_TEXT_TOKENS


#: The model is not part of transformers.
LLAVA_ONEVISION_1_5: Final = Family(
    "llava_onevision_1_5",
    QwenVLOptions,
    LlavaOneVision15Encoder,
    ModelCost(
        "LLaVA-OneVision-1.5-8B",
        TransformerShape(4096, 36, 12288, kv_share=1 / 4, query_size=4096),
        TransformerShape(1024, 24, 4096, ffn_matrices=2, causal=False),
        head=4096 * 151_936,
        merger=8_388_608,
    ),
    None,
    other_names=("llava_onevision1_5", "llavaonevision1_5"),  # transformers; the hub
)

"""Qwen2-VL and Qwen2.5-VL. They have the same lengths; positions of Qwen2.5-VL's videos follow the
time."""

from typing import Any, Final

from task_encoders.families.encoder import Medium
from task_encoders.families.family import Family
from task_encoders.families.options import ModelOptions
from task_encoders.families.qwen_vl import QwenVLEncoder
from task_encoders.text.qwen_vocabulary import BUILTIN, QWEN2_5_TEXT_TOKENS

_PATCH: Final = 14
#: Pixels of one token: a square of 2 by 2 patches.
_TOKEN: Final = (2 * _PATCH) ** 2

#: Options and their defaults: those of transformers' processors, with `video_fps` 2 as published
#: checkpoints were trained. 5,120 tokens is what trainers give an image; their files say 16,384.
DEFAULTS: Final[dict[str, Any]] = {
    "min_pixels": 4 * _TOKEN,
    "max_pixels": 5120 * _TOKEN,
    "max_aspect_ratio": 200.0,
    "video_fps": 2.0,
    "video_min_frames": 4,
    "video_max_frames": 768,
    "video_min_pixels": 128 * _TOKEN,
    "video_max_pixels": 768 * _TOKEN,
    "video_max_tokens": None,
    "video_end": "longer_side",
    "resize": "pil",
}

#: Positions per second of video in every published Qwen2.5-VL checkpoint.
TOKENS_PER_SECOND: Final = 2.0


class Qwen2VLEncoder(QwenVLEncoder):
    """One temporal position per step of a video's grid."""

    LENGTHS_OF = "qwen2_vl"
    PATCH_SIZE = _PATCH
    MEAN = (0.48145466, 0.4578275, 0.40821073)
    STD = (0.26862954, 0.26130258, 0.27577711)
    DEFAULT_SYSTEM = "You are a helpful assistant."

    def __init__(self, options: ModelOptions) -> None:
        super().__init__(options, DEFAULTS)


class Qwen25VLEncoder(Qwen2VLEncoder):
    """Temporal positions count the seconds of a video."""

    TEXT_TOKENS = QWEN2_5_TEXT_TOKENS

    def __init__(self, options: ModelOptions) -> None:
        super().__init__(options)
        self.tokens_per_second = read_tokens_per_second(options.processor)

    def interval(self, medium: Medium) -> float:
        if medium.video is None:
            return 1.0
        return self.tokens_per_second * medium.video.seconds_per_step


def read_tokens_per_second(processor: str) -> float:
    """Positions per second of video, as the checkpoint's config.json says.

    Published checkpoints have 2, which also stands for a folder without that file.
    """
    if processor == BUILTIN:
        return TOKENS_PER_SECOND
    from transformers import PreTrainedConfig

    try:
        config, _ = PreTrainedConfig.get_config_dict(processor)
    except OSError:
        return TOKENS_PER_SECOND
    return float(config.get("vision_config", {}).get("tokens_per_second", TOKENS_PER_SECOND))


QWEN2_VL: Final = Family("qwen2_vl", DEFAULTS, Qwen2VLEncoder)
QWEN2_5_VL: Final = Family("qwen2_5_vl", DEFAULTS, Qwen25VLEncoder)

"""Qwen2-VL and Qwen2.5-VL. They have the same lengths; positions of Qwen2.5-VL's videos follow the
time."""

from typing import Any, Final, Literal

from task_encoders.families.base.cost import cost_of_sizes
from task_encoders.families.base.family import Family, Preset, language_sizes
from task_encoders.families.base.options import beside_lengths
from task_encoders.families.qwen_vl import QwenVLEncoder, QwenVLOptions
from task_encoders.field_types import Count
from task_encoders.text.qwen_templates import QWEN2_VL_TEMPLATE
from task_encoders.text.qwen_vocabulary import (
    BUILTIN,
    MEDIA_TOKEN_IDS,
    QWEN2_5_TEXT_TOKENS,
    QWEN3_TEXT_TOKENS,
    VOCAB_SIZE,
)

_PATCH: Final = 14
#: Pixels of one token: a square of 2 by 2 patches.
_TOKEN: Final = (2 * _PATCH) ** 2


class DynamicImageOptions(QwenVLOptions):
    """Options of transformers' processors, with `video_fps` 2 as published checkpoints were
    trained. 5,120 tokens is what trainers give an image; their files say 16,384."""

    min_pixels: Count = 4 * _TOKEN
    max_pixels: Count = 5120 * _TOKEN
    video_min_pixels: Count = 128 * _TOKEN
    video_max_pixels: Count = 768 * _TOKEN


class Qwen2VLOptions(DynamicImageOptions):
    """Options of Qwen2-VL and Qwen2.5-VL."""

    #: where the text after a video begins: after the longer side of its grid (transformers 5), or
    #: after its last position (transformers 4 and forks of it)
    video_end: Literal["longer_side", "last_position"] = beside_lengths("longer_side")


#: Positions per second of video in every published Qwen2.5-VL checkpoint.
TOKENS_PER_SECOND: Final = 2.0


class Qwen2VLEncoder(QwenVLEncoder):
    """One temporal position per step of a video's grid."""

    LENGTHS_OF = "qwen2_vl"
    PATCH_SIZE = _PATCH
    TEMPLATE = QWEN2_VL_TEMPLATE

    def __init__(self, options: DynamicImageOptions) -> None:
        super().__init__(options)
        if isinstance(options, Qwen2VLOptions):
            self.video_end = options.video_end


class Qwen25VLEncoder(Qwen2VLEncoder):
    """Temporal positions count the seconds of a video."""

    TEXT_TOKENS = QWEN2_5_TEXT_TOKENS

    def __init__(self, options: Qwen2VLOptions) -> None:
        super().__init__(options)
        self.tokens_per_second = read_tokens_per_second(options.processor)


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


def _text(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int = VOCAB_SIZE
) -> dict[str, Any]:
    """A text config; the rotary sections are 1/8, 3/16 and 3/16 of a head in every size."""
    head = hidden // heads
    sections = [head // 8, head * 3 // 16, head * 3 // 16]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    others = {"vocab_size": vocab, "rms_norm_eps": 1e-6, "rope_parameters": rope}
    return language_sizes(hidden, ffn, layers, heads, kv_heads, **others)


_TIED: Final = {**MEDIA_TOKEN_IDS, "tie_word_embeddings": True}
_UNTIED: Final = {**MEDIA_TOKEN_IDS, "tie_word_embeddings": False}
_TINY: Final = _text(64, 128, 2, 4, 2)
_LARGE: Final = _text(3584, 18944, 28, 28, 4, vocab=152_064)

#: "tiny" has the real vocabulary and trains on a CPU.
QWEN2_VL_PRESETS: Final = {
    "tiny": Preset(_TINY, {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}, _TIED),
    "2b": Preset(_text(1536, 8960, 28, 12, 2), {"hidden_size": 1536}, _TIED),
    "7b": Preset(_LARGE, {"embed_dim": 1280, "hidden_size": 3584}, _UNTIED),
}

QWEN2_5_VL_PRESETS: Final = {
    "tiny": Preset(
        _TINY,
        {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
        _TIED,
    ),
    "3b": Preset(
        _text(2048, 11008, 36, 16, 2),
        {"hidden_size": 1280, "out_hidden_size": 2048, "tokens_per_second": 2},
        _TIED,
    ),
    "7b": Preset(
        _LARGE,
        {
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "hidden_act": "silu",
            "fullatt_block_indexes": [7, 15, 23, 31],
            "out_hidden_size": 3584,
            "tokens_per_second": 2,
        },
        _UNTIED,
    ),
}

QWEN2_VL: Final = Family(
    "qwen2_vl",
    Qwen2VLOptions,
    Qwen2VLEncoder,
    QWEN2_VL_PRESETS["7b"].cost("Qwen2-VL-7B"),
    "Qwen2VL",
    presets=QWEN2_VL_PRESETS,
    megatron_core=True,
)
QWEN2_5_VL: Final = Family(
    "qwen2_5_vl",
    Qwen2VLOptions,
    Qwen25VLEncoder,
    QWEN2_5_VL_PRESETS["7b"].cost("Qwen2.5-VL-7B"),
    "Qwen2_5_VL",
    presets=QWEN2_5_VL_PRESETS,
    megatron_core=True,
)


class LlavaOneVision15Encoder(Qwen2VLEncoder):
    """Lengths are Qwen2-VL's, with the same tokenizer."""

    POSITION_ROWS = 1
    TEXT_TOKENS = QWEN3_TEXT_TOKENS


#: Sizes of the 8B model.
_ONEVISION_TEXT: Final = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_ONEVISION_TOWER: Final = {"depth": 24, "embed_dim": 1024, "intermediate_size": 4096}

#: The model is not part of transformers.
LLAVA_ONEVISION_1_5: Final = Family(
    "llava_onevision_1_5",
    DynamicImageOptions,
    LlavaOneVision15Encoder,
    cost_of_sizes("LLaVA-OneVision-1.5-8B", _ONEVISION_TEXT, _ONEVISION_TOWER),
    None,
    other_names=("llava_onevision1_5", "llavaonevision1_5"),  # transformers; the hub
)

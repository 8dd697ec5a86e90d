"""A tiny model of every family, with a tokenizer and options that suit it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from launch.model.config import config_of_preset, transformers_classes
from task_encoders.text.qwen_templates import (
    QWEN2_VL_TEMPLATE,
    QWEN3_5_TEMPLATE,
    QWEN3_VL_TEMPLATE,
)
from task_encoders.text.qwen_vocabulary import QWEN2_5_TEXT_TOKENS, QWEN3_TEXT_TOKENS
from tests.helpers.llava_onevision import LlavaOneVision15
from tests.helpers.tiny_checkpoints import randomise
from tests.helpers.tiny_tokenizer import save_llama_tokenizer, save_with_template, tiny_tokenizer

#: Text tokens and template of the tokenizer of a family on Qwen's vocabulary.
QWEN: dict[str, tuple[tuple[str, ...], str]] = {
    "qwen2_vl": ((), QWEN2_VL_TEMPLATE),
    "qwen2_5_vl": (QWEN2_5_TEXT_TOKENS, QWEN2_VL_TEMPLATE),
    "qwen3_vl": (QWEN3_TEXT_TOKENS, QWEN3_VL_TEMPLATE),
    "qwen3_5": (QWEN3_TEXT_TOKENS, QWEN3_5_TEMPLATE),
    "llava_onevision_1_5": (QWEN3_TEXT_TOKENS, QWEN2_VL_TEMPLATE),
}
_PIXELS: dict[str, Any] = {"min_pixels": 4096, "max_pixels": 32_768}
_PIXELS |= {"video_min_pixels": 4096, "video_max_pixels": 65_536}
_SQUARE: dict[str, Any] = {"image_size": 56}
#: Fields of vision configs that encoders know otherwise.
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"tokens_per_second": 2},
    "llava_1_5": _SQUARE,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_EXPERTS |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}


def save_tokenizer(family: str, folder: Path) -> None:
    """One of fewer than 1,024 tokens."""
    if family in QWEN:
        text_tokens, template = QWEN[family]
        save_with_template(tiny_tokenizer(text_tokens), template, folder)
    else:
        save_llama_tokenizer(folder)


def encoder_options(family: str) -> dict[str, Any]:
    """Options that make small images."""
    return _PIXELS if family in QWEN else _SQUARE


def tiny_model(family: str, token_ids: Mapping[str, int], *, experts: bool = False) -> Any:
    """The tiny preset on such a tokenizer; `experts`: of Qwen3.5, as a mixture of four."""
    if family == "llava_onevision_1_5":
        return randomise(LlavaOneVision15(token_ids))
    text = {"vocab_size": 1024}
    config = config_of_preset(family, "tiny", text, _VISION.get(family, {}), **token_ids)
    if not experts:
        return randomise(transformers_classes(family).model(config))
    text_config = {**config.text_config.to_dict(), **_EXPERTS, "model_type": "qwen3_5_moe_text"}
    vision_config = {**config.vision_config.to_dict(), "model_type": "qwen3_5_moe_vision"}
    sparse = Qwen3_5MoeConfig(text_config=text_config, vision_config=vision_config, **token_ids)
    return randomise(Qwen3_5MoeForConditionalGeneration(sparse))

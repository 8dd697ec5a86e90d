"""A tiny model of every family, with a tokenizer and options that suit it."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from launch.model.config import tiny_config, transformers_class
from task_encoders.families import FAMILIES, build_sample_encoder
from task_encoders.families.internvl3 import INTERNVL_TEMPLATE
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import SourceSample, Turn
from task_encoders.text.qwen_templates import QWEN2_VL_TEMPLATE, QWEN3_5_TEMPLATE, QWEN3_VL_TEMPLATE
from task_encoders.text.qwen_vocabulary import QWEN2_5_TEXT_TOKENS, QWEN3_TEXT_TOKENS
from tests.helpers.encoder_contract import needs_transformers
from tests.helpers.texts_and_images import random_image
from tests.helpers.tiny_checkpoints import VISION, randomise
from tests.helpers.tiny_tokenizers import (
    save_gemma_tokenizer,
    save_glm_tokenizer,
    save_llama_tokenizer,
    save_tekken,
    save_with_template,
    tiny_tokenizer,
)
from tests.helpers.videos import make_video

#: Text tokens and template of the tokenizer of a family on Qwen's vocabulary.
QWEN: dict[str, tuple[tuple[str, ...], str]] = {
    "qwen2_vl": ((), QWEN2_VL_TEMPLATE),
    "qwen2_5_vl": (QWEN2_5_TEXT_TOKENS, QWEN2_VL_TEMPLATE),
    "qwen3_vl": (QWEN3_TEXT_TOKENS, QWEN3_VL_TEMPLATE),
    "qwen3_5": (QWEN3_TEXT_TOKENS, QWEN3_5_TEMPLATE),
    **dict.fromkeys(
        ("llava_onevision_1_5", "llava_onevision_2"), (QWEN3_TEXT_TOKENS, QWEN2_VL_TEMPLATE)
    ),
}
#: Tokens that InternVL3 adds to Qwen's.
INTERNVL = ("<img>", "</img>", "<IMG_CONTEXT>")
#: Families that transformers has, beside those of `tiny_checkpoints`.
FURTHER = [name for name, one in FAMILIES.items() if one.transformers_name and name not in VISION]
#: Families that take no videos.
STILL = ("llava_1_5", "mistral3", "llava_onevision_2")
CLIP = make_video(12, 4)
#: Images and videos of each sample of `encoded_samples`.
MEDIA = [(1, 0), (0, 0), (0, 1), (2, 0)]
_PIXELS: dict[str, Any] = {"min_pixels": 4096, "max_pixels": 32_768}
_PIXELS |= {"video_min_pixels": 4096, "video_max_pixels": 65_536}
_BUDGETS = {"max_soft_tokens": 70, "video_max_frames": 3}
_SQUARE: dict[str, Any] = {"image_size": 56}
#: Fields of vision configs that encoders know otherwise.
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"tokens_per_second": 2},
    "llava_1_5": _SQUARE,
    "internvl3": _SQUARE,
}
#: Options of families that have others than Qwen's.
_OPTIONS: dict[str, dict[str, Any]] = {
    "llava_1_5": _SQUARE,
    "llava_onevision_2": {"min_pixels": 4096, "max_pixels": 32_768},
    "gemma4": _BUDGETS,
    "gemma4_unified": _BUDGETS,
    "mistral3": {"longest_edge": 168},
    "internvl3": {"image_size": 56, "max_tiles": 4, "video_num_frames": 3},
}
#: Mistral Small 4: a mixture of experts, and multi-head latent attention.
_MISTRAL4 = {
    "model_type": "mistral4",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_EXPERTS |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_EXPERTS |= {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}


def save_tokenizer(family: str, folder: Path) -> None:
    """One of fewer than 1,024 tokens."""
    needs_family(family)
    if family in QWEN:
        text_tokens, template = QWEN[family]
        save_with_template(tiny_tokenizer(text_tokens), template, folder)
    elif family.startswith("glm"):
        save_glm_tokenizer(folder)
    elif family.startswith("gemma4"):
        save_gemma_tokenizer(folder)
    elif family == "internvl3":
        save_with_template(tiny_tokenizer(special=INTERNVL), INTERNVL_TEMPLATE, folder)
    elif family == "mistral3":
        folder.mkdir(parents=True, exist_ok=True)
        save_tekken(folder)
    else:
        save_llama_tokenizer(folder)


def needs_family(family: str) -> None:
    """Skip a test of a family where transformers is older than its model."""
    if since := FAMILIES[family].since:
        needs_transformers(since, f"is too old for {family}")


def encoder_options(family: str) -> dict[str, Any]:
    """Options that make small images."""
    return _OPTIONS.get(family, _PIXELS)


@functools.cache
def encoder_of(folder: Path, **options: Any) -> Any:
    """Build the encoder of the family that a folder is named by, of small images, once for all who
    ask for the same."""
    family = folder.name
    return build_sample_encoder(family, str(folder), **(encoder_options(family) | options))


def encoded_samples(family: str, encoder: Any) -> list[EncodedSample]:
    """Samples without media, with images, and with a video where the family takes any."""
    rng = np.random.default_rng(0)
    samples = []
    for i, (num_images, num_videos) in enumerate(MEDIA):
        num_videos = 0 if family in STILL else num_videos
        turns = (Turn(f"What is number {i}?", f"It is bar {i} of some colour."),)
        names, videos = tuple(map(str, range(num_images))), ("v",) * num_videos
        sample = SourceSample(str(i), "vqa", turns, names, videos=videos)
        images = [random_image(rng, 100, 70) for _ in range(num_images)]
        samples.append(encoder.encode(sample, images, [CLIP] * num_videos))
    return samples


def image_masks(model: Any, tokens: Any, types: Any) -> dict[str, Any]:
    """The masks of Gemma 4's layers for a sample, as transformers' `generate` makes them: its
    forward shows images of `gemma4_unified` to themselves in full layers, too, and beyond the
    window, unlike google/gemma (https://github.com/huggingface/transformers/issues/46711)."""
    shape = tokens.new_empty((*tokens.shape, 0), dtype=model.dtype)
    masks: dict[str, Any] = model.create_masks_for_generate(
        model.config, shape, None, None, None, mm_token_type_ids=types
    )
    return masks


def tiny_model(family: str, token_ids: Mapping[str, int], *, experts: bool = False) -> Any:
    """The tiny model on such a tokenizer; `experts`: as a mixture of four."""
    needs_family(family)
    if family in ("llava_onevision_1_5", "llava_onevision_2"):
        depth = 1 if family == "llava_onevision_2" else 2
        return randomise(LlavaOneVision(token_ids, depth))
    text = {"vocab_size": 1024}
    if family == "mistral3" and experts:
        text, experts = _MISTRAL4, False
    config = tiny_config(family, text, _VISION.get(family, {}), **token_ids)
    if not experts:
        return randomise(transformers_class(family)(config))
    from transformers import AutoConfig, AutoModelForImageTextToText

    name = f"{family}_moe"
    # Recurrent layers round so much that a token near a tie would get another expert elsewhere.
    per_token = {"num_experts_per_tok": 4} if FAMILIES[family].is_recurrent else {}
    text_config = config.text_config.to_dict() | _EXPERTS | per_token
    text_config["model_type"] = f"{name}_text"
    vision_config = {**config.vision_config.to_dict(), "model_type": f"{name}_vision"}
    parts = {"text_config": text_config, "vision_config": vision_config}
    sparse = AutoConfig.for_model(name, **parts, **token_ids)
    return randomise(AutoModelForImageTextToText.from_config(sparse))


class LlavaOneVision(nn.Module):
    """A tower that attends within each image and merges 2 by 2 patches into a token (the published
    ones are pretrained as RICE, with the same patches and rotary positions, and as OneVision
    Encoder), and Qwen3, whose positions count tokens. `depth`: frames of a patch."""

    def __init__(self, token_ids: Mapping[str, int], depth: int) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
        from transformers.models.qwen2_vl.modeling_qwen2_vl import (
            Qwen2VisionTransformerPretrainedModel,
        )

        super().__init__()
        self.token_ids = token_ids
        vision = Qwen2VLVisionConfig(
            depth=2, embed_dim=32, hidden_size=64, num_heads=2, temporal_patch_size=depth
        )
        self.visual = Qwen2VisionTransformerPretrainedModel._from_config(vision)
        self.config = Qwen3Config(
            vocab_size=1024,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
        self.language_model = Qwen3ForCausalLM._from_config(self.config)

    def forward(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The language model's output for inputs of `to_transformers_kwargs`."""
        embeddings = self.language_model.get_input_embeddings()(input_ids)
        for kind, pixels, grids in (
            ("image_token_id", pixel_values, image_grid_thw),
            ("video_token_id", pixel_values_videos, video_grid_thw),
        ):
            places = input_ids == self.token_ids[kind]
            if pixels is None:
                assert not places.any()
                continue
            features = self.visual(pixels, grid_thw=grids).pooler_output
            assert len(features) == int(places.sum())
            embeddings = embeddings.masked_scatter(places[..., None], features)
        return self.language_model(inputs_embeds=embeddings, **kwargs)

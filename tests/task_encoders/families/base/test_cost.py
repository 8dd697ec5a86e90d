"""Operations of a model's samples, and the sizes that a checkpoint's config.json names."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from launch.model.config import tiny_config, transformers_class
from task_encoders.families import FAMILIES, model_cost, model_options
from task_encoders.families.base.cost import ModelCost, cost_of_checkpoint, cost_of_sizes
from tests.helpers.tiny_families import needs_family

QWEN2_VL_7B = FAMILIES["qwen2_vl"].cost
#: Families whose models `counted` runs.
COUNTED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")


def sizes(hidden: int, ffn: int, *others: int, **named: Any) -> Any:
    """Name the sizes of a text config: layers, heads, heads of keys."""
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    own = {"hidden_size": hidden, "intermediate_size": ffn}
    return own | dict(zip(names, others, strict=True)) | named


def tower(hidden: int, ffn: int, *others: int, **named: Any) -> Any:
    """Name the sizes of a vision config of Qwen's kind: layers, heads, and where it ends. GLM's
    feed-forward layer is the merger's."""
    own = {"hidden_size": hidden, "intermediate_size": ffn}
    return own | dict(zip(("depth", "num_heads", "out_hidden_size"), others, strict=True)) | named


GEMMA = {
    "vocab_size": 262_144,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
}
GLM_TEXT = sizes(4096, 13_696, 40, 32, 2, vocab_size=151_552)
GLM_TOWER = tower(1536, 13_696, 24, 12, 4096, model_type="glm4v_vision", hidden_act="silu")
TOWER_300M = sizes(1024, 4096, 24, 16, 16)
QWEN_7B = sizes(3584, 18_944, 28, 28, 4, vocab_size=152_064)
QWEN3_8B = sizes(4096, 12_288, 36, 32, 8, vocab_size=151_936)
QWEN3_TOWER = tower(1152, 4304, 27, 16, 4096)
#: Text and vision configs of each family's usual model, as published.
USUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (QWEN_7B, {"depth": 32, "embed_dim": 1280, "hidden_size": 3584}),
    "qwen2_5_vl": (
        QWEN_7B,
        tower(
            *(1280, 3420, 32, 16, 3584), hidden_act="silu", fullatt_block_indexes=[7, 15, 23, 31]
        ),
    ),
    "qwen3_vl": (
        QWEN3_8B | {"head_dim": 128},
        QWEN3_TOWER | {"deepstack_visual_indexes": [8, 16, 24]},
    ),
    "qwen3_5": (
        sizes(
            *(4096, 12_288, 32, 16, 4),
            vocab_size=248_320,
            layer_types=[*["linear_attention"] * 3, "full_attention"] * 8,
        ),
        QWEN3_TOWER,
    ),
    "llava_onevision_1_5": (QWEN3_8B, {"depth": 24, "embed_dim": 1024, "intermediate_size": 4096}),
    "llava_1_5": (
        {"model_type": "llama", "vocab_size": 32_064},
        TOWER_300M | {"model_type": "clip_vision_model"},
    ),
    "glm4v": (GLM_TEXT, GLM_TOWER),
    "glm46v": (GLM_TEXT, GLM_TOWER),
    "gemma4": (
        sizes(
            *(2816, 2112, 30, 16, 8),
            **GEMMA,
            num_global_key_value_heads=2,
            layer_types=[*["sliding_attention"] * 5, "full_attention"] * 5,
            enable_moe_block=True,
            num_experts=128,
            top_k_experts=8,
            moe_intermediate_size=704,
        ),
        sizes(1152, 4304, 27, 16, 16, head_dim=72, pooling_kernel_size=3),
    ),
    "gemma4_unified": (
        sizes(
            *(3840, 15_360, 48, 16, 8),
            **GEMMA,
            num_global_key_value_heads=1,
            layer_types=[*["sliding_attention"] * 5, "full_attention"] * 8,
        ),
        {
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "mm_embed_dim": 3840,
            "output_proj_dims": 3840,
        },
    ),
    "mistral3": (
        sizes(4096, 14_336, 34, 32, 8, vocab_size=131_072, head_dim=128),
        TOWER_300M | {"model_type": "pixtral"},
    ),
    "internvl3": (
        sizes(3584, 18_944, 28, 28, 4, vocab_size=151_674),
        TOWER_300M | {"model_type": "internvl_vision"},
    ),
}


def counted(
    family: str, tower: Callable[[Any], Any], **sizes: Any
) -> tuple[Callable[[str], int], ModelCost]:
    """Sum the operations that torch counts in modules of a name, of 12 tokens of text and of one
    picture that `tower` shows to the tiny model, and return what it should cost."""
    text = {"vocab_size": 1000, "bos_token_id": None, "eos_token_id": None, **sizes}
    vision = {"fullatt_block_indexes": [0, 1]} if family == "qwen2_5_vl" else {}
    config = tiny_config(family, text, vision)
    config._attn_implementation = "eager"
    model = transformers_class(family)(config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(12)[None])
        before = counter.get_total_flops()
        tower(model.model)
    sums = {name: sum(own.values()) for name, own in counter.get_flop_counts().items()}
    sums["all of the tower"] = counter.get_total_flops() - before

    def sum_of(pattern: str) -> int:
        return sum(flops for name, flops in sums.items() if re.search(f"(?:{pattern})$", name))

    return sum_of, cost_of_sizes("", config.text_config.to_dict(), config.vision_config.to_dict())


def show_patches(model: Any) -> None:
    """Show 8 x 8 patches."""
    config = model.visual.config
    size = config.in_channels * config.temporal_patch_size * config.patch_size**2
    model.visual(torch.zeros(64, size), grid_thw=torch.tensor([[1, 8, 8]]))


def show_places(model: Any, rows: int, columns: int, size: int) -> None:
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))[None]
    model.get_image_features(torch.zeros(1, rows * columns, size), places)


@pytest.mark.parametrize("family", COUNTED)
def test_operations_are_those_that_torch_counts(family: str) -> None:
    sum_of, cost = counted(family, show_patches)
    full = dataclasses.replace(cost.language, causal=False)  # the eager kernel masks afterwards
    language = sum_of(r"language_model\.layers\.\d+") + sum_of(r"\.lm_head")
    assert dataclasses.replace(cost, language=full).language_flops(12) == language
    tower = sum_of(r"\.visual\.(blocks\.\d+|downsample|merger|deepstack_\w+\.\d+)")
    assert cost.tower_flops(64) == tower


def test_operations_of_gemma_are_nearly_those_that_torch_counts() -> None:
    """All of the tower's. Of the language model's, the wider heads of its full layers count in the
    scores alone, and windows as they are."""
    needs_family("gemma4")
    sum_of, cost = counted("gemma4", lambda m: show_places(m, 6, 6, 768), enable_moe_block=False)
    assert cost.tower_flops(36) == sum_of(r"vision_tower\.encoder\.layers\.\d+|embed_vision")
    language = sum_of(r"language_model\.layers\.\d+") + sum_of(r"\.lm_head")
    assert cost.language_flops(12) == pytest.approx(language, rel=0.07)
    short, long = cost.language_flops(np.array([4096, 8192]), 0)
    quadratic = dataclasses.replace(cost.language, window=0, num_quadratic_layers=4).flops(8192)
    assert 2 < long / short < 4
    assert long < quadratic


def test_gemma_12b_has_no_tower() -> None:
    needs_family("gemma4_unified")
    sum_of, cost = counted("gemma4_unified", lambda m: show_places(m, 2, 3, 3 * 48**2))
    assert cost.tower_flops(6) == sum_of("all of the tower") > 0


@pytest.mark.parametrize("family", USUAL)
def test_a_checkpoint_of_the_usual_model_costs_what_the_family_says(
    family: str, tmp_path: Path
) -> None:
    """Read a config as published, without some of these sizes (LLaVA's lacks those of Llama), and
    as transformers writes it."""
    text, vision = USUAL[family]
    config = {"text_config": text, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    costs, usual = [cost_of_checkpoint(str(tmp_path))], FAMILIES[family].cost
    if family in COUNTED:
        tiny_config(family, text, vision).save_pretrained(tmp_path)
        costs.append(cost_of_checkpoint(str(tmp_path)))
    for found in costs:
        assert found is not None
        assert repr(dataclasses.replace(found, name=usual.name)) == repr(usual)


@pytest.mark.parametrize(("name", "shared"), [("Qwen3VLMoe", 0), ("Glm4vMoe", 1)])
def test_of_a_mixture_the_experts_that_a_token_meets_count(
    name: str, shared: int, tmp_path: Path
) -> None:
    import transformers

    config = getattr(transformers, f"{name}Config")()
    config.save_pretrained(tmp_path)
    found = cost_of_checkpoint(str(tmp_path))
    assert found is not None
    text: Any = config.text_config
    assert found.language.ffn_size == text.moe_intermediate_size * (
        text.num_experts_per_tok + shared
    )


def test_without_a_models_config_the_family_says(tmp_path: Path) -> None:
    assert model_cost(model_options()) is QWEN2_VL_7B
    assert cost_of_checkpoint(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    assert cost_of_checkpoint(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}, "text_config": {}}))
    with pytest.raises(ValueError, match=r"config.json names no sizes of a model \(KeyError"):
        cost_of_checkpoint(str(tmp_path))

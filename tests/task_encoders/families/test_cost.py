"""Operations of a model's samples, and the sizes that a checkpoint's config.json names."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from task_encoders.families import FAMILIES, model_cost, model_options
from task_encoders.families.cost import cost_of_checkpoint
from task_encoders.families.qwen2_vl import COST


def test_sample_cost_is_additive_and_counts_vision() -> None:
    tokens = np.array([100, 8192])
    flops = COST.language.flops(tokens)
    # About 2 operations per weight and token (6.5e9 weights in the layers) for a short sample.
    assert flops[0] == pytest.approx(2 * 6.5e9 * 100, rel=0.05)
    assert flops[1] > 82 * flops[0]
    with_images = COST.of_samples(tokens, np.array([0, 4096]), np.array([0, 4]))
    assert with_images[0] == COST.of_samples(tokens)[0]
    one_image = COST.of_samples(tokens, np.array([0, 4096]))
    assert COST.of_samples(tokens)[1] < with_images[1] < one_image[1]


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f.transformers_name])
def test_configs_of_transformers_are_read(family: Any, tmp_path: Path) -> None:
    """A config with the sizes of the family's usual model costs what that does."""
    import transformers

    config_class = getattr(transformers, f"{family.transformers_name}Config")
    language, vision = family.cost.language, family.cost.vision
    heads = {28: 28, 16: 16}.get(language.num_layers, 32)
    text = {
        "hidden_size": language.hidden_size,
        "num_hidden_layers": language.num_layers,
        "intermediate_size": language.ffn_size,
        "num_attention_heads": heads,
        "num_key_value_heads": round(heads * language.kv_share),
        "head_dim": language.hidden_size // heads,
    }
    tower = {"hidden_size": vision.hidden_size, "depth": vision.num_layers}
    if family.name == "qwen2_vl":
        text.pop("head_dim")
        tower = {"embed_dim": vision.hidden_size, "depth": vision.num_layers}
    if family.name == "qwen2_5_vl":
        text.pop("head_dim")
    if family.name == "llava_1_5":
        tower = {"hidden_size": vision.hidden_size, "num_hidden_layers": vision.num_layers}
        text |= {"model_type": "llama"}
        tower |= {
            "model_type": "clip_vision_model",
            "intermediate_size": vision.ffn_size,
            "num_attention_heads": 16,
        }
    config_class(text_config=text, vision_config=tower).save_pretrained(tmp_path)
    found = cost_of_checkpoint(str(tmp_path))
    assert found is not None
    lengths, patches = np.array([64, 3000]), np.array([256, 4096])
    np.testing.assert_allclose(
        found.of_samples(lengths, patches), family.cost.of_samples(lengths, patches), rtol=0.002
    )


def test_of_a_mixture_the_experts_that_a_token_meets_count(tmp_path: Path) -> None:
    import transformers

    config = transformers.Qwen3VLMoeConfig()
    config.save_pretrained(tmp_path)
    found = cost_of_checkpoint(str(tmp_path))
    assert found is not None
    text = config.text_config
    assert found.language.ffn_size == text.moe_intermediate_size * text.num_experts_per_tok


def test_without_a_models_config_the_family_says(tmp_path: Path) -> None:
    assert model_cost(model_options()) is COST
    assert cost_of_checkpoint(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    assert cost_of_checkpoint(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}, "text_config": {}}))
    with pytest.raises(ValueError, match=r"config.json names no sizes of a model \(KeyError"):
        cost_of_checkpoint(str(tmp_path))

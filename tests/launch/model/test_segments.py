"""Recurrent layers segment by segment: short segments, boundaries by name, what is refused."""

from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers import (
    DynamicCache,
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    RwkvConfig,
    RwkvForCausalLM,
)

from launch.model.segments import isolate_segments
from task_encoders.families import FAMILIES
from tests.helpers.tiny_checkpoints import randomise
from tests.helpers.transformers_sources import VERSION

#: Some are shorter than the window of the convolution.
LENGTHS = [1, 70, 2, 3, 1, 9]


def tiny_model() -> Any:
    sizes = {**FAMILIES["qwen3_5"].presets["tiny"].text, "vocab_size": 500}
    return randomise(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes)))


def row() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(500, (1, sum(LENGTHS)), generator=generator),
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
        "use_cache": False,
    }


def alone(model: Any) -> torch.Tensor:
    parts = row()["input_ids"].split(LENGTHS, dim=1)
    return torch.cat([model(part, use_cache=False).logits for part in parts], dim=1)


def gradients(model: Any, logits: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    logits.square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_short_segments_also_where_activations_are_computed_again() -> None:
    model = tiny_model()
    names = list(model.state_dict())
    expected = alone(model)
    expected_gradients = gradients(model, expected)
    assert isolate_segments(model) == isolate_segments(model) == 3
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(**row()).logits, expected, atol=1e-5, rtol=0)
    model.train()
    model.gradient_checkpointing_enable()
    found = model(**row()).logits
    model(**{**row(), "position_ids": None})  # another row before the first one's backward
    for gradient, other in zip(gradients(model, found), expected_gradients, strict=True):
        assert (gradient - other).norm() <= 1e-4 * other.norm()


def test_boundaries_that_are_given() -> None:
    model = tiny_model()
    boundaries = torch.tensor([0, *LENGTHS]).cumsum(0)
    if Version("5.20") <= VERSION:  # 5.18 leaks instead
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            model(**row(), cu_seq_lens_q=boundaries)
    isolate_segments(model)
    with torch.no_grad():
        found = model(**row(), cu_seq_lens_q=boundaries, seq_idx=boundaries[None]).logits
        torch.testing.assert_close(found, alone(model), atol=1e-5, rtol=0)


@torch.no_grad()
def test_rows_without_boundaries_stay_as_they_are() -> None:
    model, other = tiny_model(), tiny_model()
    isolate_segments(model)
    tokens = row()["input_ids"].reshape(2, -1)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    for kwargs in ({}, {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}):
        assert torch.equal(model(tokens, **kwargs).logits, other(tokens, **kwargs).logits)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "attention_mask": mask}
    assert torch.equal(model.generate(tokens, **options), other.generate(tokens, **options))


@pytest.mark.parametrize("name", ["cache", "cache_params", None])
def test_a_cache_of_any_name_is_refused(name: str | None) -> None:
    model = tiny_model()
    isolate_segments(model)
    layer, cache = model.model.layers[0].linear_attn, DynamicCache(config=model.config)
    args, kwargs = ([], {name: cache}) if name else ([cache], {})
    hidden_states = torch.zeros(1, sum(LENGTHS), model.config.hidden_size)
    with pytest.raises(ValueError, match="a packed row cannot be cached; set use_cache=False"):
        layer(hidden_states, *args, segment_lengths=LENGTHS, **kwargs)


def test_what_would_leak_is_refused() -> None:
    model = tiny_model()
    isolate_segments(model)
    with pytest.raises(ValueError, match="a packed row cannot be cached; set use_cache=False"):
        model(**{**row(), "use_cache": True})
    two = {name: value.expand(2, -1) for name, value in row().items() if name != "use_cache"}
    with pytest.raises(ValueError, match="2 packed rows in a batch; give one"):
        model(**two, use_cache=False)
    config = Lfm2Config(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    with pytest.raises(ValueError, match="Lfm2ForCausalLM has layers of type 'conv', which would"):
        isolate_segments(Lfm2ForCausalLM(config))
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2}
    recurrent = [
        MambaForCausalLM(MambaConfig(**sizes)),
        RwkvForCausalLM(RwkvConfig(**sizes, attention_hidden_size=32, intermediate_size=32)),
    ]
    for other in recurrent:
        kind = "'(linear_attention|mamba)'"  # transformers 5.12 has the second
        with pytest.raises(ValueError, match=f"layers of type {kind}, which would"):
            isolate_segments(other)

"""Every family: a packed row, through its encoder and `to_transformers_kwargs`, gives the logits,
loss and gradients of its samples alone; recurrent layers also of short segments; and what is
refused."""

from dataclasses import dataclass
from types import SimpleNamespace
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
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    RwkvConfig,
    RwkvForCausalLM,
)

from launch.model.config import tiny_config
from launch.model.segments import (
    check_attention,
    isolate_segments,
    use_varlen_attention,
    why_no_flash,
)
from task_encoders.families import FAMILIES
from task_encoders.model_inputs import to_transformers_kwargs
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import IGNORE_INDEX
from tests.helpers.encoder_contract import VERSION
from tests.helpers.peers import inputs_of
from tests.helpers.tiny_checkpoints import gradients_of, packed_batch, randomise
from tests.helpers.tiny_families import (
    QWEN,
    encoded_samples,
    encoder_of,
    image_masks,
    needs_family,
    tiny_model,
)
from tests.helpers.varlen import CpuVarlen
from tests.world import World

CASES = [(family, "") for family in (*QWEN, "llava_1_5", "glm4v", "glm46v", "gemma4", "mistral3")]
CASES += [("qwen3_5", "experts"), ("llava_1_5", "plain"), ("glm4v", "experts")]
CASES += [("mistral3", "experts"), ("internvl3", ""), ("gemma4_unified", "")]


def without_boundaries(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments without those of flash attention."""
    boundaries = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    assert set(boundaries) < set(kwargs)
    return {name: value for name, value in kwargs.items() if name not in boundaries}


@dataclass
class Case:
    """A tiny model, as transformers has it, and samples."""

    model: Any
    encoder: Any
    samples: list[EncodedSample]

    def packed(self, **options: Any) -> dict[str, Any]:
        return to_transformers_kwargs(packed_batch(self.samples, **options))

    def alone(self, sample: EncodedSample) -> dict[str, Any]:
        """Without positions: the model finds them itself."""
        packs: Any = SimpleNamespace(task_encoder=SimpleNamespace(encoder=self.encoder))
        kwargs = inputs_of(packs, packed_batch([sample]))
        if self.model.config.model_type.startswith("gemma4"):
            tokens, types = kwargs["input_ids"], kwargs["mm_token_type_ids"]
            kwargs["attention_mask"] = image_masks(self.model, tokens, types)
        return kwargs

    @torch.no_grad()
    def logits(self, kwargs: dict[str, Any]) -> torch.Tensor:
        return self.model(**kwargs).logits[0]

    def trained(self, *rows: dict[str, Any]) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
        """Return the logits of all rows, their loss per labelled token, and its gradients."""
        counts = [int((row["labels"] != IGNORE_INDEX).sum()) for row in rows]
        total, logits = 0.0, []
        for row, count in zip(rows, counts, strict=True):
            found = self.model(**row)
            loss = found.loss * (count / sum(counts))
            loss.backward()
            total += float(loss)
            logits.append(found.logits[0].detach())
        return torch.cat(logits), total, gradients_of(self.model)


def build_case(world: World, family: str, variant: str = "") -> Case:
    options = {"template": "plain"} if variant == "plain" else {}
    encoder = encoder_of(world.tokenizer(family), **options)
    samples = encoded_samples(family, encoder)
    model = tiny_model(family, encoder.media_token_ids, experts=variant == "experts")
    if family.startswith("gemma4"):  # with a window that images exceed
        model.config.text_config.sliding_window = 8
        model = randomise(type(model)(model.config))
    return Case(model, encoder, samples)


#: Mixtures of experts whose attention is that of the family.
ALIKE = {("qwen3_5", "experts"), ("glm4v", "experts")}


@pytest.fixture(
    params=[
        pytest.param(
            case,
            id="-".join(filter(None, case)),
            marks=[pytest.mark.exhaustive] if case in ALIKE else [],
        )
        for case in CASES
    ]
)
def case(request: Any, world: World) -> Case:
    return build_case(world, *request.param)


def test_every_family_is_compared() -> None:
    assert {family for family, _ in CASES} == FAMILIES.keys()


def test_packed_equals_alone(case: Case, varlen: CpuVarlen) -> None:
    name = case.model.config.model_type
    is_recurrent, sees_images = name.startswith("qwen3_5"), name.startswith("gemma4")
    if is_recurrent or sees_images:
        leaking = case.logits(without_boundaries(case.packed()))
    assert (isolate_segments(case.model) > 0) == is_recurrent
    alone = map(case.alone, case.samples)
    expected, expected_loss, expected_gradients = case.trained(*alone)
    assert len(expected_gradients) > 40
    with torch.compiler.set_stance("force_eager"):  # compiled, flex attention takes 40 s
        for attention in ("eager", "flex_attention") if sees_images else ():
            case.model.set_attn_implementation({"text_config": attention})
            again = case.logits(case.packed())
            torch.testing.assert_close(again, expected, atol=3e-5, rtol=0)
    if sees_images:
        case.model.set_attn_implementation({"text_config": "sdpa"})
    control = case.logits(case.packed(cross_sample_attention=True))
    assert (control - expected).abs().max() > (1 if sees_images else 0.1)
    if is_recurrent or sees_images:
        assert (leaking - expected).abs().max() > 0.1

    has_varlen = isinstance(case.model, PreTrainedModel) and not why_no_flash(case.model.config)
    for attention in ("sdpa", "torch_varlen")[: 1 + has_varlen]:
        if attention == "torch_varlen":
            use_varlen_attention(case.model)
        found, loss, gradients = case.trained(case.packed())
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in expected_gradients.items():
            # That of a key's bias is 0 but for rounding: softmax does not see it.
            limit = 1e-4 * gradient.norm() + 1e-8
            assert (gradients[name] - gradient).norm() < limit, (attention, name)
    text = case.model.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full"] * text.num_hidden_layers
    num_layers = has_varlen * sum("linear" not in kind for kind in kinds)
    assert sum(later == 0 for *_, (_, later), _ in varlen.calls) == num_layers


@pytest.mark.parametrize("family", ["glm4v", "glm46v"])
def test_pictures_of_a_video_are_a_video_of_transformers(family: str, world: World) -> None:
    """GLM-V's model takes them as images, too: as such they stand in a row beside images."""
    case = build_case(world, family)
    row = case.alone(case.samples[2])
    expected = case.logits(row)
    grids = row.pop("image_grid_thw")
    assert len(grids) > 1
    row |= {
        "pixel_values_videos": row.pop("pixel_values"),
        "video_grid_thw": torch.tensor([[len(grids), *grids[0, 1:]]]),
        "mm_token_type_ids": 2 * row["mm_token_type_ids"],
    }
    torch.testing.assert_close(case.logits(row), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bidirectional", ["vision", None])
@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
def test_kernels_that_cannot_are_refused_by_name(family: str, bidirectional: str | None) -> None:
    needs_family(family)
    text = {"use_bidirectional_attention": bidirectional, "global_head_dim": 512}
    config = tiny_config(family, text)
    reason = "mask in which an image" if bidirectional else "heads of at most 256, .* some of 512"
    for name in ("flash_attention_2", "flash_attention_3"):
        with pytest.raises(ValueError, match=f"attention '{name}' .*{reason}.*; set sdpa"):
            check_attention(config, name)
    check_attention(config, "flex_attention")
    check_attention(tiny_config("qwen3_vl"), "flash_attention_2")


#: Some are shorter than the window of the convolution.
SHORT = [1, 70, 2, 3, 1, 9]


def recurrent_model() -> Any:
    sizes = {**FAMILIES["qwen3_5"].tiny.text, "vocab_size": 500}
    return randomise(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes)))


def short_row() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(500, (1, sum(SHORT)), generator=generator),
        "position_ids": torch.cat([torch.arange(length) for length in SHORT])[None],
        "use_cache": False,
    }


def segments_alone(model: Any) -> torch.Tensor:
    parts = short_row()["input_ids"].split(SHORT, dim=1)
    return torch.cat([model(part, use_cache=False).logits for part in parts], dim=1)


def test_short_segments_also_where_activations_are_computed_again() -> None:
    model = recurrent_model()
    names = list(model.state_dict())
    expected = segments_alone(model)
    expected.square().mean().backward()
    expected_gradients = gradients_of(model)
    assert isolate_segments(model) == isolate_segments(model) == 3
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(**short_row()).logits, expected, atol=1e-5, rtol=0)
    model.train()
    model.gradient_checkpointing_enable()
    found = model(**short_row()).logits
    model(**{**short_row(), "position_ids": None})  # another row before the first one's backward
    found.square().mean().backward()
    for name, gradient in gradients_of(model).items():
        other = expected_gradients[name]
        assert (gradient - other).norm() <= 1e-4 * other.norm()


def test_boundaries_that_are_given() -> None:
    model = recurrent_model()
    boundaries = torch.tensor([0, *SHORT]).cumsum(0)
    if Version("5.20") <= VERSION:  # 5.18 leaks instead
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            model(**short_row(), cu_seq_lens_q=boundaries)
    isolate_segments(model)
    with torch.no_grad():
        found = model(**short_row(), cu_seq_lens_q=boundaries, seq_idx=boundaries[None]).logits
        torch.testing.assert_close(found, segments_alone(model), atol=1e-5, rtol=0)


@torch.no_grad()
def test_rows_without_boundaries_stay_as_they_are() -> None:
    model, other = recurrent_model(), recurrent_model()
    isolate_segments(model)
    tokens = short_row()["input_ids"].reshape(2, -1)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    for kwargs in ({}, {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}):
        assert torch.equal(model(tokens, **kwargs).logits, other(tokens, **kwargs).logits)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "attention_mask": mask}
    assert torch.equal(model.generate(tokens, **options), other.generate(tokens, **options))


@pytest.mark.parametrize("name", ["cache", "cache_params", None])
def test_a_cache_of_any_name_is_refused(name: str | None) -> None:
    model = recurrent_model()
    isolate_segments(model)
    layer, cache = model.model.layers[0].linear_attn, DynamicCache(config=model.config)
    args, kwargs = ([], {name: cache}) if name else ([cache], {})
    hidden_states = torch.zeros(1, sum(SHORT), model.config.hidden_size)
    with pytest.raises(ValueError, match="a packed row cannot be cached; set use_cache=False"):
        layer(hidden_states, *args, segment_lengths=SHORT, **kwargs)


def test_what_would_leak_is_refused() -> None:
    model = recurrent_model()
    isolate_segments(model)
    two = {name: value.expand(2, -1) for name, value in short_row().items() if name != "use_cache"}
    with pytest.raises(ValueError, match="the batch has 2 packed rows; join"):
        model(**two, use_cache=False)
    few = {"num_attention_heads": 2, "num_key_value_heads": 2}
    small = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
    config = Lfm2Config(**small, **few, layer_types=["conv", "full_attention"])
    with pytest.raises(ValueError, match="Lfm2ForCausalLM has layers of type 'conv', which would"):
        isolate_segments(Lfm2ForCausalLM(config))
    recurrent = [
        MambaForCausalLM(MambaConfig(**small)),
        RwkvForCausalLM(RwkvConfig(**small, attention_hidden_size=32)),
    ]
    for other in recurrent:
        kind = "'(linear_attention|mamba)'"  # transformers 5.12 has the second
        with pytest.raises(ValueError, match=f"layers of type {kind}, which would"):
            isolate_segments(other)

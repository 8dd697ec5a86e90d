"""Every family: a packed row, through its encoder and
`to_transformers_kwargs`, gives the logits, loss and gradients of its samples alone."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from launch.model.packed_attention import use_varlen_attention
from launch.model.segments import isolate_segments, why_no_flash
from task_encoders.families import FAMILIES, build_sample_encoder
from task_encoders.media.video_file import read_video_header
from task_encoders.model_inputs import to_transformers_kwargs
from task_encoders.packs.tokenized import IGNORE_INDEX
from task_encoders.sample_encoder import EncodedSample
from tests.helpers.tiny_checkpoints import packed_batch
from tests.helpers.tiny_families import (
    CLIP,
    QWEN,
    encoded_samples,
    encoder_options,
    image_masks,
    save_tokenizer,
    tiny_model,
)
from tests.helpers.varlen import CpuVarlen

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
        kwargs = without_boundaries(to_transformers_kwargs(packed_batch([sample])))
        del kwargs["position_ids"]
        ids = self.encoder.media_token_ids
        sees_images = self.model.config.model_type.startswith("gemma4")
        if len(sample.position_ids) == 3 or sees_images:
            tokens = kwargs["input_ids"]
            types = (tokens == ids["image_token_id"]) + 2 * (tokens == ids["video_token_id"]).int()
            kwargs["mm_token_type_ids"] = types
            if sees_images:
                kwargs["attention_mask"] = image_masks(self.model, tokens, types)
        if "video_grid_thw" in kwargs and self.model.config.model_type == "qwen2_5_vl":
            seconds = self.encoder.sample_video(read_video_header(io.BytesIO(CLIP)))
            kwargs["second_per_grid_ts"] = torch.tensor([seconds.seconds_per_step])
        return kwargs

    @torch.no_grad()
    def logits(self, kwargs: dict[str, Any]) -> torch.Tensor:
        return self.model(**kwargs).logits[0]

    def gradients(self, *rows: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss per labelled token of all rows, and its gradients."""
        counts = [int((row["labels"] != IGNORE_INDEX).sum()) for row in rows]
        self.model.zero_grad()
        total = 0.0
        for row, count in zip(rows, counts, strict=True):
            loss = self.model(**row).loss * (count / sum(counts))
            loss.backward()
            total += float(loss)
        return total, {
            name: parameter.grad.clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }


def build_case(family: str, variant: str, folder: Path) -> Case:
    save_tokenizer(family, folder)
    options = encoder_options(family) | ({"template": "plain"} if variant == "plain" else {})
    encoder: Any = build_sample_encoder(family, str(folder), **options)
    samples = encoded_samples(family, encoder)
    model = tiny_model(family, encoder.media_token_ids, experts=variant == "experts")
    return Case(model, encoder, samples)


@pytest.fixture(params=CASES, ids=["-".join(filter(None, case)) for case in CASES])
def case(request: Any, tmp_path: Path) -> Case:
    family, variant = request.param
    return build_case(family, variant, tmp_path)


def test_every_family_is_compared() -> None:
    assert {family for family, _ in CASES} == FAMILIES.keys()


def test_packed_equals_alone(case: Case, varlen: CpuVarlen) -> None:
    name = case.model.config.model_type
    is_recurrent, sees_images = name.startswith("qwen3_5"), name.startswith("gemma4")
    if is_recurrent or sees_images:
        leaking = case.logits(without_boundaries(case.packed()))
    assert (isolate_segments(case.model) > 0) == is_recurrent
    alone = [case.alone(sample) for sample in case.samples]
    expected = torch.cat([case.logits(row) for row in alone])
    found = case.logits(case.packed())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    control = case.logits(case.packed(cross_sample_attention=True))
    assert (control - expected).abs().max() > (1 if sees_images else 0.1)
    if is_recurrent or sees_images:
        assert (leaking - expected).abs().max() > 0.1

    expected_loss, expected_gradients = case.gradients(*alone)
    assert len(expected_gradients) > 40
    has_varlen = isinstance(case.model, PreTrainedModel) and not why_no_flash(case.model.config)
    for attention in ("sdpa", "torch_varlen")[: 1 + has_varlen]:
        if attention == "torch_varlen":
            use_varlen_attention(case.model)
        loss, gradients = case.gradients(case.packed())
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
def test_pictures_of_a_video_are_a_video_of_transformers(family: str, tmp_path: Path) -> None:
    """GLM-V's model takes them as images, too: as such they stand in a row beside images."""
    case = build_case(family, "", tmp_path)
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

"""Families whose towers take whole pictures: megatron-core's layers compute what transformers' do,
and checkpoints come out as they went in."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from launch.loop.loss import shift_labels
from launch.loop.parallel import initialize_parallel
from launch.model.config import ModelConfig, transformers_classes
from launch.model.hf_checkpoint import published_name
from launch.model.megatron_model import PackedMegatronModel, build_model
from task_encoders.energon_samples import PackedBatch
from task_encoders.families import build_sample_encoder
from task_encoders.model_inputs import to_transformers_kwargs
from task_encoders.packs.tokenized import IGNORE_INDEX
from tests.helpers.rank_processes import run_ranks
from tests.helpers.tiny_checkpoints import (
    assert_same_tensors,
    forward,
    gathered_gradients,
    packed_batch,
    randomise,
)
from tests.helpers.tiny_families import (
    encoded_samples,
    encoder_options,
    save_tokenizer,
    tiny_model,
)

#: As in InternVL3's config.json, but for the length from which on it counts: the samples here, of
#: 50 to 96 tokens, all have angles of their own.
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
    "max_position_embeddings": 32,
}
#: What differs in the text models of published checkpoints.
TEXT = {
    "mistral": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e9},
        "sliding_window": None,
    },
    "qwen2": DYNAMIC,
}
#: Families, and language models of their checkpoints: InternVL3, 3.5; Mistral Small 3.1 and 3.2.
CASES = [("internvl3", "qwen2"), ("internvl3", "qwen3"), ("mistral3", "mistral")]
each_case = pytest.mark.parametrize(("family", "language"), CASES)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each case, and each family's tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for family, language in CASES:
        if not (folder / family).exists():
            save_tokenizer(family, folder / family)
        write_checkpoint(folder, family, language)
    return folder


def write_checkpoint(folder: Path, family: str, language: str, **given: Any) -> Path:
    """A tiny model's, with this language model."""
    config = tiny_model(family, encoder_of(folder, family).media_token_ids).config.to_dict()
    published = {"model_type": language, "head_dim": 16, **TEXT.get(language, {})}
    text = config["text_config"] | published | given
    classes, tied = transformers_classes(family), language == "qwen3"  # as small ones of 3.5 are
    whole = {**config, "text_config": text, "tie_word_embeddings": tied}
    checkpoint = folder / "-".join([family, language, *given])
    randomise(classes.model(classes.config.from_dict(whole))).save_pretrained(checkpoint)
    return checkpoint


def encoder_of(folder: Path, family: str) -> Any:
    return build_sample_encoder(family, str(folder / family), **encoder_options(family))


def built(checkpoint: Path, device: torch.device, **config: Any) -> PackedMegatronModel:
    values = {"family": checkpoint.name.partition("-")[0], "checkpoint": checkpoint, **config}
    return build_model(ModelConfig.model_validate(values), device=device)


def losses_of(model: PackedMegatronModel, batch: PackedBatch) -> torch.Tensor:
    """The losses of the labelled tokens."""
    labels = shift_labels(batch.labels)
    return forward(model, batch, labels)[0, labels[0] != IGNORE_INDEX]


@dataclasses.dataclass(frozen=True)
class Differences:
    """Largest differences of a packed row to its samples alone, in transformers."""

    loss: float
    gradient: float
    num_gradients: int
    without_boundaries: float


def compare(folder: Path, family: str, language: str, tensor_parallel: int) -> Differences:
    device = initialize_parallel(tensor_parallel)
    checkpoint = folder / f"{family}-{language}"
    reference = transformers_classes(family).model.from_pretrained(checkpoint).eval()
    # transformers' dynamic angles grow with the longest sample so far, and do not shrink again.
    samples = sorted(
        encoded_samples(family, encoder_of(folder, family)), key=lambda s: len(s.tokens)
    )
    expected = []
    for sample in samples:
        row = packed_batch([sample])
        logits = reference(**to_transformers_kwargs(row)).logits[0]
        labels = shift_labels(row.labels)[0]
        labelled = labels != IGNORE_INDEX
        expected.append(F.cross_entropy(logits[labelled], labels[labelled], reduction="none"))
    losses = torch.cat(expected)
    losses.sum().backward()

    model, batch = built(checkpoint, device), packed_batch(samples)
    found = losses_of(model, batch)
    one_segment = dataclasses.replace(batch, cu_lengths=batch.cu_lengths[:, [0, -1]])
    with torch.no_grad():
        control = losses_of(model, one_segment)
    found.sum().backward()
    gradients = gathered_gradients(model)
    errors = [
        float((gradients[published_name(name)] - own.grad).norm() / (own.grad.norm() + 1e-6))
        for name, own in reference.named_parameters()
        if gradients and own.grad is not None
    ]
    return Differences(
        loss=float((found - losses).abs().max()),
        gradient=max(errors, default=0.0),
        num_gradients=len(errors),
        without_boundaries=float((control - losses).abs().max()),
    )


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@each_case
def test_packed_megatron_equals_unpacked_transformers(
    family: str, language: str, tensor_parallel: int, checkpoints: Path, tmp_path: Path
) -> None:
    arguments = checkpoints, family, language, tensor_parallel
    ranks = run_ranks(tensor_parallel, tmp_path, compare, *arguments)
    for found in ranks:
        assert found.loss < 1e-5
        assert found.without_boundaries > 0.5
        assert found.gradient < 1e-4
    assert ranks[0].num_gradients > 40


@each_case
def test_a_checkpoint_comes_out_as_it_went_in(
    family: str, language: str, checkpoints: Path, tmp_path: Path
) -> None:
    source = checkpoints / f"{family}-{language}"
    built(source, initialize_parallel()).save_hf_checkpoint(tmp_path / "target")
    assert_same_tensors(tmp_path / "target", source, at_least=40)


def test_parts_that_are_frozen_get_no_gradient(checkpoints: Path) -> None:
    device = initialize_parallel()
    batch = packed_batch(encoded_samples("internvl3", encoder_of(checkpoints, "internvl3")))
    for part, name in (("vision", "vision_tower"), ("projector", "multi_modal_projector")):
        model = built(checkpoints / "internvl3-qwen2", device, freeze=[part])
        losses_of(model, batch).sum().backward()
        still = {n for n, own in model.named_parameters() if own.grad is None}
        assert still == {n for n, _ in model.named_parameters() if f"visual.{name}." in n}


def test_activations_computed_again_give_the_same_gradients(checkpoints: Path) -> None:
    device, found = initialize_parallel(), []
    batch = packed_batch(encoded_samples("mistral3", encoder_of(checkpoints, "mistral3")))
    for recompute in ("none", "full"):
        model = built(checkpoints / "mistral3-mistral", device, recompute=recompute).train()
        losses_of(model, batch).sum().backward()
        found.append({name: own.grad for name, own in model.named_parameters()})
    assert len(found[0]) > 30
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_what_is_not_built_is_refused_by_name(checkpoints: Path) -> None:
    device = initialize_parallel()
    config = ModelConfig(family="internvl3", checkpoint=checkpoints / "internvl3-qwen2")
    with pytest.raises(ValueError, match="rows of internvl3 cannot go over several ranks"):
        build_model(config, device=device, shares_rows=True)
    experts = {"num_experts": 4, "moe_intermediate_size": 32}
    sparse = write_checkpoint(checkpoints, "internvl3", "qwen3_moe", **experts)
    with pytest.raises(
        ValueError, match=r"qwen3_moe model is not built .* has model\.layers\.0\.mlp"
    ):
        built(sparse, device)
    slides = write_checkpoint(checkpoints, "mistral3", "mistral", sliding_window=4096)
    with pytest.raises(ValueError, match="sliding_window 4096 is not supported"):
        built(slides, device)
    with pytest.raises(ValueError, match=r"is a 'internvl'; set model\.family=internvl3"):
        build_model(ModelConfig(checkpoint=checkpoints / "internvl3-qwen2"), device=device)
    with pytest.raises(ValueError, match=r"'yarn'.* are not supported.*launch\.train_transformers"):
        build_model(ModelConfig(family="mistral3"), device=device)

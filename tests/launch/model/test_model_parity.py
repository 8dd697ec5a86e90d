"""Packed megatron-core equals unpacked transformers: logits, losses, gradients, on one rank and on
ranks that share rows or layers; and families whose towers take whole pictures."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import distributed as dist
from torch.nn import functional as F

from launch.loop.loss import shift_labels
from launch.loop.parallel import initialize_parallel
from launch.model.config import ModelConfig, transformers_class
from launch.model.megatron.model import PackedMegatronModel, build_model
from launch.model.megatron.weights import published_name
from task_encoders.model_inputs import to_transformers_kwargs
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import IGNORE_INDEX
from tests.helpers.rank_processes import run_ranks
from tests.helpers.tiny_checkpoints import (
    assert_same_tensors,
    forward,
    gathered_gradients,
    gradients_of,
    packed_batch,
    randomise,
    row_samples,
    unpacked_inputs,
)
from tests.helpers.tiny_checkpoints import write_checkpoint as write_qwen
from tests.helpers.tiny_families import encoded_samples, encoder_of, save_tokenizer, tiny_model

#: Families, and whether their embeddings are tied.
CASES = [("qwen2_vl", False), ("qwen2_5_vl", False), ("qwen3_vl", True)]
#: Families of whole pictures, and language models of their checkpoints: InternVL3, 3.5; Mistral
#: Small 3.1 and 3.2.
PICTURES = [("internvl3", "qwen2"), ("internvl3", "qwen3"), ("mistral3", "mistral")]
#: Every kind of sample is in them.
ROWS = ("mixed", "images_and_videos")
#: Options of packing, which change no logits.
PADDING: dict[str, dict[str, int]] = {
    "mixed": {},
    "images_and_videos": {"multiple": 8, "pad_to_length": 256},
    "pictures": {"multiple": 8},
}
#: As in InternVL3's config.json, but for the length from which on it counts: some of the samples
#: here, of 50 to 96 tokens, have angles of their own.
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
    "max_position_embeddings": 64,
}
#: What differs in the text models of published checkpoints.
TEXT = {
    "mistral": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e9},
        "sliding_window": None,
    },
    "qwen2": DYNAMIC,
}


def gather_vocabulary(logits: torch.Tensor) -> torch.Tensor:
    """(…, V / TP) on every rank -> (…, V)."""
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def compare(
    model: PackedMegatronModel,
    reference: Any,
    samples: list[EncodedSample],
    inputs_of: Callable[[EncodedSample], dict[str, Any]],
    padding: dict[str, int],
) -> dict[str, float]:
    """Largest differences of a packed row to its sub-samples alone; of gradients max |difference| /
    (max |reference| + 1e-6). Leaves the model with gradients in place of its weights."""
    group = parallel_state.get_context_parallel_group()
    multiple = 2 * group.size() if group.size() > 1 else 1
    batch = packed_batch(samples, **{"multiple": multiple} | padding)
    labels, real = shift_labels(batch.labels), ~batch.attn_mask[0]
    labelled = labels[0] != IGNORE_INDEX

    reference.zero_grad()
    expected = torch.cat([reference(**inputs_of(sample)).logits[0] for sample in samples])
    targets = labels[0, labelled]
    expected_loss = F.cross_entropy(expected[labelled[real]], targets, reduction="none")
    expected_loss.sum().backward()

    with torch.no_grad():
        logits = expected  # each of the ranks that share a row has those of its own tokens
        if group.size() == 1:
            logits = gather_vocabulary(forward(model, batch, None))[0, real]
        one_segment = dataclasses.replace(batch, cu_lengths=batch.cu_lengths[:, [0, -1]])
        control = forward(model, one_segment, labels, group)
    loss = forward(model, batch, labels, group)
    loss.sum().backward()
    loss = loss.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for whole in (control, loss, *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(whole, group=group)
    assert torch.all(loss[0, ~labelled] == 0)
    gradients = gathered_gradients(model)
    errors = [
        float((gradients[published_name(name)] - own.grad).abs().max())
        / (float(own.grad.abs().max()) + 1e-6)
        for name, own in reference.named_parameters()
        if gradients and own.grad is not None
    ]
    return {
        "labels": int(labelled.sum()),
        "gradients": len(errors),
        "logit": float((logits - expected).abs().max()),
        "loss": float((loss[0, labelled] - expected_loss).abs().max()),
        "gradient": max(errors, default=0.0),
        "without boundaries": float((control[0, labelled] - expected_loss).abs().max()),
    }


def write_checkpoint(folder: Path, family: str, language: str, **given: Any) -> Path:
    """A tiny model's, with this language model."""
    config = tiny_model(family, encoder_of(folder / family).media_token_ids).config.to_dict()
    published = {"model_type": language, "head_dim": 16, **TEXT.get(language, {})}
    text = config["text_config"] | published | given
    model, tied = transformers_class(family), language == "qwen3"  # as small ones of 3.5 are
    whole = {**config, "text_config": text, "tie_word_embeddings": tied}
    checkpoint = folder / "-".join([family, language, *given])
    randomise(model(model.config_class.from_dict(whole))).save_pretrained(checkpoint)
    return checkpoint


def built(checkpoint: Path, device: torch.device, **config: Any) -> PackedMegatronModel:
    values = {"family": checkpoint.name.partition("-")[0], "checkpoint": checkpoint, **config}
    return build_model(ModelConfig.model_validate(values), device=device)


def alone(sample: EncodedSample) -> dict[str, Any]:
    return to_transformers_kwargs(packed_batch([sample]))


def compare_all(folder: Path, layouts: Sequence[Any]) -> list[Any]:
    """Return the result of `compare_layout` for each layout."""
    found = []
    for layout in layouts:
        parallel_state.destroy_model_parallel()
        found.append(compare_layout(folder, *layout))
    return found


def compare_layout(
    folder: Path, tensor: int, context: int, *kinds: str
) -> dict[Any, dict[str, float]]:
    """Every case, those of Qwen's with these kinds of rows; most rows are padded."""
    device = initialize_parallel(tensor, context)
    found = {}
    for family, kind in CASES + PICTURES * (context == 1):
        checkpoint = folder / f"{family}-{kind}"
        reference = transformers_class(family).from_pretrained(checkpoint).eval()
        if (family, kind) in CASES:
            rows = {row: row_samples(reference, row) for row in kinds}
        else:
            # transformers' dynamic angles grow with the longest sample so far, and do not shrink.
            samples = encoded_samples(family, encoder_of(folder / family))
            rows = {"pictures": sorted(samples, key=lambda sample: len(sample.tokens))}
        for row, samples in rows.items():
            model = built(checkpoint, device)
            if row == [*rows][-1]:
                model.save_hf_checkpoint(folder / f"saved-{tensor}-{context}" / checkpoint.name)
            inputs_of = alone if row == "pictures" else unpacked_inputs
            found[family, kind, row] = compare(model, reference, samples, inputs_of, PADDING[row])
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each case, and the tokenizers of families of whole pictures."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for family, tied in CASES:
        write_qwen(folder / f"{family}-{tied}", family, tied=tied)
    for family, language in PICTURES:
        if not (folder / family).exists():
            save_tokenizer(family, folder / family)
        write_checkpoint(folder, family, language)
    return folder


@pytest.mark.parametrize(
    "layouts",
    [
        [(1, 1, "mixed")],
        [(2, 1, "images_and_videos"), (1, 2, "images_and_videos")],
        pytest.param([(1, 4, *ROWS), (2, 2, *ROWS)], marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_packed_megatron_equals_unpacked_transformers(
    layouts: list[Any], checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each layout: tensor parallel ranks, context parallel ranks, and kinds of rows. One rank
    computes losses of a few labels at a time."""
    ranks = math.prod(layouts[0][:2])
    if ranks == 1:
        monkeypatch.setattr("launch.model.packed_model.LOSS_CHUNK", 8)
        of_layouts = compare_all(checkpoints, layouts)
    else:
        of_layouts = run_ranks(ranks, tmp_path, compare_all, checkpoints, layouts)[0]
    for (tensor, context, *kinds), differences in zip(layouts, of_layouts, strict=True):
        assert len(differences) == len(CASES) * len(kinds) + len(PICTURES) * (context == 1)
        for case, found in differences.items():
            assert found["labels"] > 20, case
            assert max(found["logit"], found["loss"]) <= 1e-5, case
            assert found["gradient"] <= 1e-4, case
            assert found["gradients"] > 3 * 11, case  # weights and biases of three layers, and more
            assert found["without boundaries"] > 1e-1, case
            name = f"{case[0]}-{case[1]}"  # it comes out as it went in
            saved = checkpoints / f"saved-{tensor}-{context}" / name
            assert_same_tensors(saved, checkpoints / name, at_least=40)


def test_towers_of_whole_pictures_are_recomputed_and_frozen(checkpoints: Path) -> None:
    batch = packed_batch(encoded_samples("mistral3", encoder_of(checkpoints / "mistral3")))
    labels, found = shift_labels(batch.labels), []
    for own in ({}, {"recompute": "full"}, {"freeze": ["vision"]}, {"freeze": ["projector"]}):
        model = built(checkpoints / "mistral3-mistral", initialize_parallel(), **own).train()
        forward(model, batch, labels).sum().backward()
        found.append(gradients_of(model))
    whole, again, *frozen = found
    assert len(whole) > 30
    for name, gradient in whole.items():
        torch.testing.assert_close(again[name], gradient, atol=1e-6, rtol=1e-5, msg=name)
    for part, own_gradients in zip(("vision_tower", "multi_modal_projector"), frozen, strict=True):
        still = {name for name in whole if f"visual.{part}." in name}
        assert still == whole.keys() - own_gradients.keys() != set()


def test_what_is_not_built_is_refused_by_name(checkpoints: Path) -> None:
    device = initialize_parallel()
    config = ModelConfig(family="internvl3", checkpoint=checkpoints / "internvl3-qwen2")
    with pytest.raises(ValueError, match="rows of internvl3 cannot be split over several ranks"):
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
    with pytest.raises(ValueError, match=r"is a 'internvl3'; set model\.family=internvl3"):
        build_model(ModelConfig(checkpoint=checkpoints / "internvl3-qwen2"), device=device)
    with pytest.raises(ValueError, match=r"text has no field 'hidden'; choose from: .*hidden_size"):
        build_model(ModelConfig(text={"hidden": 8}), device=device)
    with pytest.raises(ValueError, match=r"'yarn'.* are not supported.*launch\.train_transformers"):
        build_model(ModelConfig(family="mistral3"), device=device)

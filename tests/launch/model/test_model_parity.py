"""Packed megatron-core equals unpacked transformers: logits, losses, gradients, at TP 1 and 2."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from torch import distributed as dist
from torch.nn import functional as F

from launch.loop.loss import shift_labels
from launch.loop.parallel import initialize_parallel
from launch.model.config import ModelConfig, transformers_classes
from launch.model.hf_checkpoint import published_name
from launch.model.megatron_model import PackedMegatronModel, build_model
from task_encoders.packs.tokenized import IGNORE_INDEX
from tests.helpers.rank_processes import run_ranks
from tests.helpers.tiny_checkpoints import (
    ROWS,
    forward,
    gathered_gradients,
    packed_batch,
    row_samples,
    unpacked_inputs,
    write_checkpoint,
)

CASES = [("qwen2_vl", False), ("qwen2_vl", True), ("qwen2_5_vl", False), ("qwen3_vl", True)]


@dataclasses.dataclass(frozen=True)
class Differences:
    """Largest differences of a packed row to its sub-samples alone."""

    num_labels: int
    logits: float
    loss: float
    #: largest over all weights of max |difference| / max |reference|
    gradient: float
    num_gradients: int
    #: of the loss, when the row is one segment
    without_boundaries: float


def gather_vocabulary(logits: torch.Tensor) -> torch.Tensor:
    """(…, V / TP) on every rank -> (…, V)."""
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.contiguous())
    return torch.cat(parts, dim=-1)


def reference_gradients(reference: Any) -> dict[str, torch.Tensor]:
    return {
        published_name(name): parameter.grad
        for name, parameter in reference.named_parameters()
        if parameter.grad is not None
    }


def compare(model: PackedMegatronModel, reference: Any, row: str) -> Differences:
    """Run one row packed, its sub-samples alone, and the row without boundaries.

    Leaves the model with gradients in place of its weights.
    """
    samples = row_samples(reference, row)
    batch = packed_batch(samples)
    labels = shift_labels(batch.labels)
    labelled = labels[0] != IGNORE_INDEX

    reference.zero_grad()
    expected = torch.cat([reference(**unpacked_inputs(sample)).logits[0] for sample in samples])
    expected_loss = F.cross_entropy(expected[labelled], labels[0, labelled], reduction="none")
    expected_loss.sum().backward()

    with torch.no_grad():
        logits = gather_vocabulary(forward(model, batch, None))[0]
        one_segment = dataclasses.replace(batch, cu_lengths=batch.cu_lengths[:, [0, -1]])
        control = forward(model, one_segment, labels)[0, labelled]
    loss = forward(model, batch, labels)
    assert torch.all(loss[0, ~labelled] == 0)
    loss.sum().backward()
    gradients = gathered_gradients(model)
    errors = [
        float((gradients[name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in reference_gradients(reference).items()
        if gradients
    ]
    return Differences(
        num_labels=int(labelled.sum()),
        logits=float((logits - expected).abs().max()),
        loss=float((loss[0, labelled] - expected_loss).abs().max()),
        gradient=max(errors, default=0.0),
        num_gradients=len(errors),
        without_boundaries=float((control - expected_loss).abs().max()),
    )


def compare_all(folder: Path, tensor_parallel: int) -> dict[tuple[str, bool, str], Differences]:
    """Every case with every kind of row."""
    device = initialize_parallel(tensor_parallel)
    found = {}
    for family, tied in CASES:
        checkpoint = folder / f"{family}-{tied}"
        reference = transformers_classes(family).model.from_pretrained(checkpoint).eval()
        config = ModelConfig.model_validate({"family": family, "checkpoint": checkpoint})
        for row in ROWS:
            model = build_model(config, device=device)
            assert dist.get_world_size() == parallel_state.get_tensor_model_parallel_world_size()
            found[family, tied, row] = compare(model, reference, row)
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for family, tied in CASES:
        write_checkpoint(folder / f"{family}-{tied}", family, tied=tied)
    return folder


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_packed_megatron_equals_unpacked_transformers(
    tensor_parallel: int, checkpoints: Path, tmp_path: Path
) -> None:
    if tensor_parallel == 1:
        differences = compare_all(checkpoints, 1)
    else:
        differences = run_ranks(2, tmp_path, compare_all, checkpoints, 2)[0]
    assert len(differences) == len(CASES) * len(ROWS)
    for case, found in differences.items():
        assert found.num_labels > 20, case
        assert found.logits <= 1e-5, case
        assert found.loss <= 1e-5, case
        assert found.gradient <= 1e-4, case
        assert found.num_gradients > 3 * 11, case  # weights and biases of three layers, and more
        assert found.without_boundaries > 1e-1, case


def test_a_changed_sub_sample_changes_no_other(checkpoints: Path) -> None:
    device = initialize_parallel(1)
    checkpoint = checkpoints / "qwen2_vl-False"
    reference = transformers_classes("qwen2_vl").model.from_pretrained(checkpoint)
    model = build_model(ModelConfig(checkpoint=checkpoint), device=device).eval()
    samples = row_samples(reference, "mixed")
    batch = packed_batch(samples)
    bounds = batch.cu_lengths[0].tolist()
    with torch.no_grad():
        before = forward(model, batch, None)[0]
        for changed, sample in enumerate(samples):
            tokens = np.where(sample.tokens < 1000, sample.tokens % 900 + 5, sample.tokens)
            other = dataclasses.replace(
                sample, tokens=tokens, image_pixels=sample.image_pixels[::-1].copy()
            )
            row = [*samples[:changed], other, *samples[changed + 1 :]]
            after = forward(model, packed_batch(row), None)[0]
            for i, (start, end) in enumerate(itertools.pairwise(bounds)):
                assert torch.equal(before[start:end], after[start:end]) == (i != changed)


def test_padding_changes_no_logits(checkpoints: Path) -> None:
    device = initialize_parallel(1)
    checkpoint = checkpoints / "qwen2_vl-False"
    reference = transformers_classes("qwen2_vl").model.from_pretrained(checkpoint)
    model = build_model(ModelConfig(checkpoint=checkpoint), device=device).eval()
    samples = row_samples(reference, "mixed")
    plain = packed_batch(samples)
    padded = packed_batch(samples, multiple=8, pad_to_length=256)
    assert padded.attn_mask.sum() > 40
    with torch.no_grad():
        expected = forward(model, plain, None)[0]
        found = forward(model, padded, None)[0][~padded.attn_mask[0]]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

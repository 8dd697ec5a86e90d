"""Ranks that share a row compute what one rank computes: losses, gradients, features of media."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import distributed

from launch.loop.loss import shift_labels
from launch.loop.parallel import initialize_parallel
from launch.model.config import ModelConfig, transformers_classes
from launch.model.qwen_vl import PackedQwen2VL, build_model
from task_encoders.energon_samples import PackedBatch
from task_encoders.model_inputs import to_packed_seq_params
from task_encoders.sample_encoder import IGNORE_INDEX
from tests.helpers.rank_processes import run_ranks
from tests.helpers.tiny_checkpoints import (
    ROWS,
    gathered_gradients,
    packed_batch,
    row_samples,
    write_checkpoint,
)

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
#: (context, tensor) parallel ranks; every row, or some.
LAYOUTS: list[Any] = [
    pytest.param(2, 1, ("several_images", "images_and_videos", "no_image")),
    *(
        pytest.param(context, tensor, tuple(ROWS), marks=pytest.mark.exhaustive)
        for context, tensor in ((2, 1), (4, 1), (2, 2), (4, 2))
    ),
]
Cases = dict[tuple[str, str], Any]


def token_losses(model: PackedQwen2VL, batch: PackedBatch, group: Any = None) -> torch.Tensor:
    """(1, S); of this rank's tokens, if a group shares the row."""
    losses: torch.Tensor = model(
        tokens=batch.tokens,
        position_ids=batch.position_ids,
        packed_seq_params=dataclasses.replace(to_packed_seq_params(batch), cp_group=group),
        imgs=batch.imgs,
        image_grid_thw=batch.image_grid_thw,
        labels=shift_labels(batch.labels),
        pixel_values_videos=batch.pixel_values_videos,
        video_grid_thw=batch.video_grid_thw,
    )
    return losses


def compute(
    folder: Path, context: int, tensor: int, rows: Sequence[str]
) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """Losses of the labelled tokens, with boundaries and without, and gradients of their sum; on
    the first rank, the gradients by their published names."""
    device = initialize_parallel(tensor, context)
    group = parallel_state.get_context_parallel_group()
    found: Cases = {}
    for family, row in itertools.product(FAMILIES, rows):
        checkpoint = folder / family
        reference = transformers_classes(family).model.from_pretrained(checkpoint)
        config = ModelConfig.model_validate({"family": family, "checkpoint": checkpoint})
        model = build_model(config, device=device)
        samples = row_samples(reference, row)
        batch = packed_batch(samples, pad_multiple=2 * context if context > 1 else 1)
        labelled = shift_labels(batch.labels)[0] != IGNORE_INDEX
        with torch.no_grad():
            one_segment = dataclasses.replace(batch, cu_lengths=batch.cu_lengths[:, [0, -1]])
            control = token_losses(model, one_segment, group)
        losses = token_losses(model, batch, group)
        losses.sum().backward()
        losses = losses.detach().clone()
        for whole in (control, losses):
            distributed.all_reduce(whole, group=group)
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(parameter.grad, group=group)
        found[family, row] = gathered_gradients(model) | {
            "losses": losses[0, labelled],
            "control": control[0, labelled],
        }
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        write_checkpoint(folder / family, family, tied=False)
    return folder


@pytest.fixture(scope="module")
def alone(checkpoints: Path) -> Cases:
    return compute(checkpoints, 1, 1, tuple(ROWS))


@pytest.mark.parametrize(("context", "tensor", "rows"), LAYOUTS)
def test_loss_and_gradients_are_those_of_one_rank(
    context: int, tensor: int, rows: Sequence[str], checkpoints: Path, alone: Cases, tmp_path: Path
) -> None:
    ranks = run_ranks(context * tensor, tmp_path, compute, checkpoints, context, tensor, rows)
    for case, found in ranks[0].items():
        expected = alone[case]
        assert found.keys() == expected.keys()
        assert len(found) > 3 * 11  # weights and biases of three layers, and more
        assert len(expected["losses"]) > 20
        torch.testing.assert_close(found["losses"], expected["losses"], atol=1e-5, rtol=0)
        assert (found["control"] - expected["losses"]).abs().max() >= 1, case
        for name in expected.keys() - {"losses", "control"}:
            largest = expected[name].abs().max()
            difference = (found[name] - expected[name]).abs().max()
            assert difference <= 1e-5 * max(1, largest), (case, name)
    assert len(ranks[0]) == len(FAMILIES) * len(rows)

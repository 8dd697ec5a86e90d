"""Ranks that share a row or layers compute what one rank computes: losses, gradients, weights; and
what cannot be divided."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from torch import distributed
from torch import distributed as dist

from launch.loop.loss import shift_labels
from launch.loop.parallel import initialize_parallel
from launch.model.config import ModelConfig, transformers_classes
from launch.model.megatron.context_parallel import part_of_rank
from launch.model.megatron.model import PackedMegatronModel, build_model, check_supported
from launch.model.megatron.tower import share_frames
from launch.model.megatron.weights import gather_weights
from task_encoders.samples import IGNORE_INDEX
from tests.helpers.rank_processes import run_ranks
from tests.helpers.tiny_checkpoints import (
    assert_same_tensors,
    forward,
    gathered_gradients,
    packed_batch,
    params_of,
    row_samples,
    transformers_model,
    write_checkpoint,
)

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
#: Every kind of sample is in them.
ROWS = ("mixed", "images_and_videos")
Cases = dict[tuple[str, str], Any]


def test_segments_are_cut_zigzag() -> None:
    """As in the module's example."""
    parts = [part_of_rank(params_of([4, 8]), 2, rank) for rank in range(2)]
    assert [part.own.tolist() for part in parts] == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]
    assert parts[1].cu_seqlens_q.tolist() == [0, 1, 2, 4, 6]
    assert parts[1].cu_seqlens_kv.tolist() == [0, 2, 5, 9, 15]


def test_segments_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"segments of \[4, 6\] tokens .* \(pad_multiple=4\)"):
        part_of_rank(params_of([4, 6]), 2, 0)


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 4), flops=st.lists(st.integers(1, 50), max_size=7))
def test_frames_are_shared_as_evenly_as_order_allows(size: int, flops: list[int]) -> None:
    bounds = share_frames(np.array(flops, np.float64), size)
    ways = itertools.combinations_with_replacement(range(len(flops) + 1), size - 1)
    most = min(max(shares([0, *way, len(flops)], flops)) for way in ways)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(flops), size + 1)
    assert max(shares(bounds, flops)) == most


def shares(bounds: Sequence[int], flops: Sequence[int]) -> list[int]:
    return [sum(flops[start:end]) for start, end in itertools.pairwise(bounds)]


def compute(
    folder: Path, context: int = 1, tensor: int = 1
) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """Losses of the labelled tokens, with boundaries and without, and gradients of their sum; on
    the first rank, the gradients by their published names."""
    device = initialize_parallel(tensor, context)
    group = parallel_state.get_context_parallel_group()
    found: Cases = {}
    for family, row in itertools.product(FAMILIES, ROWS):
        checkpoint = folder / family
        reference = transformers_classes(family).model.from_pretrained(checkpoint)
        config = ModelConfig.model_validate({"family": family, "checkpoint": checkpoint})
        model = build_model(config, device=device)
        samples = row_samples(reference, row)
        batch = packed_batch(samples, multiple=2 * context if context > 1 else 1)
        labels = shift_labels(batch.labels)
        labelled = labels[0] != IGNORE_INDEX
        with torch.no_grad():
            one_segment = dataclasses.replace(batch, cu_lengths=batch.cu_lengths[:, [0, -1]])
            control = forward(model, one_segment, labels, group)
        losses = forward(model, batch, labels, group)
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
    """These rows on one rank."""
    return compute(checkpoints)


@pytest.mark.parametrize(
    ("context", "tensor"),
    [
        (2, 1),
        *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in ((4, 1), (2, 2), (4, 2))),
    ],
)
def test_loss_and_gradients_are_those_of_one_rank(
    context: int, tensor: int, checkpoints: Path, alone: Cases, tmp_path: Path
) -> None:
    ranks = run_ranks(context * tensor, tmp_path, compute, checkpoints, context, tensor)
    for case, found in ranks[0].items():
        expected = alone[case]
        assert found.keys() == expected.keys()
        assert len(found) > 3 * 11  # weights and biases of three layers, and more
        assert len(expected["losses"]) > 20
        torch.testing.assert_close(found["losses"], expected["losses"], atol=1e-5, rtol=0)
        assert (found["control"] - expected["losses"]).abs().max() >= 1, case
        for name in expected.keys() - {"losses", "control"}:
            difference = (found[name] - expected[name]).abs().max()
            assert difference <= 1e-5 * expected[name].abs().max(), (case, name)
    assert len(ranks[0]) == len(FAMILIES) * len(ROWS)


CONFIG = ModelConfig(preset="tiny")


def gathered(model: PackedMegatronModel) -> dict[str, torch.Tensor]:
    tensors = gather_weights(model, model.hf_config)
    return {name: tensor for name, tensor in tensors if tensor is not None}


def equal_on_all_ranks(tensor: torch.Tensor) -> bool:
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor.contiguous())
    return all(torch.equal(copy, tensor) for copy in copies)


def examine_rank(source: Path, target: Path) -> dict[str, Any]:
    """A model and its gradients as one of two ranks sees them. Also copies a checkpoint."""
    device = initialize_parallel(2)
    build_model(ModelConfig(checkpoint=source), device=device).save_hf_checkpoint(target)
    model = build_model(CONFIG, device=device, seed=5)
    weights = gathered(model)
    reference = transformers_model("qwen2_vl", tied=True)  # finds positions, is not compared
    batch = packed_batch(row_samples(reference, "mixed"))
    batch.tokens[batch.tokens == reference.config.image_token_id] = model.hf_config.image_token_id
    forward(model, batch, shift_labels(batch.labels)).sum().backward()

    parameters = dict(model.named_parameters())
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    replicated = [
        name
        for name, parameter in parameters.items()
        if not getattr(parameter, "tensor_model_parallel", False)
    ]
    same = [equal_on_all_ranks(gradients[name]) for name in replicated]
    return {"weights": weights, "same": same}


def test_two_ranks_hold_one_model(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "qwen2_vl", tied=False)
    target = tmp_path / "target"
    ranks = run_ranks(2, tmp_path / "ranks", examine_rank, source, target)
    assert len(ranks) == 2
    assert_same_tensors(target, source)
    _check_weights_do_not_depend_on_tensor_parallelism(ranks)
    for rank in ranks:
        assert len(rank["same"]) > 20
        assert all(rank["same"])  # gradients of replicated parameters, without any reduction


def _check_weights_do_not_depend_on_tensor_parallelism(ranks: list[dict[str, Any]]) -> None:
    expected = gathered(build_model(CONFIG, device=initialize_parallel(1), seed=5))
    assert set(ranks[0]["weights"]) == set(expected)
    assert ranks[1]["weights"] == {}
    for name, tensor in expected.items():
        assert torch.equal(ranks[0]["weights"][name], tensor), name
    other = gathered(build_model(CONFIG, device=initialize_parallel(1), seed=6))
    name = "visual.merger.mlp.0.weight"
    assert not torch.equal(other[name], expected[name])


def test_sizes_that_cannot_be_divided_are_refused() -> None:
    text_config = CONFIG.build_transformers_config().text_config
    check_supported(text_config, 2)
    with pytest.raises(ValueError, match="num_key_value_heads 2 cannot be divided"):
        check_supported(text_config, 4)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rope_parameters", {"rope_type": "yarn"}, "'yarn'} are not supported"),
        ("rope_parameters", {"rope_type": "default"}, "'default'} are not supported"),
        (
            "rope_parameters",
            {"rope_type": "default", "mrope_section": [1], "partial_rotary_factor": 0.5},
            "'partial_rotary_factor': 0.5} are not supported",
        ),
        ("hidden_act", "gelu", "hidden_act 'gelu' is not supported"),
        ("layer_types", ["full_attention", "sliding_attention"], "use_sliding_window"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(field: str, value: Any, message: str) -> None:
    text_config = CONFIG.build_transformers_config().text_config
    setattr(text_config, field, value)
    with pytest.raises(ValueError, match=message):
        check_supported(text_config, 1)

"""The sharded AdamW against torch's own on whole tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn

from launch.config import OptimizerConfig
from launch.loop.optimizer import ShardedAdamW
from launch.loop.parallel import initialize_parallel
from tests.helpers.rank_processes import run_ranks

ADAM = OptimizerConfig(weight_decay=0.1)
STEPS = 4
MICRO_BATCHES = 4


def small_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(dtype)


def sharded(model: nn.Sequential, config: OptimizerConfig = ADAM, **options: Any) -> ShardedAdamW:
    """The optimizer over all ranks, the first module as the one layer."""
    device = initialize_parallel()
    dtype = model[0].weight.dtype
    return ShardedAdamW(model, config, [model[0]], dtype, device=device, **options)


def inputs(step: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 100 + micro_batch)
    return torch.randn(6, 7, generator=generator)


def reference_weights(max_norm: float | None) -> tuple[list[torch.Tensor], list[float]]:
    model = small_model()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    norms = []
    for step in range(STEPS):
        adamw.zero_grad()
        for micro_batch in range(MICRO_BATCHES):
            (model(inputs(step, micro_batch)).square().sum() / 10).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))))
        adamw.step()
    return [p.detach() for p in model.parameters()], norms


def train_sharded(
    max_norm: float | None, **options: Any
) -> tuple[list[torch.Tensor], list[float], int]:
    """The same micro batches, dealt out to the ranks; also how many moments this rank keeps."""
    model = small_model()
    optimizer = sharded(model, **options)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    norms = []
    for step in range(STEPS):
        for micro_batch in range(rank, MICRO_BATCHES, size):
            model(inputs(step, micro_batch)).square().sum().backward()
        norms.append(optimizer.step(learning_rate=0.01, denominator=10, max_norm=max_norm))
    weights = [weight.full_tensor() for weight in optimizer.state["weights"].values()]
    moments = optimizer.state["exp_avg"].values()
    return weights, norms, sum(moment.to_local().numel() for moment in moments)


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_one_rank_equals_torch(max_norm: float | None) -> None:
    weights, norms, _ = train_sharded(max_norm)
    expected, expected_norms = reference_weights(max_norm)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    assert max_norm is None or min(norms) > max_norm  # clipping was at work


def train_both_ways() -> list[Any]:
    return [train_sharded(0.05, stays_gathered=stays) for stays in (True, False)]


def test_two_ranks_equal_torch_and_keep_half_of_the_state_each(tmp_path: Path) -> None:
    for ranks in zip(*run_ranks(2, tmp_path, train_both_ways), strict=True):
        (first, norms, moments), (second, _, others) = ranks
        expected, expected_norms = reference_weights(0.05)
        total = sum(weight.numel() for weight in expected)
        assert moments + others == total
        assert abs(moments - others) <= 16  # a row of each weight
        assert all(map(torch.equal, first, second))
        torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-7)
        assert norms == pytest.approx(expected_norms, rel=1e-5)


def test_bfloat16_weights_follow_float32_shards() -> None:
    model = small_model(torch.bfloat16)
    optimizer = sharded(model)
    before = {name: shard.detach().clone() for name, shard in optimizer.shards.items()}
    for _ in range(8):  # each step is far below bfloat16's resolution; the shards add them up
        model(inputs(0, 0).bfloat16()).square().sum().backward()
        optimizer.step(learning_rate=1e-5, denominator=1, max_norm=None)
    for name, weight in model.named_parameters():
        shard = optimizer.shards[name]
        assert shard.dtype == torch.float32
        assert not torch.equal(shard, before[name])
        assert torch.equal(weight, shard.bfloat16())


def test_frozen_parts_and_parts_without_gradient_stay() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    model.forward = lambda rows: model[1](model[0](rows))  # type: ignore[method-assign]
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = sharded(model, OptimizerConfig(weight_decay=0.0))
    model(inputs(0, 0)).square().sum().backward()  # model[2] takes no part
    optimizer.step(learning_rate=0.01, denominator=1, max_norm=None)
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert moved == [False, False, True, True, False, False]


def test_hooks_of_weights_stay_and_an_infinite_gradient_changes_nothing() -> None:
    """Tensor parallel ranks add up gradients of norms in hooks."""
    norms = []
    for factor in (1, 3, float("inf")):
        model = small_model()
        before = [p.detach().clone() for p in model.parameters()]
        for weight in model.parameters():
            weight.register_hook(lambda gradient, factor=factor: factor * gradient)
        optimizer = sharded(model)
        model(inputs(0, 0)).square().sum().backward()
        norms.append(optimizer.step(learning_rate=0.01, denominator=1, max_norm=1.0))
        assert any(map(torch.equal, model.parameters(), before)) == (factor == float("inf"))
    assert norms[1] == pytest.approx(3 * norms[0])
    assert not np.isfinite(norms[2])


def test_a_model_frozen_throughout_is_refused() -> None:
    with pytest.raises(ValueError, match="frozen"):
        sharded(small_model().requires_grad_(False))

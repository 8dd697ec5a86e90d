"""The sharded AdamW against torch's own on whole tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from launch.config import OptimizerConfig
from launch.loop.optimizer import ShardedAdamW
from tests.helpers.rank_processes import run_ranks

ADAM = OptimizerConfig(weight_decay=0.1)
STEPS = 4
MICRO_BATCHES = 4


def small_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(dtype)


def inputs(step: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 100 + micro_batch)
    return torch.randn(6, 7, generator=generator)


def reference_weights(max_norm: float | None) -> tuple[list[torch.Tensor], list[float]]:
    model = small_model()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": others, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    norms = []
    for step in range(STEPS):
        adamw.zero_grad()
        for micro_batch in range(MICRO_BATCHES):
            (model(inputs(step, micro_batch)).square().sum() / 10).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))))
        adamw.step()
    return [p.detach() for p in model.parameters()], norms


def train_sharded(max_norm: float | None) -> tuple[list[torch.Tensor], list[float], int]:
    """The same micro batches, dealt out to the ranks; also how many moments this rank keeps."""
    world = distributed.is_initialized()
    rank, size = (distributed.get_rank(), distributed.get_world_size()) if world else (0, 1)
    group = distributed.group.WORLD if world else None
    model = small_model()
    optimizer = ShardedAdamW(model, ADAM, data_parallel_group=group)
    norms = []
    for step in range(STEPS):
        for micro_batch in range(rank, MICRO_BATCHES, size):
            model(inputs(step, micro_batch)).square().sum().backward()
            optimizer.accumulate()
        norms.append(optimizer.step(learning_rate=0.01, denominator=10, max_norm=max_norm))
    moments = [state["exp_avg"] for state in optimizer.state_dict()["adamw"]["state"].values()]
    weights = [p.detach().clone() for p in model.parameters()]
    return weights, norms, sum(moment.numel() for moment in moments)


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_one_rank_equals_torch(max_norm: float | None) -> None:
    weights, norms, _ = train_sharded(max_norm)
    expected, expected_norms = reference_weights(max_norm)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    assert max_norm is None or min(norms) > max_norm  # clipping was at work


def test_two_ranks_equal_torch_and_keep_half_of_the_state_each(tmp_path: Path) -> None:
    ranks = run_ranks(2, tmp_path, train_sharded, 0.05)
    (first, norms, moments), (second, _, _) = ranks
    expected, expected_norms = reference_weights(0.05)
    total = sum(weight.numel() for weight in expected)
    assert total / 2 <= moments <= total / 2 + 2  # half each, and padding: under one per bucket
    assert all(map(torch.equal, first, second))
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-7)
    assert norms == pytest.approx(expected_norms, rel=1e-5)


def test_bfloat16_weights_follow_float32_masters() -> None:
    model = small_model(torch.bfloat16)
    optimizer = ShardedAdamW(model, ADAM)
    before = [bucket.master.detach().clone() for bucket in optimizer.buckets]
    for _ in range(8):  # each step is far below bfloat16's resolution; the masters add them up
        model(inputs(0, 0).bfloat16()).square().sum().backward()
        optimizer.accumulate()
        optimizer.step(learning_rate=1e-5, denominator=1, max_norm=None)
    for bucket, start in zip(optimizer.buckets, before, strict=True):
        assert bucket.master.dtype == torch.float32
        assert not torch.equal(bucket.master, start)
        assert torch.equal(bucket.weights[bucket.own], bucket.master.bfloat16())


def test_state_of_another_model_is_refused() -> None:
    state = ShardedAdamW(nn.Linear(3, 3), ADAM).state_dict()
    with pytest.raises(ValueError, match="same model, frozen parts and number of ranks"):
        ShardedAdamW(nn.Linear(4, 3), ADAM).load_state_dict(state)


def test_frozen_parts_and_parts_without_gradient_stay() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = ShardedAdamW(model, OptimizerConfig(weight_decay=0.0))
    model[1](torch.randn(2, 5)).sum().backward()  # model[2] takes no part
    optimizer.accumulate()
    optimizer.step(learning_rate=0.01, denominator=1, max_norm=None)
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert moved == [False, False, True, True, False, False]


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = small_model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = ShardedAdamW(model, ADAM)
    (model(inputs(0, 0)).sum() * float("inf")).backward()
    optimizer.accumulate()
    norm = optimizer.step(learning_rate=0.01, denominator=1, max_norm=1.0)
    assert not torch.isfinite(torch.tensor(norm))
    assert all(map(torch.equal, model.parameters(), before))


def test_a_model_frozen_throughout_is_refused() -> None:
    with pytest.raises(ValueError, match="frozen"):
        ShardedAdamW(small_model().requires_grad_(False), ADAM)

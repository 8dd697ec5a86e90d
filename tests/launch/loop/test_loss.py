"""A token's weight must not depend on how a step is cut into ranks and micro batches."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.loop.loss import Normalization, loss_terms, weighted_sum
from task_encoders.packs.tokenized import IGNORE_INDEX

_ = IGNORE_INDEX


def row(*samples: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(1, S) labels as the loader gives them, and (1, P + 1) boundaries."""
    labels = torch.tensor([[label for sample in samples for label in sample]])
    ends = np.cumsum([0, *map(len, samples)])
    return labels, torch.tensor(ends, dtype=torch.int32)[None]


def step_loss(
    rows: list[tuple[torch.Tensor, torch.Tensor]],
    losses: list[torch.Tensor],
    normalization: Normalization,
) -> float:
    total = denominator = 0.0
    for (labels, cu_lengths), token_losses in zip(rows, losses, strict=True):
        terms = loss_terms((labels != _).float(), cu_lengths, normalization)
        total += float(weighted_sum(token_losses, terms))
        denominator += float(terms.denominator)
    return total / max(denominator, 1.0)


samples = st.lists(
    st.lists(st.booleans(), min_size=1, max_size=6).map(
        lambda flags: [_, *(7 if flag else _ for flag in flags[1:])]
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(samples=samples, seed=st.integers(0, 99), cut=st.integers(0, 8))
@pytest.mark.parametrize("normalization", ["token", "sample", "sqrt"])
def test_the_loss_does_not_depend_on_how_a_step_is_cut(
    normalization: Normalization, samples: list[list[int]], seed: int, cut: int
) -> None:
    labels, cu_lengths = row(*samples)
    token_losses = torch.rand(labels.shape, generator=torch.Generator().manual_seed(seed))
    whole = step_loss([(labels, cu_lengths)], [token_losses], normalization)
    parts = [part for part in (samples[:cut], samples[cut:]) if part]
    lengths = [sum(map(len, part)) for part in parts]
    pieces = list(token_losses.split(lengths, dim=1))
    assert step_loss([row(*part) for part in parts], pieces, normalization) == pytest.approx(whole)
    # ... and is what a loop over samples would give
    split = list(token_losses.split([len(sample) for sample in samples], dim=1))
    means = [
        losses[0, torch.tensor(sample).roll(-1) != _]
        for sample, losses in zip(samples, split, strict=True)
    ]
    labelled = [values for values in means if len(values)]
    power = {"token": 1.0, "sample": 0.0, "sqrt": 0.5}[normalization]
    if labelled:
        shares = torch.tensor([len(values) ** power for values in labelled])
        means = [values.mean() for values in labelled]
        assert whole == pytest.approx(float((torch.stack(means) * shares).sum() / shares.sum()))

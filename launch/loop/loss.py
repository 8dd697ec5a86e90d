"""The loss of a training step: per-token losses to one number, however the step is divided.

The sum and its denominator are kept apart until the end of a step, so that neither the number of
ranks nor of micro batches changes the weight of a token:

    loss = Σ weight · token loss / Σ denominator        both over all ranks and micro batches

Averaging per micro batch first, and then over micro batches, would give a token of a pack with few
labels more weight than one of a pack with many.
"""

from typing import Literal

import torch

from task_encoders.samples import IGNORE_INDEX

Normalization = Literal["token", "sample", "sqrt"]


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Shift (1, S) labels: position i then holds what position i predicts, token i + 1.

    Shifting the whole row is safe: every sub-sample's first label is IGNORE_INDEX, so the last
    token of one never predicts the first of the next.

        [_ a b | _ c] -> [a b _ c _]        (_ is IGNORE_INDEX)
    """
    shifted = labels.roll(-1, dims=1)
    shifted[:, -1] = IGNORE_INDEX
    return shifted


def sum_segments(values: torch.Tensor, cu_lengths: torch.Tensor) -> torch.Tensor:
    """Add up values (1, S) of each segment between boundaries (1, P + 1): (P,) float64."""
    until = torch.nn.functional.pad(values.flatten().double().cumsum(0), (1, 0))
    return until[cu_lengths.flatten().long()].diff()


def row_loss(
    token_losses: torch.Tensor,
    loss_weights: torch.Tensor,
    cu_lengths: torch.Tensor,
    normalization: Normalization,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (Σ weight · loss, Σ weight) of one row, both () float32; zeros without labels.

    "token": every token weighs what `loss_weights` say.
    "sample": every sample of a step weighs the same.
    "sqrt": every sample weighs the square root of its labelled tokens, as in InternVL
        (https://arxiv.org/abs/2412.05271, "square averaging").

    The tokens of a sample share its weight in proportion to theirs; samples without labels, and
    the padding at a row's end, count for nothing.

    Args:
        token_losses: (1, S) float32. Values where there is no label do not matter, not even NaN.
        loss_weights: (1, S) float32, not shifted; 0 where there is no label.
        cu_lengths: (1, P + 1) int32, the row's boundaries.
    """
    weights = loss_weights.roll(-1, dims=1)  # as `shift_labels`
    weights[:, -1] = 0
    denominator = weights.sum()
    if normalization != "token":
        labels, sums = sum_segments(weights > 0, cu_lengths), sum_segments(weights, cu_lengths)
        of_sample = labels.sqrt() if normalization == "sqrt" else (labels > 0).double()
        share = torch.where(labels > 0, of_sample / sums, 0.0).float()
        weights = weights * share.repeat_interleave(cu_lengths.flatten().diff())
        denominator = of_sample.sum().float()
    return (torch.where(weights > 0, token_losses, 0.0) * weights).sum(), denominator

"""Multimodal rotary positions (M-RoPE, https://arxiv.org/abs/2409.12191, section 2.1).

megatron-core's own module for this needs a CUDA device; this is its formula as a function that runs
anywhere.
"""

from collections.abc import Sequence

import torch


def rope_frequencies(
    position_ids: torch.Tensor,
    *,
    head_dim: int,
    base: float,
    sections: Sequence[int] = (),
    interleaved: bool = False,
) -> torch.Tensor:
    """Rotation angles of every position, as megatron-core's attention takes them.

    The head_dim / 2 frequencies are divided into `sections`: the first follow the temporal
    position, then height, then width, and so on in turn. Qwen3-VL assigns them one by one
    (`interleaved`): temporal, height, width, temporal, …, until a section is used up; the rest are
    temporal.

    Args:
        position_ids: (3, 1, S) temporal, height and width position; or (1, 1, S), tokens counted,
            which all frequencies follow.
        head_dim: channels of one attention head.
        base: rope_theta.
        sections: frequencies per section, head_dim / 2 in all; none of (1, 1, S).

    Returns:
        (S, 1, 1, head_dim) float32.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device)
    inverse_frequencies = 1.0 / base ** (exponents / head_dim)
    angles = position_ids.float()[..., None] * inverse_frequencies  # (…, 1, S, head_dim / 2)
    if not sections:
        (angles,) = angles
    elif interleaved:
        by_axis, angles = angles, angles[0].clone()
        for axis in (1, 2):
            places = slice(axis, 3 * sections[axis], 3)
            angles[..., places] = by_axis[axis, ..., places]
    else:
        pieces = angles.split(list(sections), dim=-1)
        angles = torch.cat([piece[i % 3] for i, piece in enumerate(pieces)], dim=-1)
    return torch.cat([angles, angles], dim=-1).transpose(0, 1)[:, :, None]

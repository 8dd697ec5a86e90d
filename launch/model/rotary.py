"""Rotary positions: multimodal ones (M-RoPE, https://arxiv.org/abs/2409.12191, section 2.1), and
angles that depend on the length of a sample.

megatron-core's own module for M-RoPE needs a CUDA device; this is its formula as a function that
runs anywhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams


def rope_base(
    rope: Mapping[str, Any], params: PackedSeqParams, *, max_positions: int, head_dim: int
) -> float | torch.Tensor:
    """The base of rotary angles: rope_theta, or one per token where rope_type is 'dynamic'
    (NTK-aware scaling, transformers' formula): it grows with a sample's own length beyond
    `max_positions` tokens.

    Args:
        rope: rope_parameters of the text model.
        params: the samples in a row of S tokens.
        max_positions: the text model's max_position_embeddings.

    Returns:
        A number, or (S,) float32.
    """
    theta = float(rope["rope_theta"])
    if rope["rope_type"] != "dynamic":
        return theta
    padded = params.cu_seqlens_q_padded
    places = (params.cu_seqlens_q if padded is None else padded).diff()
    lengths = params.cu_seqlens_q.diff().clamp(min=max_positions).float()
    factor = rope["factor"]
    grown = (factor * lengths / max_positions - (factor - 1)) ** (head_dim / (head_dim - 2))
    return theta * grown.repeat_interleave(places)


def rope_frequencies(
    position_ids: torch.Tensor,
    *,
    head_dim: int,
    base: float | torch.Tensor,
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
        base: see `rope_base`.
        sections: frequencies per section, head_dim / 2 in all; none of (1, 1, S).

    Returns:
        (S, 1, 1, head_dim) float32.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device)
    bases = base[:, None] if isinstance(base, torch.Tensor) else base
    inverse_frequencies = 1.0 / bases ** (exponents / head_dim)
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

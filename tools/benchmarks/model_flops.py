"""Floating point operations that a model needs for the real tokens of a row, not for padding.

Counted as Megatron does (Narayanan et al., 2021, https://arxiv.org/abs/2104.04473, appendix): two
per multiply-add, matrix products only, the backward pass twice the forward, recomputation not
counted. Attention is counted inside segments, half of it under a causal mask.
"""

from typing import Any, Final

import torch

from launch.loop.progress import PEAK_FLOPS

FORWARD_AND_BACKWARD: Final = 3


def peak_flops(device_name: str) -> float | None:
    """Operations per second of a device in PEAK_FLOPS, else None."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)


def row_flops(
    model: Any, segment_tokens: torch.Tensor, grid_thw: torch.Tensor, num_labels: int
) -> float:
    """Operations of one forward and backward.

    Args:
        model: a `launch.model.qwen_vl.PackedQwen2VL` on one rank.
        segment_tokens: (P,) real tokens in each segment.
        grid_thw: (N, 3) in patches, of images and videos; patches attend within a step of t.
        num_labels: positions whose logits are computed.
    """
    text = model.hf_config.text_config
    decoder = sum(p.numel() for p in model.language_model.decoder.parameters())
    lengths = segment_tokens.double()
    language = 2 * decoder * float(lengths.sum())
    language += 2 * text.num_hidden_layers * text.hidden_size * float(lengths.square().sum())
    language += 2 * text.hidden_size * text.vocab_size * num_labels
    vision = 0.0
    if len(grid_thw):
        blocks = model.visual.blocks
        width = blocks[0].norm1.weight.numel()
        patches = grid_thw[:, 1:].double().prod(dim=1).repeat_interleave(grid_thw[:, 0].long())
        weights = sum(p.numel() for p in blocks.parameters())
        vision += 2 * weights * float(patches.sum())
        vision += 4 * len(blocks) * width * float(patches.square().sum())
        merger = sum(p.numel() for p in model.visual.merger.parameters())
        vision += 2 * merger * float(patches.sum()) / 4
    return FORWARD_AND_BACKWARD * (language + vision)

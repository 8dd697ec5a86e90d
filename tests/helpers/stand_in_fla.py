"""Stand-in for the packages `fla` (flash-linear-attention) and `causal_conv1d`, whose kernels need
a GPU: the same functions in plain torch, which compute every segment of a row by itself.

Tests that install it prove that a framework hands the boundaries of a pack to every recurrent
layer. They do not prove that the kernels honour them: what those want of strides, alignment, types
or lengths, and their speed and accuracy, is for a GPU to show.

transformers does not use it. Its models are imported here before the stand-in is installed, and so
keep their own torch functions: samples that are trained alone have nothing from this file."""

import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe  # noqa: F401 (see above)


def _segments(cu_seqlens: torch.Tensor | None, x: torch.Tensor) -> list[slice]:
    """Segments of a row (B, T, ...). Raises ValueError for boundaries of several rows, or that do
    not cover the row."""
    if cu_seqlens is None:
        return [slice(0, x.shape[1])]
    bounds = cu_seqlens.tolist()
    if len(x) != 1 or bounds != sorted(bounds) or (bounds[0], bounds[-1]) != (0, x.shape[1]):
        raise ValueError(f"boundaries {bounds} for a row {tuple(x.shape)}")
    return [slice(a, b) for a, b in pairwise(bounds) if a < b]


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Causal convolution of each channel of one segment: x (B, T, D), weight (D, W)."""
    padded = F.pad(x.transpose(1, 2).float(), (weight.shape[1] - 1, 0))
    bias = None if bias is None else bias.float()
    y = F.conv1d(padded, weight[:, None].float(), bias, groups=len(weight)).transpose(1, 2)
    return {"silu": F.silu, "swish": F.silu, None: torch.Tensor.float}[activation](y).to(x.dtype)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    seq_idx: None = None,
    initial_state: None = None,
    output_final_state: bool = False,
    backend: str = "triton",
) -> tuple[torch.Tensor, None]:
    """`fla.modules.convolution.causal_conv1d`: x (B, T, D), weight (D, W)."""
    parts = [_convolve(x[:, s], weight, bias, activation) for s in _segments(cu_seqlens, x)]
    return torch.cat(parts, dim=1), None


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """`causal_conv1d.causal_conv1d_fn`: x (B, D, T), weight (D, W); seq_idx (B, T) numbers the
    segments."""
    rows = x.transpose(1, 2)
    if seq_idx is None:
        return _convolve(rows, weight, bias, activation).transpose(1, 2)
    found = []
    for row, numbers in zip(rows, seq_idx, strict=True):
        counts = numbers.unique_consecutive(return_counts=True)[1]
        cu_seqlens = F.pad(counts.cumsum(0), (1, 0))
        found.append(causal_conv1d(row[None], weight, bias, activation, cu_seqlens)[0])
    return torch.cat(found).transpose(1, 2)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`fla.ops.gated_delta_rule.chunk_gated_delta_rule` by transformers' torch function: q, k
    (B, T, H, K), v (B, T, HV, V), g and beta (B, T, HV), states of N segments (N, HV, K, V)."""
    q, k = (one.repeat_interleave(v.shape[2] // one.shape[2], dim=2) for one in (q, k))
    segments = _segments(cu_seqlens, q)
    if initial_state is not None and len(initial_state) != len(segments):
        raise ValueError(f"{len(initial_state)} states for {len(segments)} segments")
    parts = [
        modeling_qwen3_5.torch_chunk_gated_delta_rule(
            *(tensor[:, part] for tensor in (q, k, v, g, beta)),
            initial_state=None if initial_state is None else initial_state[n : n + 1],
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
        for n, part in enumerate(segments)
    ]
    outputs, states = zip(*parts, strict=True)
    return torch.cat(outputs, dim=1), torch.cat(states) if output_final_state else None


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`fla.modules.l2norm.l2norm`, over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


class FusedRMSNormGated(modeling_qwen3_5.Qwen3_5RMSNormGated):
    """`fla.modules.FusedRMSNormGated` with the gate's activation of Qwen3.5."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, activation: str = "silu", **at: Any):
        super().__init__(hidden_size, eps=eps)
        if activation not in ("silu", "swish"):
            raise ValueError(f"activation {activation!r}")
        self.to(at.get("dtype"))


#: Modules and what is imported from them.
MODULES: dict[str, dict[str, Any]] = {
    "fla": {},
    "fla.modules": {"FusedRMSNormGated": FusedRMSNormGated},
    "fla.modules.convolution": {"causal_conv1d": causal_conv1d},
    "fla.modules.l2norm": {"l2norm": l2norm},
    "fla.ops": {},
    "fla.ops.gated_delta_rule": {
        "chunk_gated_delta_rule": chunk_gated_delta_rule,
        "fused_recurrent_gated_delta_rule": modeling_qwen3_5.torch_recurrent_gated_delta_rule,
    },
    "causal_conv1d": {
        "causal_conv1d_fn": causal_conv1d_fn,
        "causal_conv1d_update": modeling_qwen3_5.causal_conv1d_update,
    },
}


def install() -> None:
    """Put the modules where an import finds them. Call it before a framework's own modules are
    imported: some of them look once."""
    for name, contents in MODULES.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        module.__spec__ = ModuleSpec(name, None)  # `find_spec` wants one
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)

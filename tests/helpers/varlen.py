"""torch's varlen attention of 2.11 on a CPU: the same arguments, and the same tensors saved."""

from typing import Any

import torch

from launch.model.packed_attention import KERNELS


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        ctx.save_for_backward(*given[:3])
        ctx.given = given[3:]
        return KERNELS["sdpa"](*given)

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> Any:
        leaves = [one.detach().requires_grad_() for one in ctx.saved_tensors]
        with torch.enable_grad():
            out = KERNELS["sdpa"](*leaves, *ctx.given)
        return *torch.autograd.grad(out, leaves, *gradient), None, None, None


class CpuVarlen:
    """In place of `varlen_attn`. `calls`: query heads, groups, window and dtype of each."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, tuple[int, int], torch.dtype]] = []

    def varlen_attn(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: None = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max())) == (max_q, max_k)
        assert query.dtype == key.dtype == value.dtype
        assert query.shape[2] == key.shape[2] == value.shape[2]
        self.calls.append((query.shape[1], key.shape[1], window_size, query.dtype))
        lengths = cu_seq_q, cu_seq_k, int(max_q), int(max_k)
        return _Varlen.apply(query, key, value, lengths, scale, window_size)

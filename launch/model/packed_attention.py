"""Attention inside the segments of a packed row, with the best kernel available.

One function, `varlen_attention`, serves the language model (through the layer spec, as
`PackedCoreAttention`) and the vision tower (through transformers' attention registry):

    flash_attn          flash-attn's flash_attn_varlen_func, where importable
    transformer_engine  TransformerEngine's DotProductAttention (language model only)
    torch_varlen        torch.nn.attention.varlen on CUDA
    sdpa                one scaled_dot_product_attention per segment: CPU, or float32 on CUDA
"""

import dataclasses
import functools
import importlib
import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

#: Name in transformers' attention registry. Its models look for "flash" in the name, and then pass
#: the whole row with its boundaries instead of calling once per image.
VISION_ATTENTION: Final = "packed_flash"

#: (query, key, value, cu_seqlens, max_seqlen, scale, causal) -> output, shapes as varlen_attention.
VarlenKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float, bool], torch.Tensor
]


def _flash_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(query, key, value, *lengths, softmax_scale=scale, causal=causal)


def _torch_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:  # torch before 2.13
            repeats = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    window = (-1, 0) if causal else (-1, -1)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    out = varlen_attn(query, key, value, *lengths, scale=scale, window_size=window, **options)
    assert isinstance(out, torch.Tensor)  # a pair only where return_aux asks for it
    return out


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    gqa = query.shape[1] != key.shape[1]
    outputs = []
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        q, k, v = (t[start:end].transpose(0, 1)[None] for t in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


KERNELS: Final[Mapping[str, VarlenKernel]] = {
    "flash_attn": _flash_attn,
    "torch_varlen": _torch_varlen,
    "sdpa": _sdpa,
}


@functools.cache
def _is_importable(package: str) -> bool:
    try:  # finding it is not enough: a build for another torch is found, but fails here
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def select_backend(device: torch.device, dtype: torch.dtype, requested: str = "auto") -> str:
    """The backend of the language model's attention for tensors of this kind.

    Raises:
        ValueError: the requested one is not installed, or cannot compute this kind.
    """
    on_gpu = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    available = ["sdpa"]
    if on_gpu:
        available.insert(0, "torch_varlen")
        if _is_importable("transformer_engine"):
            available.insert(0, "transformer_engine")
        if _is_importable("flash_attn"):
            available.insert(0, "flash_attn")
    if requested == "auto":
        return available[0]
    if requested not in available:
        raise ValueError(
            f"attention {requested!r} cannot be used for {dtype} on {device}; here are "
            f"{', '.join(available)}; set attention: auto"
        )
    return requested


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
    causal: bool,
    backend: str,
) -> torch.Tensor:
    """Attention of every token to its own segment.

    Args:
        query: (T, H, D).
        key, value: (T, G, D), G divides H.
        cu_seqlens: (P + 1,) int32, from 0 to T.
        max_seqlen: length of the longest segment.
        scale: factor of the scores.
        causal: whether a token sees only itself and those before it.
        backend: a name in KERNELS.

    Returns:
        (T, H, D).
    """
    return KERNELS[backend](query, key, value, cu_seqlens, max_seqlen, scale, causal)


class PackedCoreAttention(torch.nn.Module):
    """megatron-core's `core_attention` for packed rows; `backend` comes through the layer spec.

    Boundaries are those of the row's layout, padding included: padding follows the tokens of its
    own segment, where a causal token never looks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        backend: str = "sdpa",
    ) -> None:
        super().__init__()
        if config.context_parallel_size > 1 or config.attention_dropout:
            raise ValueError("packed attention has neither context parallelism nor dropout")
        self.backend = backend
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        if backend == "transformer_engine":
            from megatron.core.extensions.transformer_engine import TEDotProductAttention

            self.transformer_engine = TEDotProductAttention(
                config=config,
                layer_number=layer_number,
                attn_mask_type=attn_mask_type,
                attention_type=attention_type,
                softmax_scale=softmax_scale,
                cp_comm_type=cp_comm_type,
                pg_collection=pg_collection,
            )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend inside segments.

        Args:
            query: (S, 1, H, D), or (S, H, D) where `qkv_format` is "thd".
            key, value: the same with G groups for H heads.
            packed_seq_params: required; without boundaries samples would attend to each other.

        Returns:
            (S, 1, H·D); for "thd" (S, H, D), or (S, H·D) from TransformerEngine.
        """
        if packed_seq_params is None:
            raise ValueError("packed attention needs packed_seq_params; see to_packed_seq_params")
        is_thd = packed_seq_params.qkv_format == "thd"
        if not is_thd:
            query, key, value = (t.squeeze(1) for t in (query, key, value))
        if self.backend == "transformer_engine":
            thd = dataclasses.replace(packed_seq_params, qkv_format="thd")
            out = self.transformer_engine(
                query, key, value, None, attn_mask_type=attn_mask_type, packed_seq_params=thd
            )
        else:
            out = self._attend(query, key, value, packed_seq_params)
        return out if is_thd else out.reshape(out.shape[0], 1, -1)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        packed_seq_params: PackedSeqParams,
    ) -> torch.Tensor:
        """(S, H, D) from the same, with one of this project's kernels."""
        padded = packed_seq_params.cu_seqlens_q_padded
        return varlen_attention(
            query,
            key,
            value,
            cu_seqlens=packed_seq_params.cu_seqlens_q if padded is None else padded,
            max_seqlen=packed_seq_params.max_seqlen_q,
            scale=self.scale,
            causal=True,
            backend=self.backend,
        )


def vision_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    is_causal: bool,
    **_: Any,  # transformers passes the key's lengths too, and its own bookkeeping
) -> tuple[torch.Tensor, None]:
    """transformers' attention function of the vision tower: segments are images or windows.

    Args:
        query, key, value: (1, H, T, D).

    Returns:
        (1, T, H, D), and no attention weights.
    """
    backend = select_backend(query.device, query.dtype)
    out = varlen_attention(
        *(t[0].transpose(0, 1) for t in (query, key, value)),
        cu_seqlens=cu_seq_lens_q.to(torch.int32),
        max_seqlen=max_length_q,
        scale=scaling,
        causal=is_causal,
        backend="torch_varlen" if backend == "transformer_engine" else backend,
    )
    return out[None], None


def register_vision_attention() -> str:
    """Make `vision_attention` known to transformers, and return the name to ask for."""
    from transformers import AttentionInterface

    AttentionInterface.register(VISION_ATTENTION, vision_attention)
    return VISION_ATTENTION

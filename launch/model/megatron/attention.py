"""megatron-core's `core_attention` for packed rows, also of trees, and of rows that ranks share."""

import dataclasses
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from launch.model.megatron.context_parallel import RowPart
from launch.model.packed_attention import varlen_attention
from launch.model.prefix_trees import RowTrees

_BOUNDARIES: Final = (
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
)


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
            raise ValueError(
                "packed attention has no dropout, and its context parallelism comes with the row "
                "(see launch.model.megatron.context_parallel), not with context_parallel_size"
            )
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
            if isinstance(packed_seq_params, RowPart):
                raise ValueError("attention transformer_engine has no context parallelism here")
            if isinstance(packed_seq_params, RowTrees):  # its causal mask is aligned at the start
                raise ValueError("attention transformer_engine cannot compute prefix trees")
            # Padding follows the tokens of its segment, where a causal token never looks: with
            # boundaries that leave it out, its flash attention 2 would not be used. It tells that
            # there is none between segments by both boundaries being one tensor.
            ends = packed_seq_params.cu_seqlens_q_padded
            alike = {} if ends is None else dict.fromkeys(_BOUNDARIES, ends)
            thd = dataclasses.replace(packed_seq_params, qkv_format="thd", **alike)
            out = self.transformer_engine(
                query, key, value, None, attn_mask_type=attn_mask_type, packed_seq_params=thd
            )
        else:
            params = packed_seq_params
            keys: AbstractContextManager[tuple[Tensor, Tensor]] = nullcontext((key, value))
            if isinstance(params, RowPart):  # its tokens attend to the keys of all ranks
                keys = nullcontext(params.gather_keys(key, value))
            elif isinstance(params, RowTrees):
                keys = params.gather_keys(key, value)
            padded = params.cu_seqlens_q_padded is not None
            with keys as (key, value):
                out = varlen_attention(
                    query,
                    key,
                    value,
                    cu_seqlens=params.cu_seqlens_q_padded if padded else params.cu_seqlens_q,
                    max_seqlen=params.max_seqlen_q,
                    cu_seqlens_kv=params.cu_seqlens_kv_padded if padded else params.cu_seqlens_kv,
                    max_seqlen_kv=params.max_seqlen_kv,
                    scale=self.scale,
                    causal=True,
                    backend=self.backend,
                )
        return out if is_thd else out.reshape(out.shape[0], 1, -1)

"""megatron-core's `core_attention` for packed rows, also of trees, and of rows that ranks share."""

import math
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from launch.model.megatron.context_parallel import RowPart
from launch.model.packed_attention import CAUSAL, KERNELS
from launch.model.prefix_trees import RowTrees, layout_of


class PackedCoreAttention(torch.nn.Module):
    """Attention inside segments; `backend`, a name in KERNELS, comes through the layer spec.

    Boundaries are the row layout's, padding included: padding follows the tokens of its own
    segment, so that no causal token sees it.
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

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend inside segments.

        Args:
            query: (S, 1, H, D).
            key, value: (S, 1, G, D), G groups for H heads.
            packed_seq_params: required; without boundaries samples would attend to each other.

        Returns:
            (S, 1, H·D).
        """
        params = packed_seq_params
        if params is None:
            raise ValueError("packed attention needs packed_seq_params; see to_packed_seq_params")
        query, key, value = (t.squeeze(1) for t in (query, key, value))
        own = seen = layout_of(params)
        keys: Any = nullcontext((key, value))
        if isinstance(params, RowPart | RowTrees):  # tokens also attend to other segments' keys
            seen, keys = params.cu_seqlens_kv, params.gather_keys(key, value)
        lengths = own, seen, params.max_seqlen_q, params.max_seqlen_kv
        with keys as (key, value):
            out = KERNELS[self.backend](query, key, value, lengths, self.scale, CAUSAL)
        return out.reshape(out.shape[0], 1, -1)

"""Lets Megatron-Bridge be imported without TransformerEngine, which needs a GPU, and before Python
3.12. TransformerEngine is named where classes are defined; its layers that Qwen's models are built
of are core's own here, with attention that honours boundaries and has context parallelism. The
kernels of recurrent layers are those of `stand_in_fla`."""

import math
import sys
import types
import typing
from dataclasses import replace
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import typing_extensions
from torch.nn import functional as F

from tests.helpers import stand_in_fla

vars(typing)["override"] = typing_extensions.override

# First of all, as megatron-core looks for TransformerEngine too, and is to find none.
import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402, F401


class _Stub(types.ModuleType):
    """A module with any module or class in it."""

    __version__ = "2.10.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)  # peft looks for one

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub(name) if name.islower() else type(name, (torch.nn.Module,), {})


for _name in ("transformer_engine", "transformer_engine.pytorch"):
    sys.modules[_name] = _Stub(_name)
stand_in_fla.install()

from megatron.core.extensions import transformer_engine, transformer_engine_spec_provider  # noqa: E402
from megatron.core.models.gpt import gpt_layer_specs  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402

from launch.model.megatron.context_parallel import cut_row  # noqa: E402
from launch.model.packed_attention import CAUSAL, KERNELS  # noqa: E402


class Norm(torch.nn.Module):
    """TransformerEngine's norm, RMS or layer, of weights around 0 where the config says so."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.centre = int(config.layernorm_zero_centered_gamma)
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - self.centre))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, weight = x.shape[-1:], self.weight + self.centre
        if self.bias is None:
            return F.rms_norm(x, shape, weight, self.eps)
        return F.layer_norm(x, shape, weight, self.bias, self.eps)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """TransformerEngine's norm and linear layer in one, with its names of parameters."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        norm = Norm(config, input_size, config.layernorm_epsilon)
        self.layer_norm_weight, self.layer_norm_bias = norm.weight, norm.bias
        self._norm = [norm]  # in a list, not one more module

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(self._norm[0](x))


class DotProductAttention(torch.nn.Module):
    """TransformerEngine's attention inside the segments of a row; ranks of a context-parallel group
    gather all keys."""

    def __init__(
        self, config: Any, *_: Any, attn_mask_type: Any, pg_collection: Any = None, **__: Any
    ) -> None:
        super().__init__()
        self.is_causal = attn_mask_type != AttnMaskType.no_mask
        self.scale = 1 / math.sqrt(config.kv_channels)
        self.group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: Any,
        **__: Any,
    ) -> torch.Tensor:
        """(S, H, D) of query, key and value, (S, H, D)."""
        params = packed_seq_params
        padded = params.cu_seqlens_q_padded
        boundaries = params.cu_seqlens_q if padded is None else padded
        lengths = (boundaries,) * 2 + (int(params.max_seqlen_q),) * 2
        part = cut_row(replace(params, cp_group=self.group))
        if part is not None:
            with part.gather_keys(key, value) as gathered:
                key, value = gathered
            lengths = part.cu_seqlens_q, part.cu_seqlens_kv, part.max_seqlen_q, part.max_seqlen_kv
        window = CAUSAL if self.is_causal else (-1, -1)
        return KERNELS["sdpa"](query, key, value, lengths, self.scale, window)


#: Under the names of core's own classes around TransformerEngine's.
_LAYERS = {
    "TENorm": Norm,
    "TEColumnParallelLinear": ColumnParallelLinear,
    "TERowParallelLinear": RowParallelLinear,
    "TELayerNormColumnParallelLinear": LayerNormColumnParallelLinear,
    "TEDotProductAttention": DotProductAttention,
    "TEColumnParallelGroupedLinear": None,  # experts one by one
}
for _module in (transformer_engine, transformer_engine_spec_provider):
    vars(_module).update(_LAYERS)
vars(gpt_layer_specs).update(
    TESpecProvider=transformer_engine_spec_provider.TESpecProvider, TENorm=Norm
)

for _name in ("range_push", "range_pop"):  # NVTX comes with CUDA
    setattr(torch.cuda.nvtx, _name, lambda *_: None)
torch.compiler.set_stance("force_eager")  # small models: compiling takes longer

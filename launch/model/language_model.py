"""The language model: megatron-core's GPTModel with packed attention in its layer spec, and rotary
positions (M-RoPE, https://arxiv.org/abs/2409.12191, section 2.1): megatron-core's own module for
them needs a CUDA device.
"""

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import distributed
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from launch.model.packed_attention import PackedCoreAttention
from task_encoders.packs.tokenized import IGNORE_INDEX

#: Labels whose logits exist at once: in float32, 152,000 words for 2,048 labels are 1.2 GB.
LOSS_CHUNK: Final = 2048


class RecomputedTransformerLayer(TransformerLayer):
    """A layer that keeps its input only, and runs again in the backward pass.

    megatron-core's own recompute saves the state of CUDA's generators and needs a CUDA device;
    there is no dropout here, so there is no state to save.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same as TransformerLayer's."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(
            super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
        )


def head_dim_of(text_config: Any) -> int:
    """Channels of one attention head."""
    given = getattr(text_config, "head_dim", None)
    return int(given or text_config.hidden_size // text_config.num_attention_heads)


def layer_spec(*, backend: str, recompute: bool, qk_norm: bool) -> ModuleSpec:
    """megatron-core's local layer spec with `PackedCoreAttention` as its core attention."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_norm)
    if recompute:
        spec.module = RecomputedTransformerLayer
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(
        module=PackedCoreAttention, params={"backend": backend}
    )
    return spec


#: Fusions do not exist on a CPU, and tests should run the code that trains.
_UNFUSED: Final = {
    "apply_rope_fusion": False,  # TransformerEngine's restarts the angles in every segment
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
}


def transformer_config(
    text_config: Any,
    tensors: Container[str],
    tensor_parallel: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> TransformerConfig:
    """megatron-core's config of a text model with these tensors, without what needs a CUDA
    device."""
    return TransformerConfig(
        num_layers=text_config.num_hidden_layers,
        hidden_size=text_config.hidden_size,
        ffn_hidden_size=text_config.intermediate_size,
        num_attention_heads=text_config.num_attention_heads,
        num_query_groups=text_config.num_key_value_heads,
        layernorm_epsilon=text_config.rms_norm_eps,
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias="model.layers.0.self_attn.q_proj.bias" in tensors,  # Qwen2's
        qk_layernorm="model.layers.0.self_attn.q_norm.weight" in tensors,  # Qwen3's
        kv_channels=head_dim_of(text_config),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor_parallel,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,  # weights are loaded, see hf_weights
        **_UNFUSED,
    )


def build_language_model(
    hf_config: Any,
    tensors: Container[str],
    *,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    recompute: bool,
) -> GPTModel:
    """This rank's part of the language model, its weights not yet set.

    Args:
        hf_config: transformers' config of the whole model.
        tensors: published names of its tensors.
        backend: see `packed_attention.select_backend`.
        recompute: whether layers run again in the backward pass instead of keeping activations.

    Raises:
        ValueError: the config asks for something that is not built here.
    """
    text_config = hf_config.text_config
    size = parallel_state.get_tensor_model_parallel_world_size()
    check_supported(text_config, size)
    core_config = transformer_config(text_config, tensors, size, dtype=dtype, device=device)
    spec = layer_spec(backend=backend, recompute=recompute, qk_norm=core_config.qk_layernorm)
    model = GPTModel(
        core_config,
        # The last norm is chosen here, as the layers' are: core would take Apex's, where that is
        # installed without TransformerEngine, which cannot be an RMSNorm.
        TransformerBlockSubmodules([spec] * core_config.num_layers, layer_norm=WrappedTorchNorm),
        vocab_size=text_config.vocab_size,
        max_sequence_length=text_config.max_position_embeddings,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="none",  # the angles are made once per row, see rotary
        scatter_embedding_sequence_parallel=False,
    )
    model = model.to(dtype)  # torch's norms do not follow params_dtype
    _sum_norm_gradients(model)
    return model


def _sum_norm_gradients(language_model: GPTModel) -> None:
    """Make the gradients of query and key norms sums over tensor parallel ranks: every rank has the
    whole norms, but applies them to its own heads only."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return
    group = parallel_state.get_tensor_model_parallel_group()

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        distributed.all_reduce(gradient, group=group)
        return gradient

    for name, parameter in language_model.named_parameters():
        if name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
            parameter.register_hook(summed)


def check_supported(text_config: Any, tensor_parallel: int) -> None:
    """Refuse a config that would train a model other than the one it describes."""
    divided = {
        "num_attention_heads": text_config.num_attention_heads,
        "num_key_value_heads": text_config.num_key_value_heads,
        "intermediate_size": text_config.intermediate_size,
        "vocab_size": text_config.vocab_size,
    }
    for name, value in divided.items():
        if value % tensor_parallel:
            raise ValueError(
                f"{name} {value} cannot be divided by tensor_parallel {tensor_parallel}; "
                "choose a smaller tensor_parallel"
            )
    if text_config.hidden_act != "silu":
        raise ValueError(f"hidden_act {text_config.hidden_act!r} is not supported, only 'silu'")
    _check_rope(text_config)
    if "sliding_attention" in (getattr(text_config, "layer_types", None) or ()):
        raise ValueError("use_sliding_window is not supported; set it to false in config.json")
    if text_config.model_type == "mistral" and text_config.sliding_window is not None:
        raise ValueError(
            f"sliding_window {text_config.sliding_window} is not supported (it is 4096 where "
            "config.json names none); if the model has none, set it to null in config.json"
        )


def _check_rope(text_config: Any) -> None:
    """Refuse rotary angles that are not computed here."""
    rope = text_config.rope_parameters
    needs_sections = text_config.model_type.endswith("vl_text")
    scales_queries = rope.get("llama_4_scaling_beta")  # by their positions
    known = {"default"} if needs_sections else {"default", "dynamic"}
    whole = rope.get("partial_rotary_factor", 1.0) == 1.0
    is_known = rope["rope_type"] in known and whole and not scales_queries
    if not is_known or (needs_sections and "mrope_section" not in rope):
        raise ValueError(
            f"rope_parameters {rope} are not supported, only rope_type 'default' (in older files "
            "'mrope'), in Qwen's VL families with an mrope_section, in others also 'dynamic'; use "
            "python -m launch.train_transformers"
        )


def token_losses(
    labels: torch.Tensor, losses_at: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """(1, S) float32: the loss of every token, 0 where it is ignored.

    Args:
        labels: (S,) int64, shifted.
        losses_at: the losses (n,) at positions (n,) of the row; it is called on one chunk of the
            labelled positions after another, and again in the backward pass.
    """
    positions = (labels != IGNORE_INDEX).nonzero()[:, 0]
    chunks = positions.split(LOSS_CHUNK)  # one, empty, where nothing is labelled
    if len(chunks) == 1:
        losses = losses_at(positions)
    else:
        recomputed = functools.partial(
            checkpoint, losses_at, use_reentrant=False, preserve_rng_state=False
        )
        losses = torch.cat([recomputed(chunk) for chunk in chunks])
    row = torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)
    return row.index_copy(0, positions, losses.float())[None]


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

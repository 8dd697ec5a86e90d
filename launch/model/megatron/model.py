"""Models for packed rows: megatron-core's GPTModel and transformers' vision tower.

patches ─▶ vision tower ─▶ features ┐ (replicated on tensor parallel ranks, see vision_tower)
tokens  ─▶ embedding ───────────────┴▶ decoder, attention inside segments ─▶ loss of labels

In Qwen3-VL, features from inner layers of the tower are added to the outputs of the decoder's first
layers (DeepStack). Rotary positions (M-RoPE, https://arxiv.org/abs/2409.12191, section 2.1) are
computed here: megatron-core's own module needs a CUDA device.
"""

import dataclasses
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from launch.model.config import ModelConfig, part_of, transformers_class
from launch.model.megatron.attention import PackedCoreAttention
from launch.model.megatron.context_parallel import RowPart, cut_row
from launch.model.megatron.tower import Medium, build_visual, media_features
from launch.model.megatron.weights import (
    WRITTEN,
    checkpoint_weights,
    gather_weights,
    head_dim_of,
    load_weights,
    model_rules,
    published_name,
    published_shapes,
    random_weights,
    write_checkpoint,
)
from launch.model.packed_attention import is_importable, select_backend
from launch.model.packed_model import token_losses
from launch.model.prefix_trees import layout_of
from task_encoders.energon_samples import PackedBatch
from task_encoders.families import FAMILIES
from task_encoders.families.base.cost import cost_of_sizes


class RecomputedTransformerLayer(TransformerLayer):
    """A layer that keeps its input only, and runs again in the backward pass.

    megatron-core's own recompute saves the state of CUDA's generators and needs a CUDA device;
    there is no dropout here, so there is no state to save.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer, as TransformerLayer does."""
        return checkpoint(
            super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
        )


#: Fields of megatron-core's config: fusions that are possible. Attention, norms and the sum of
#: gradients are not megatron-core's here, which therefore has none of their fusions.
_FUSIONS: Final = ("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion")


def transformer_config(
    text_config: Any,
    tensors: Container[str],
    tensor_parallel: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    fused: bool = False,
) -> TransformerConfig:
    """Make megatron-core's config of a text model with these tensors; `fused` needs CUDA."""
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
        perform_initialization=False,  # weights are loaded, see weights.py
        # A kernel of TransformerEngine. Rows are not "thd" for it, see `forward`: it would restart
        # the angles in every segment.
        apply_rope_fusion=fused and is_importable("transformer_engine"),
        bias_activation_fusion=fused,  # compiled by torch
        bias_dropout_fusion=fused,  # compiled by torch
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def _summed(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    distributed.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
    return gradient


def check_supported(text_config: Any, tensor_parallel: int) -> None:
    """Refuse a config that would train another model than it describes."""
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
    if "sliding_attention" in (getattr(text_config, "layer_types", None) or ()):
        raise ValueError("use_sliding_window is not supported; set it to false in config.json")
    if text_config.model_type == "mistral" and text_config.sliding_window is not None:
        raise ValueError(
            f"sliding_window {text_config.sliding_window} is not supported (it is 4096 where "
            "config.json names none); if the model has none, set it to null in config.json"
        )


def rope_angles(
    text_config: Any, position_ids: torch.Tensor, params: PackedSeqParams
) -> torch.Tensor:
    """Compute the rotation angles of every position, as megatron-core's attention takes them.

    The head_dim / 2 frequencies are divided into sections (`mrope_section`): the first follow the
    temporal position, then height, then width, and so on in turn. Qwen3-VL assigns them one by one
    (`mrope_interleaved`): temporal, height, width, temporal, …, until a section is used up; the
    rest are temporal.

    If rope_type is 'dynamic', each sample has a base of its own, which grows with its length beyond
    `max_position_embeddings` tokens (NTK-aware scaling, transformers' formula).

    Args:
        position_ids: (3, 1, S) temporal, height and width position; or (1, 1, S), the number of the
            token, which all frequencies follow.
        params: the samples in the row.

    Returns:
        (S, 1, 1, head_dim) float32.
    """
    rope, head_dim = text_config.rope_parameters, head_dim_of(text_config)
    base: float | torch.Tensor = float(rope["rope_theta"])
    if rope["rope_type"] == "dynamic":
        longest, factor = text_config.max_position_embeddings, rope["factor"]
        lengths = params.cu_seqlens_q.diff().clamp(min=longest).float()
        grown = (factor * lengths / longest - (factor - 1)) ** (head_dim / (head_dim - 2))
        base = (base * grown.repeat_interleave(layout_of(params).diff()))[:, None]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device)
    inverse_frequencies = 1.0 / base ** (exponents / head_dim)
    angles = position_ids.float()[..., None] * inverse_frequencies  # (…, 1, S, head_dim / 2)
    sections = rope.get("mrope_section")
    if not sections:
        (angles,) = angles
    elif rope.get("mrope_interleaved"):
        by_axis, angles = angles, angles[0].clone()
        for axis in (1, 2):
            places = slice(axis, 3 * sections[axis], 3)
            angles[..., places] = by_axis[axis, ..., places]
    else:
        pieces = angles.split(list(sections), dim=-1)
        angles = torch.cat([piece[i % 3] for i, piece in enumerate(pieces)], dim=-1)
    return torch.cat([angles, angles], dim=-1).transpose(0, 1)[:, :, None]


class PackedMegatronModel(MegatronModule):
    """A `PackedModel` of megatron-core's layers. Made by `build_model`."""

    def __init__(
        self, family: str, hf_config: Any, language_model: GPTModel, visual: torch.nn.Module
    ) -> None:
        super().__init__(language_model.config)
        self._family = FAMILIES[family]
        self.hf_config = hf_config
        self.checkpoint: Path | None = None
        self.language_model = language_model
        self.visual = visual
        sizes = hf_config.text_config.to_dict(), hf_config.vision_config.to_dict()
        self.cost = cost_of_sizes("", *sizes)
        #: (S, 1, H) of the current row, for each of the first layers not yet run
        self._deep_features: list[torch.Tensor] = []
        deep = getattr(hf_config.vision_config, "deepstack_visual_indexes", None) or ()
        if len(deep) > len(language_model.decoder.layers):
            raise ValueError(
                f"deepstack_visual_indexes {list(deep)} feed {len(deep)} layers, the language "
                f"model has {len(language_model.decoder.layers)}"
            )
        for layer in language_model.decoder.layers[: len(deep)]:
            layer.register_forward_hook(self._add_deep_features)

    def forward(
        self, row: PackedBatch, segments: PackedSeqParams, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the losses of a row, or its logits (1, S / CP, vocab_size / TP) for this rank's
        tokens and words. Ranks of the segments' `cp_group` compute a part of the row each."""
        part = cut_row(segments)
        own = part.own if part else slice(None)
        if isinstance(self, FSDPModule) and torch.is_grad_enabled():
            # Ranks add up the tower's gradients together, also those whose rows do not use it.
            for parameter in self.visual.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        embeddings, self._deep_features = self._embed(row, part)
        angles = rope_angles(self.hf_config.text_config, row.position_ids[..., own], segments)
        hidden = self.language_model.decoder(
            hidden_states=embeddings,
            attention_mask=None,
            rotary_pos_emb=angles,
            # Not "thd": megatron-core would look up angles segment by segment, each time waiting.
            packed_seq_params=dataclasses.replace(part or segments, qkv_format="sbhd"),
        )
        output_layer = self.language_model.output_layer
        head = output_layer.weight
        if self.language_model.share_embeddings_and_output_weights:
            head = self.language_model.shared_embedding_or_output_weight()
        if labels is None:
            return output_layer(hidden, weight=head)[0].transpose(0, 1)
        own_labels = labels[0, own]

        def losses_at(positions: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
            logits = output_layer(hidden[positions], weight=head)[0].squeeze(1)
            return vocab_parallel_cross_entropy(logits, own_labels[positions])

        losses = token_losses(own_labels, head, losses_at)
        if part is None:
            return losses
        return losses.new_zeros(1, len(part.owner)).index_copy(1, part.own, losses)

    def layers(self) -> list[torch.nn.Module]:
        return list(self.language_model.decoder.layers)

    def kernels(self) -> str:
        layer, core = self.language_model.decoder.layers[0], self.language_model.config
        attention = layer.self_attention.core_attention.backend
        weight = layer.mlp.linear_fc1.weight
        fused = [name for name in _FUSIONS if getattr(core, name)]
        return (
            f"attention {attention}; in the vision tower "
            f"{select_backend(weight.device, weight.dtype)}; {', '.join(fused) or 'no fusions'}"
        )

    def save_hf_checkpoint(self, folder: Path) -> None:
        """Gather tensors over the first tensor parallel group, and write them on rank 0."""
        if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
            names = WRITTEN[self._family.tensor_names]
            gathered = gather_weights(self, self.hf_config)
            tensors = ((published_name(name, names), tensor) for name, tensor in gathered)
            write_checkpoint(folder, tensors, self.hf_config, like=self.checkpoint)
        torch.distributed.barrier()

    def _add_deep_features(
        self, _module: Any, _inputs: Any, outputs: tuple[torch.Tensor, Any]
    ) -> tuple[torch.Tensor, Any]:
        """Add the next deep features to a layer's outputs. A hook of the first layers."""
        if not self._deep_features:
            return outputs
        hidden, context = outputs
        return hidden + self._deep_features.pop(0), context

    def _embed(
        self, row: PackedBatch, part: RowPart | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Embed this rank's tokens, (S, 1, H), with features in the places of media tokens. Returns
        the embeddings, and the features that are added there after the first layers."""
        tokens = row.tokens
        own = tokens if part is None else tokens[:, part.own]
        embeddings = self.language_model.embedding(input_ids=own, position_ids=None)
        config = self.hf_config
        video_token_id = getattr(config, "video_token_id", -1)  # none if frames are images
        media = (
            ("image", config.image_token_id, row.imgs, row.image_grid_thw),
            ("video", video_token_id, row.pixel_values_videos, row.video_grid_thw),
        )
        present = [
            Medium(kind, token_id, patches.to(embeddings.dtype), grids.long())
            for kind, token_id, patches, grids in media
            if len(grids)
        ]
        deep: list[torch.Tensor] = []
        if present:
            layout = self._family.build.IMAGE_LAYOUT
            last, *others = media_features(self.visual, layout, tokens, present, part, self.cost)
            ids = [medium.token_id for medium in present]
            embeddings = _put_features(embeddings, own, ids, last)
            deep = [_put_features(torch.zeros_like(embeddings), own, ids, one) for one in others]
        if self.training and not embeddings.requires_grad:
            # Only the projector is trained, and this row has no image: keep backward() possible.
            embeddings.requires_grad_()
        return embeddings, deep


def _put_features(
    embeddings: torch.Tensor, tokens: torch.Tensor, token_ids: Sequence[int], features: torch.Tensor
) -> torch.Tensor:
    """Put features in the places of their tokens: those of the first id, then of the next."""
    masks = [tokens[0] == token_id for token_id in token_ids]
    parts = features.split([int(mask.sum()) for mask in masks])
    for mask, part in zip(masks, parts, strict=True):
        embeddings = embeddings.masked_scatter(mask[:, None, None], part)
    return embeddings


def model_outline(config: ModelConfig) -> Any:
    """Make transformers' model with shapes, but without weights. Raises ValueError if the
    checkpoint or the sizes cannot be used."""
    hf_config, model = config.build_transformers_config(), transformers_class(config.family)
    if not isinstance(hf_config, model.config_class):
        raise ValueError(
            f"a {hf_config.model_type} model is not built from megatron-core's layers here; use "
            "python -m launch.train_transformers"
        )
    with torch.device("meta"):
        return model(hf_config)


def build_model(
    config: ModelConfig,
    *,
    device: torch.device,
    seed: int = 0,
    shares_rows: bool = False,
    layers_config: Callable[[TransformerConfig], TransformerConfig] | None = None,
) -> PackedMegatronModel:
    """Build the model of this rank: its share of the language model, and the whole vision tower.

    Needs `launch.loop.parallel.initialize_parallel`. Weights are the same on all data parallel
    ranks and do not depend on tensor parallelism.

    Args:
        seed: the seed of random weights.
        shares_rows: rows are split over several ranks.
        layers_config: changes the checkpoint's config of the layers for Megatron-LM's loop; without
            it they are for the loop of `launch.train`.

    Raises:
        ValueError: the checkpoint or the sizes cannot be used.
    """
    if shares_rows and FAMILIES[config.family].build.IMAGE_LAYOUT != "patches":
        raise ValueError(
            f"rows of {config.family} cannot be split over several ranks; set parallel.context=1, "
            "and pack for one rank each"
        )
    outline = model_outline(config)
    hf_config, dtype = outline.config, config.resolve_dtype(device)
    text_config, shapes = hf_config.text_config, published_shapes(outline)
    size = parallel_state.get_tensor_model_parallel_world_size()
    check_supported(text_config, size)
    fused = config.fusions and device.type == "cuda"
    core_config = transformer_config(
        text_config, shapes, size, dtype=dtype, device=device, fused=fused
    )
    if layers_config is not None:
        core_config = layers_config(core_config)
    backend = select_backend(device, dtype, config.attention)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=core_config.qk_layernorm)
    if config.recompute == "full":
        spec.module = RecomputedTransformerLayer
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(
        module=PackedCoreAttention, params={"backend": backend}
    )
    language_model = GPTModel(
        core_config,
        # The last norm is chosen here, as the layers' norms are: if Apex is installed without
        # TransformerEngine, core would take Apex's, which cannot be an RMSNorm.
        TransformerBlockSubmodules([spec] * core_config.num_layers, layer_norm=WrappedTorchNorm),
        vocab_size=text_config.vocab_size,
        max_sequence_length=text_config.max_position_embeddings,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="none",  # the angles are made once per row, see rope_angles
        scatter_embedding_sequence_parallel=False,
    )
    language_model = language_model.to(dtype)  # torch's norms do not follow params_dtype
    # Every tensor parallel rank has the whole query and key norms, but applies them to its own
    # heads only: their gradients are sums over the ranks. Megatron-LM's loop adds them up itself.
    sums_norms = size > 1 and layers_config is None
    for name, parameter in language_model.named_parameters():
        if sums_norms and name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
            parameter.register_hook(_summed)
    visual = build_visual(outline.model, config, hf_config, dtype, device)  # changes the outline
    model = PackedMegatronModel(config.family, hf_config, language_model, visual).to(device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(name) not in config.freeze)
    rules = model_rules(model, hf_config)
    used = {part for name, _ in model.named_parameters() for part in rules[name].names}
    if unused := sorted(set(shapes) - used):
        raise ValueError(
            f"a {hf_config.text_config.model_type} model is not built from megatron-core's layers "
            f"here: it has {unused[0]}; use python -m launch.train_transformers"
        )
    if config.checkpoint is None:
        read = random_weights(hf_config, shapes, seed=seed, device=device)
    else:
        read = checkpoint_weights(config.checkpoint, shapes)
    load_weights(model, hf_config, read)
    model.checkpoint = config.checkpoint
    return model

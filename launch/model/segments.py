"""Changes to models of transformers that keep the samples of a packed row apart.

Attention of transformers is cut where text positions restart, as long as it is causal. If an
image's tokens see each other (Gemma 4's sliding layers), the mask of transformers takes the first
sample's images for all samples'; here such a mask is made of the same parts in another order.

A gated delta net (the linear attention of Qwen3.5) is not cut: unless it is given the boundaries,
and kernels of other packages that take them, its recurrent state and the window of its convolution
run from one sample into the next, silently. Here it is called once per segment, and begins each
with empty states:

    position_ids [0 1 2 0 1 0 1 2 3] -> calls on [a a a], [b b] and [c c c c]

A call's cost is that of its tokens, so a row costs the same as its samples alone. On rows with
prefix trees a branch begins with the states that its trunk leaves: through the argument of a cache,
or, with the kernels of flash-linear-attention, in one call on all trunks and one on all branches.
"""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import accumulate, chain
from typing import Any, Final

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn
from torch.nn import functional as F

from launch.model.packed_attention import (
    TREE_ATTENTION,
    is_importable,
    packed_attention,
    register_attention,
)
from launch.model.prefix_trees import RowTrees, layout_of, row_trees
from task_encoders.families import FAMILIES

#: Kinds of layers that see other tokens through the attention mask alone.
_ATTENTION: Final = {"full_attention", "sliding_attention", "chunked_attention"}
#: Widest heads that flash attention takes.
_FLASH_WIDTH: Final = 256
#: transformers' name of recurrent layers, the module in them, and the arguments with the lengths
#: and the trunks of segments.
_RECURRENT: Final = "linear_attention"
_MODULE: Final = "linear_attn"
_SEGMENTS: Final = "segment_lengths"
_TRUNKS: Final = "segment_trunks"
#: Versions of transformers whose recurrent layers take states as `_States` has them.
_TAKE_STATES: Final = ">=5.21,<5.25"


def isolate_segments(model: nn.Module) -> int:
    """Make a model's recurrent layers begin every segment of a packed row with empty states, and
    let the tokens of an image see each other, if its config says so, within their segment.

    Segments are those of `cu_seq_lens_q`, if the model is given it, or begin where text positions
    restart: the places at which transformers' attention is cut. Rows without boundaries are
    computed as before. Gradients equal those of the segments alone as well, also with activations
    computed again.

    Args:
        model: a whole model of transformers; changed in place. A second call changes nothing.

    Returns:
        The number of recurrent layers.

    Raises:
        ValueError: the model has layers that carry state in a way not known here, or its attention
            runs on a kernel that cannot compute it. The model's forward raises it for packed rows
            with a cache, or several in a batch.
    """
    check_attention(model.config, getattr(model.config, "_attn_implementation", None) or "")
    for module in model.modules():
        has_hook = _hand_down_masks in module._forward_pre_hooks.values()
        if hasattr(module, "language_model") and _shows_images(module.config) and not has_hook:
            module.register_forward_pre_hook(_hand_down_masks, with_kwargs=True)
    decoders: dict[nn.Module, list[Any]] = {}
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList):
            found = [getattr(layer, _MODULE) for layer in layers if hasattr(layer, _MODULE)]
            decoders |= {module: found} if found else {}
    num_layers = sum(map(len, decoders.values()))
    config: Any = model.config
    kinds = list(getattr(config.get_text_config(), "layer_types", None) or ())
    unknown = sorted(set(kinds) - _ATTENTION - {_RECURRENT})
    is_stateful = any(getattr(module, "_is_stateful", False) for module in model.modules())
    if kinds.count(_RECURRENT) != num_layers or (is_stateful and not num_layers):
        unknown.append(_RECURRENT)
    if unknown:
        raise ValueError(
            f"{type(model).__name__} has layers of type {unknown[0]!r}, which would carry state "
            "across the samples of a pack; train it on unpacked samples"
        )
    for decoder, layers in decoders.items():
        if _hand_down_segments in decoder._forward_pre_hooks.values():
            continue
        decoder.register_forward_pre_hook(_hand_down_segments, with_kwargs=True)
        for layer in layers:
            # Not by a module around it, so that weights keep their names.
            vars(layer)["forward"] = functools.partial(_by_segment, layer, layer.forward)
    return num_layers


def check_attention(config: Any, attention: str) -> None:
    """Raise ValueError if a kernel of transformers cannot compute a model's attention."""
    is_flash = attention.startswith(("flash_attention", "torch_varlen"))
    if is_flash and (reason := why_no_flash(config)):
        raise ValueError(f"attention {attention!r} {reason}; set sdpa, flex_attention or eager")


def check_positions(config: Any, seq_length: int, *, trees: bool = False) -> None:
    """Raise ValueError if a long sample would change the angles of others: of all in its row, as
    transformers computes 'dynamic' angles for the largest position of a row; with `trees`, of all
    samples that share its prefix, whatever computes them."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "dynamic" and seq_length > text.max_position_embeddings:
        raise ValueError(
            f"seq_length {seq_length:,} > max_position_embeddings {text.max_position_embeddings:,} "
            "of a model with rope_type 'dynamic': a longer sample would change the angles of all "
            f"others {'with its prefix' if trees else 'in its row'}; pack with a smaller "
            "pack.seq_length, or "
            f"{'without pack.share_prefixes' if trees else 'use python -m launch.train'}"
        )


def why_no_flash(config: Any) -> str:
    """Name the reason why flash attention cannot compute a model's attention; empty if it can."""
    if _shows_images(config):
        return "has no mask in which an image's tokens see each other"
    text = config.get_text_config()
    of_layers = getattr(text, "per_layer_config", None)
    layers = [of_layers[i] for i in range(text.num_hidden_layers)] if of_layers else [text]
    widest = max(getattr(one, "head_dim", 0) or 0 for one in layers)
    if widest > _FLASH_WIDTH:
        return f"takes heads of at most {_FLASH_WIDTH}, and this model has some of {widest}"
    return ""


def _shows_images(config: Any) -> bool:
    """Tell whether the tokens of an image see each other in a model's sliding layers."""
    text = config.get_text_config()
    return getattr(text, "use_bidirectional_attention", None) == "vision"


def _hand_down_masks(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the masks of a model's layers to its arguments, for a packed row.

    transformers looks up the blocks of an image at positions within segments, as if every segment
    began with the row; here segments are one more condition, on places in the row. Images see
    themselves in sliding layers, within the window, as in transformers' `generate` and in
    google/gemma; its forward of Gemma 4 12B (5.23) shows them in all layers, and beyond the window
    (https://github.com/huggingface/transformers/issues/46711).
    """
    from transformers import masking_utils as masks

    if "row_trees" in kwargs:  # its attention needs no masks
        return args, kwargs
    lengths, tokens = _segment_lengths(kwargs), kwargs.get("input_ids")
    if lengths is None or tokens is None or kwargs.get("attention_mask") is not None:
        return args, kwargs
    text, device = model.config.get_text_config(), tokens.device
    check_attention(text, text._attn_implementation)
    number = torch.arange(len(lengths), device=device)
    segments = number.repeat_interleave(torch.tensor(lengths, device=device))[None]
    blocks = _image_blocks(model.config, tokens)
    given = {
        "config": text,
        "inputs_embeds": tokens.new_empty((*tokens.shape, 0), dtype=model.dtype),
        "attention_mask": None,
        "past_key_values": None,
    }
    inside = masks.packed_sequence_mask_function(segments)
    window = masks.sliding_window_overlay(text.sliding_window)
    found = {
        "full_attention": masks.create_causal_mask(**given, and_mask_function=inside),
        "sliding_attention": masks.create_causal_mask(
            **given,
            or_mask_function=masks.blockwise_overlay(blocks),
            and_mask_function=masks.and_masks(window, inside),
        ),
    }
    return args, {**kwargs, "attention_mask": found}


def _image_blocks(config: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Number the images that tokens belong to: [. i i . i] -> [-1 0 0 -1 1]."""
    is_image = (tokens == config.image_token_id) | (tokens == config.video_token_id)
    begins = is_image & ~nn.functional.pad(is_image, (1, -1))
    return torch.where(is_image, begins.cumsum(-1) - 1, -1)


def trees_of_row(config: Any, params: PackedSeqParams, tokens: torch.Tensor) -> RowTrees | None:
    """Describe a row (1, S) for a model with `use_tree_attention`, including its images if their
    tokens see each other; None for another model. Raises ValueError if the row has trees
    nevertheless."""
    if not has_tree_attention(config):
        if isinstance(params, RowTrees):
            raise ValueError("a row with prefix trees needs `use_tree_attention(model)`")
        return None
    if not isinstance(params, RowTrees):
        layout = layout_of(params)
        no_padding = torch.zeros_like(tokens, dtype=torch.bool)
        params = row_trees(params, torch.full_like(layout[1:], -1), no_padding)
    if not _shows_images(config):
        return params
    return dataclasses.replace(params, blocks=_image_blocks(config, tokens)[0])


def _hand_down_segments(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the segments' lengths, and the trunk of each, to a decoder's arguments, which it passes
    on to its layers. Raises ValueError for a trunk with padding, which would change its state."""
    trees: RowTrees | None = kwargs.get("row_trees")
    if trees is None:
        return args, {**kwargs, _SEGMENTS: _segment_lengths(kwargs)}
    own, seen = trees.cu_seqlens_q.diff().tolist(), trees.cu_seqlens_kv.diff().tolist()
    for number, trunk in enumerate(trees.parents):
        if trunk >= 0 and seen[number] - own[number] != own[trunk]:
            raise ValueError(
                "a trunk has padding, which would change the state that recurrent layers hand to "
                "its branches; set pad_multiple to 1"
            )
    return args, {**kwargs, _SEGMENTS: own, _TRUNKS: trees.parents}


def _segment_lengths(kwargs: dict[str, Any]) -> list[int] | None:
    """Find the lengths of a row's segments, if it has boundaries."""
    from transformers.masking_utils import find_packed_sequence_indices

    boundaries = kwargs.get("cu_seq_lens_q")
    if boundaries is not None:
        return list(boundaries.diff().tolist())
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None:
        return None  # transformers does not look for boundaries either
    if positions.ndim == 3:
        if len(positions) != 4:
            return None  # rows of M-RoPE alone, which jump at images
        positions = positions[0]
    segments = find_packed_sequence_indices(positions)
    if segments is None:
        return None
    if len(segments) != 1:
        raise ValueError(f"the batch has {len(segments)} packed rows; join all packs into one")
    return list(segments[0].bincount().tolist())


def _by_segment(
    layer: Any,
    forward: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    *args: Any,
    segment_lengths: list[int] | None = None,
    segment_trunks: Sequence[int] = (),
    **kwargs: Any,
) -> torch.Tensor:
    """Call a recurrent layer's forward on each segment, (1, S, H) in all."""
    from transformers import Cache

    if segment_lengths is None:
        return forward(hidden_states, *args, **kwargs)
    # By its type: transformers 5.24 calls it `cache`, and earlier versions `cache_params`.
    if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
        raise ValueError("a packed row cannot be cached; set use_cache=False")
    for name in ("cu_seq_lens_q", "seq_idx", "row_trees"):  # of the row, not of a segment
        kwargs.pop(name, None)
    parts = hidden_states.split(segment_lengths, dim=1)
    if max(segment_trunks, default=-1) < 0:
        return torch.cat([forward(part, *args, **kwargs) for part in parts], dim=1)
    if _has_fla(hidden_states.device):
        return _in_two_calls(layer, hidden_states, segment_lengths, segment_trunks)
    cache = "cache" if "cache" in inspect.signature(forward).parameters else "cache_params"
    left, outputs = dict[int, _States](), []
    for number, (trunk, part) in enumerate(zip(segment_trunks, parts, strict=True)):
        # A branch changes its own states and not the trunk's.
        states = _States() if trunk < 0 else copy.copy(left[trunk])
        outputs.append(forward(part, *args, **{**kwargs, cache: states}))
        if trunk < 0:
            left[number] = states
    return torch.cat(outputs, dim=1)


class _States:
    """State of a recurrent layer after a segment, with the methods of transformers' cache: the last
    inputs of its convolution, and the state of its delta rule. Gradients flow through both."""

    _conv: torch.Tensor | None = None
    _recurrent: torch.Tensor | None = None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # otherwise a branch of one token would change its trunk's state in place

    def update_conv_state(
        self, inputs: torch.Tensor, layer_idx: int, conv_kernel_size: int
    ) -> torch.Tensor:
        """Return the inputs (1, D, T) after those of the states, whose outputs the layer drops."""
        whole = inputs if self._conv is None else torch.cat([self._conv, inputs], dim=-1)
        self._conv = whole[..., 1 - conv_kernel_size :]
        return whole

    def update_recurrent_state(self, state: torch.Tensor, layer_idx: int) -> None:
        self._recurrent = state


def _has_fla(device: torch.device) -> bool:
    """Tell whether the kernels of flash-linear-attention can compute on a device."""
    return device.type == "cuda" and is_importable("fla.ops.gated_delta_rule")


def _in_two_calls(
    layer: Any, hidden_states: torch.Tensor, lengths: list[int], trunks: Sequence[int]
) -> torch.Tensor:
    """Compute a gated delta net by flash-linear-attention: all segments without a trunk, and from
    the states that trunks leave, all branches.

    Args:
        hidden_states: (1, S, H), segments of `lengths` tokens.
        trunks: of each segment, -1: none.
    """
    from fla.modules.convolution import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def ends(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        sizes = accumulate(part.shape[1] for part in parts)
        return torch.tensor([0, *sizes], dtype=torch.int32, device=hidden_states.device)

    inputs = layer.in_proj_qkv(hidden_states).split(lengths, dim=1)
    decay = layer.in_proj_a(hidden_states).float() + layer.dt_bias
    decays = (-layer.A_log.float().exp() * F.softplus(decay)).split(lengths, dim=1)
    betas = layer.in_proj_b(hidden_states).sigmoid().split(lengths, dim=1)
    sizes, weight = (layer.key_dim, layer.key_dim, layer.value_dim), layer.conv1d.weight.squeeze(1)
    outputs: dict[int, torch.Tensor] = {}
    states: dict[int, torch.Tensor] = {}
    for is_branch in (False, True):
        numbers = [n for n, trunk in enumerate(trunks) if (trunk >= 0) == is_branch]
        if not numbers:
            continue
        rows, initial = [inputs[n] for n in numbers], None
        if is_branch:  # after its trunk's last inputs, whose outputs are dropped
            window = layer.conv_kernel_size - 1
            before = [inputs[trunks[n]][:, -window:] for n in numbers]
            rows = [torch.cat(pair, dim=1) for pair in zip(before, rows, strict=True)]
            initial = torch.cat([states[trunks[n]] for n in numbers])
        whole = torch.cat(rows, dim=1)
        mixed, _ = causal_conv1d(
            whole, weight, layer.conv1d.bias, activation=layer.activation, cu_seqlens=ends(rows)
        )
        found = mixed.split([row.shape[1] for row in rows], dim=1)
        own = [part[:, -lengths[n] :] for part, n in zip(found, numbers, strict=True)]
        heads = torch.cat(own, dim=1).split(sizes, dim=-1)
        query, key = (part.unflatten(-1, (-1, layer.head_k_dim)) for part in heads[:2])
        out, final = chunk_gated_delta_rule(
            query,
            key,
            heads[2].unflatten(-1, (-1, layer.head_v_dim)),
            g=torch.cat([decays[n] for n in numbers], dim=1),
            beta=torch.cat([betas[n] for n in numbers], dim=1),
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=ends(own),
        )
        outputs |= zip(numbers, out.split([lengths[n] for n in numbers], dim=1), strict=True)
        states |= zip(numbers, final.split(1), strict=True)
    core = torch.cat([outputs[n] for n in range(len(lengths))], dim=1)
    gate = layer.in_proj_z(hidden_states).reshape(-1, layer.head_v_dim)
    normed = layer.norm(core.reshape(-1, layer.head_v_dim), gate)
    result: torch.Tensor = layer.out_proj(normed.reshape(1, sum(lengths), -1))
    return result


def check_layers(config: Any) -> None:
    """Raise ValueError if a model of transformers, by its config, has layers that are not
    attention, so that samples cannot share a prefix in it."""
    from packaging.specifiers import SpecifierSet

    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    recurrent = (one.model_types for one in FAMILIES.values() if one.is_recurrent)
    known = _ATTENTION | ({_RECURRENT} if config.model_type in {*chain(*recurrent)} else set())
    others = (kind for kind in kinds - known if kind == _RECURRENT or "attention" not in kind)
    if unknown := sorted(others):
        raise ValueError(
            f"a {config.model_type} model has layers of type {unknown[0]!r}, whose state cannot "
            "branch: pack without pack.share_prefixes"
        )
    installed = version("transformers")
    if _RECURRENT in kinds and not SpecifierSet(_TAKE_STATES).contains(installed):
        raise ValueError(
            f"recurrent layers of transformers {installed} take no states of trunks; install "
            f"transformers{_TAKE_STATES}, or pack without pack.share_prefixes"
        )


def use_varlen_attention(model: Any) -> None:
    """Give a model of transformers torch's varlen attention in its language model, and in its tower
    if it takes whole rows: other towers have pictures of one size, or masks."""
    parts = ("text_config", "vision_config")[: 1 + hasattr(model.model, "visual")]
    model.set_attn_implementation(dict.fromkeys(parts, register_attention("torch_varlen")))


def use_tree_attention(model: Any) -> None:
    """Give the language model of a model of transformers, or of peft's around it, an attention that
    knows prefix trees. Raises ValueError as `check_layers`, and if the model is not a class of
    transformers: its attention might not be exchanged, and would see the whole row."""
    from transformers import AttentionInterface

    check_layers(model.config)
    whole = getattr(model, "get_base_model", lambda: model)()
    if not type(whole).__module__.startswith("transformers."):
        raise ValueError(
            f"{type(whole).__name__} is not one of transformers' own models, whose attention knows "
            "prefix trees: pack without pack.share_prefixes"
        )
    isolate_segments(whole)
    AttentionInterface.register(TREE_ATTENTION, packed_attention)
    model.set_attn_implementation({"text_config": TREE_ATTENTION})


def has_tree_attention(config: Any) -> bool:
    """Tell whether a model of transformers has the attention of `use_tree_attention`."""
    return bool(config.get_text_config()._attn_implementation == TREE_ATTENTION)

"""The samples of a packed row apart in transformers' recurrent layers.

Attention of transformers is cut where text positions restart. A gated delta net (the linear
attention of Qwen3.5) is not: unless it is given the boundaries, and kernels of other packages that
take them, its recurrent state and the window of its convolution run from one sample into the next,
silently. Here it is called once per segment, and begins each with empty states:

    position_ids [0 1 2 0 1 0 1 2 3] -> calls on [a a a], [b b] and [c c c c]

A call costs what its tokens cost, so a row costs as much as its samples alone.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

#: Layers that see other tokens through the attention mask alone.
_ATTENTION: Final = {"full_attention", "sliding_attention", "chunked_attention"}
#: transformers' name of these layers, the module in them, and the argument on which they are cut.
_RECURRENT: Final = "linear_attention"
_MODULE: Final = "linear_attn"
_SEGMENTS: Final = "segment_lengths"


def isolate_segments(model: nn.Module) -> int:
    """Make a model's recurrent layers begin every segment of a packed row with empty states.

    Segments are those of `cu_seq_lens_q`, where it is given to the model, or begin where text
    positions restart: the places at which transformers' attention is cut. Rows without boundaries
    are computed as before. Gradients are those of the segments alone, too, also where activations
    are computed again.

    Args:
        model: of transformers, whole; changed in place. A second call changes nothing.

    Returns:
        The number of recurrent layers.

    Raises:
        ValueError: the model has layers that carry state in a way not known here. Its forward
            raises it for packed rows with a cache, or more than one to a batch.
    """
    decoders = {
        module: layers for module in model.modules() if (layers := _recurrent_layers(module))
    }
    num_layers = sum(map(len, decoders.values()))
    _check_kinds(model, num_layers)
    for decoder, layers in decoders.items():
        if _hand_down_segments in decoder._forward_pre_hooks.values():
            continue
        decoder.register_forward_pre_hook(_hand_down_segments, with_kwargs=True)
        for layer in layers:
            # Not by a module around it, so that weights keep their names.
            vars(layer)["forward"] = functools.partial(_by_segment, layer.forward)
    return num_layers


def _recurrent_layers(module: nn.Module) -> list[nn.Module]:
    """Return the recurrent layers of a decoder."""
    layers = getattr(module, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return []
    return [getattr(layer, _MODULE) for layer in layers if hasattr(layer, _MODULE)]


def _check_kinds(model: nn.Module, num_recurrent: int) -> None:
    """Refuse a model that has layers with a state other than the recurrent ones that were found."""
    config: Any = model.config
    kinds = list(getattr(config.get_text_config(), "layer_types", None) or ())
    unknown = sorted(set(kinds) - _ATTENTION - {_RECURRENT})
    is_stateful = any(getattr(module, "_is_stateful", False) for module in model.modules())
    if kinds.count(_RECURRENT) != num_recurrent or (is_stateful and not num_recurrent):
        unknown.append(_RECURRENT)
    if unknown:
        raise ValueError(
            f"{type(model).__name__} has layers of type {unknown[0]!r}, which would carry state "
            "across the samples of a pack; train it on unpacked samples"
        )


def _hand_down_segments(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A decoder's arguments, which it hands down to its layers, with the segments' lengths."""
    return args, {**kwargs, _SEGMENTS: _segment_lengths(kwargs)}


def _segment_lengths(kwargs: dict[str, Any]) -> list[int] | None:
    """Boundaries of a row's segments; None where there are none."""
    from transformers.masking_utils import find_packed_sequence_indices

    boundaries = kwargs.get("cu_seq_lens_q")
    if boundaries is not None:
        return list(boundaries.diff().tolist())
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None:
        return None  # transformers looks for no boundaries either
    if positions.ndim == 3:
        if len(positions) != 4:
            return None  # rows of M-RoPE alone, which jump at images
        positions = positions[0]
    segments = find_packed_sequence_indices(positions)
    if segments is None:
        return None
    if len(segments) != 1:
        raise ValueError(f"{len(segments)} packed rows in a batch; give one, with all packs in it")
    return list(segments[0].bincount().tolist())


def _by_segment(
    forward: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    segment_lengths: list[int] | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """A recurrent layer's forward of each segment, (1, S, H) in all."""
    if segment_lengths is None:
        return forward(hidden_states, **kwargs)
    if kwargs.get("cache_params") is not None:
        raise ValueError("a packed row cannot be cached; set use_cache=False")
    for name in ("cu_seq_lens_q", "seq_idx"):  # they describe the row, not this segment
        kwargs.pop(name, None)
    parts = hidden_states.split(segment_lengths, dim=1)
    return torch.cat([forward(part, **kwargs) for part in parts], dim=1)

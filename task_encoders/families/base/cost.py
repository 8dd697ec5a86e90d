"""Cost of training on a sample: floating-point operations of its model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

#: Operations of a training step over those of its forward pass: the backward pass takes twice the
#: operations. Recomputation does not count, and a frozen part counts in full.
TRAINING: Final = 3


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """Sizes of a transformer stack that decide its cost."""

    hidden_size: int
    num_layers: int
    #: width of the feed-forward layer; in a mixture, of all experts that one token goes through
    ffn_size: int
    #: matrices of the feed-forward layer: 3 with a gate (SwiGLU), else 2
    ffn_matrices: int = 3
    #: width of keys and values together with grouped-query attention, as a share of the queries'
    kv_share: float = 1.0
    #: causal attention computes half of the score matrix
    causal: bool = True
    #: width of all queries (0: hidden_size)
    query_size: int = 0
    #: layers whose attention is quadratic; the others' is linear, or within windows (None: all)
    num_quadratic_layers: int | None = None
    #: width of the quadratic layers' queries over query_size
    widening: float = 1.0
    #: tokens that a token of the other layers sees (0: not counted)
    window: int = 0

    def flops(self, lengths: Any) -> Any:
        """Return the operations for each sequence of `lengths` tokens or patches."""
        queries = self.query_size or self.hidden_size
        projections = 2.0 * self.hidden_size * queries * (2 + 2 * self.kv_share)
        feed_forward = 2.0 * self.ffn_matrices * self.hidden_size * self.ffn_size
        scores = 4.0 * queries * (0.5 if self.causal else 1.0)
        quadratic = self.num_layers
        if self.num_quadratic_layers is not None:
            quadratic = self.num_quadratic_layers
        linear = self.num_layers * (projections + feed_forward)
        squares = quadratic * self.widening * scores * lengths
        # The smaller of length and window, for arrays, tensors and numbers alike.
        seen = 0.5 * (lengths + self.window - abs(lengths - self.window))
        windows = (self.num_layers - quadratic) * 4.0 * queries * seen * (lengths - 0.5 * seen)
        return lengths * (linear + squares) + (windows if self.window else 0.0)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Operations of a language model and its vision tower, forward pass; see `TRAINING`.

    Two per multiplication of matrix products, whether a part is frozen or not; attention within
    segments, half of it under a causal mask (Narayanan et al., 2021,
    https://arxiv.org/abs/2104.04473, appendix). Embeddings are looked up, not multiplied. All
    methods take NumPy arrays or tensors of any shape, and return floats of that shape. A pack costs
    the sum of its samples.
    """

    #: the model that the figures describe, for reports
    name: str
    language: TransformerShape
    vision: TransformerShape
    #: multiplications for the logits of one token
    head: int
    #: multiplications per patch in the projector, which turns features into embeddings
    merger: float

    def language_flops(self, num_tokens: Any, num_logits: Any = None) -> Any:
        """Return the operations of the language model for segments of `num_tokens`, with logits for
        `num_logits` of them (default: all)."""
        logits = num_tokens if num_logits is None else num_logits
        return self.language.flops(num_tokens) + 2.0 * self.head * logits

    def tower_flops(self, num_patches: Any) -> Any:
        """Return the operations of the vision tower for pictures of `num_patches`: images, or
        single steps of a video's grid. Patches attend within a picture."""
        return self.vision.flops(num_patches) + 2.0 * self.merger * num_patches


def cost_of_sizes(name: str, text: Mapping[str, Any], vision: Mapping[str, Any]) -> ModelCost:
    """Compute the cost of a model from its text and vision configs in transformers' form. Towers of
    Qwen, GLM-V, CLIP, SigLIP and Gemma are known. Missing fields have the defaults of transformers'
    Qwen2-VL.

    Raises:
        KeyError: a field that decides the cost is missing.
    """
    language = _language(text)
    width, out = vision.get("embed_dim", vision.get("hidden_size", 1280)), language.hidden_size
    head = out * text["vocab_size"]
    if "mm_embed_dim" in vision:  # Gemma 4 12B has no tower
        side = vision["patch_size"] * vision["pooling_kernel_size"]
        projected = float(vision["mm_embed_dim"] * (3 * side**2 + out))  # per patch, twice
        return ModelCost(name, language, TransformerShape(0, 0, 0), head, projected)
    windowed, pool = vision.get("fullatt_block_indexes"), vision.get("pooling_kernel_size")
    ffn = vision.get("intermediate_size", vision.get("mlp_ratio", 4) * width)
    is_glm = vision.get("model_type", "").startswith("glm")
    is_pixtral = vision.get("model_type") == "pixtral"
    tower = TransformerShape(
        width,
        vision.get("depth", vision.get("num_hidden_layers", 32)),
        out if is_glm else ffn,
        ffn_matrices=3 if vision.get("hidden_act") == "silu" or pool or is_pixtral else 2,
        causal=False,
        num_quadratic_layers=None if windowed is None else len(windowed),
    )
    if pool:  # Gemma projects the mean of a square of patches
        merger = width * out / pool**2
    elif is_pixtral:  # Mistral joins squares of four patches
        merger = width**2 + out * (width + out) / 4
    elif vision.get("model_type") == "internvl_vision":  # joins squares of four patches
        merger = out * (width + out / 4)
    elif "num_hidden_layers" in vision:  # LLaVA projects each patch
        merger = float(out * (width + out))
    elif is_glm:  # which joins squares of patches, and has a feed-forward layer after that
        merger = out * width + (out + 3 * ffn) * out / vision.get("spatial_merge_size", 2) ** 2
    else:  # Qwen merges squares of patches, with DeepStack those of inner layers as well
        square = vision.get("spatial_merge_size", 2) ** 2
        mergers = 1 + len(vision.get("deepstack_visual_indexes") or ())
        merger = mergers * width * (square * width + out)
    return ModelCost(name, language, tower, head, merger)


def _read_config(folder: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Read the config.json of a checkpoint folder, and the text config in it; {} if it has none."""
    path = Path(folder, "config.json")
    config = json.loads(path.read_bytes()) if path.is_file() else {}
    return config, config.get("text_config", config)


def most_positions(folder: str) -> int | None:
    """Read `max_position_embeddings` of a checkpoint folder's config.json; None if it has none."""
    return _read_config(folder)[1].get("max_position_embeddings")


def dynamic_from(folder: str) -> int | None:
    """Return the tokens of a sample above which the rotary angles of the model in a checkpoint
    folder depend on its length; None if they never do."""
    _, text = _read_config(folder)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    is_dynamic = "dynamic" in (rope.get("rope_type"), rope.get("type"))
    return text.get("max_position_embeddings") if is_dynamic else None


def cost_of_checkpoint(folder: str) -> ModelCost | None:
    """Compute the cost of the model in a checkpoint folder from its config.json; None if it has
    none.

    Raises:
        ValueError: the config.json is damaged.
    """
    try:
        config, text = _read_config(folder)
        if "vision_config" not in config:
            return None  # the folder of a tokenizer
        return cost_of_sizes(Path(folder).name, text, config["vision_config"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{Path(folder, 'config.json')} names no sizes of a model"
        raise ValueError(f"{reason} ({type(error).__name__}: {error})") from error


#: Defaults of transformers' LlamaConfig, which LLaVA's config.json leaves out.
_LLAMA_7B: Final = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
}


def _language(config: Mapping[str, Any]) -> TransformerShape:
    if config.get("model_type") == "llama":
        config = {**_LLAMA_7B, **config}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    ffn = config.get("intermediate_size", 0)
    if config.get("num_experts_per_tok"):
        experts = config["num_experts_per_tok"] + config.get("n_shared_experts", 0)
        ffn = config["moe_intermediate_size"] * experts
        ffn += config.get("shared_expert_intermediate_size", 0)
    if config.get("enable_moe_block"):  # besides the dense layer
        ffn += config["moe_intermediate_size"] * config["top_k_experts"]
    layers = config.get("layer_types") or ()
    slides = "sliding_attention" in layers
    wide = [one["head_dim"] for one in config.get("per_layer_config", {}).values()]
    head = config.get("head_dim") or hidden // heads
    return TransformerShape(
        hidden,
        config["num_hidden_layers"],
        ffn,
        kv_share=config.get("num_key_value_heads", heads) / heads,
        query_size=head * heads,
        num_quadratic_layers=layers.count("full_attention")
        if slides or "linear_attention" in layers
        else None,
        widening=max([config.get("global_head_dim", head), *wide]) / head,
        window=config["sliding_window"] if slides else 0,
    )

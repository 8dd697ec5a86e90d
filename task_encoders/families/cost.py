"""Cost of training on a sample: floating-point operations of its model, forward pass."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """Sizes of a transformer stack that decide its cost."""

    hidden_size: int
    num_layers: int
    #: width of the feed-forward layer; of a mixture, of the experts that one token goes through
    ffn_size: int
    #: matrices of the feed-forward layer: 3 with a gate (SwiGLU), else 2
    ffn_matrices: int = 3
    #: width of keys and values together with grouped-query attention, as a share of the queries'
    kv_share: float = 1.0
    #: causal attention computes half of the score matrix
    causal: bool = True
    #: width of all queries (0: hidden_size)
    query_size: int = 0
    #: layers whose attention is quadratic, the others' is linear (None: all)
    num_quadratic_layers: int | None = None

    def flops(self, num_tokens: npt.NDArray[Any]) -> Floats:
        """2 operations per multiplication; attention is quadratic within the sample only."""
        length = np.asarray(num_tokens, np.float64)
        queries = self.query_size or self.hidden_size
        projections = 2 * self.hidden_size * queries * (2 + 2 * self.kv_share)
        feed_forward = 2 * self.ffn_matrices * self.hidden_size * self.ffn_size
        scores = 4 * queries * (0.5 if self.causal else 1.0)
        quadratic = scores * length**2
        if self.num_quadratic_layers is not None:
            quadratic = quadratic * (self.num_quadratic_layers / self.num_layers)
        return self.num_layers * (length * (projections + feed_forward) + quadratic)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A language model and its vision tower."""

    #: of which model the figures are, for reports
    name: str
    language: TransformerShape
    vision: TransformerShape

    def of_samples(
        self,
        num_tokens: npt.NDArray[Any],
        num_vision_patches: npt.NDArray[Any] | None = None,
        num_images: npt.NDArray[Any] | None = None,
    ) -> Floats:
        """Forward operations of each sample, float64 (num_samples,).

        All arrays are (num_samples,). The patches of a sample count as ``num_images`` equal
        pictures (default: one), steps in time of videos included. The cost of a pack is the sum
        over its samples.
        """
        cost = self.language.flops(num_tokens)
        if num_vision_patches is not None:
            images = np.maximum(1, num_images) if num_images is not None else 1
            cost = cost + images * self.vision.flops(np.asarray(num_vision_patches) / images)
        return cost


def cost_of_checkpoint(folder: str) -> ModelCost | None:
    """The cost of the model in a checkpoint folder, from its config.json; None if it has none.

    Raises:
        ValueError: the config.json is damaged.
    """
    path = Path(folder, "config.json")
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_bytes())
        if "vision_config" not in config:
            return None  # the folder of a tokenizer
        language = _language(config.get("text_config", config))
        return ModelCost(Path(folder).name, language, _vision(config["vision_config"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} names no sizes of a model ({reason})") from error


def _language(config: Mapping[str, Any]) -> TransformerShape:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    ffn = config.get("intermediate_size", 0)
    if config.get("num_experts_per_tok"):
        ffn = config["moe_intermediate_size"] * config["num_experts_per_tok"]
        ffn += config.get("shared_expert_intermediate_size", 0)
    layers = config.get("layer_types") or ()
    return TransformerShape(
        hidden,
        config["num_hidden_layers"],
        ffn,
        kv_share=config.get("num_key_value_heads", heads) / heads,
        query_size=(config.get("head_dim") or hidden // heads) * heads,
        num_quadratic_layers=layers.count("full_attention")
        if "linear_attention" in layers
        else None,
    )


def _vision(config: Mapping[str, Any]) -> TransformerShape:
    """A tower's sizes, under the names of Qwen's configs or of CLIP's and SigLIP's. What
    Qwen2-VL's omit has transformers' defaults."""
    width = config.get("embed_dim", config.get("hidden_size", 1280))
    return TransformerShape(
        width,
        config.get("depth", config.get("num_hidden_layers", 32)),
        config.get("intermediate_size", config.get("mlp_ratio", 4) * width),
        ffn_matrices=3 if config.get("hidden_act") == "silu" else 2,
        causal=False,
    )

"""Gemma 4 12B: `gemma4`'s tokens, on a model without a vision tower, which takes the pixels of a
token, 48² of them, as one patch."""

from typing import Any, Final

from task_encoders.families.base.family import Family, Preset
from task_encoders.families.base.spans import BlankImage, two_tokens
from task_encoders.families.gemma4 import TOKEN, Gemma4Encoder, Gemma4Options


class Gemma4UnifiedEncoder(Gemma4Encoder):
    """A patch per token."""

    LENGTHS_OF = "gemma4_unified"
    POOL = 1

    @staticmethod
    def blank_image(hf_config: Any) -> BlankImage:
        return two_tokens(TOKEN, 1)


def _text(
    hidden: int, ffn: int, layers: list[str], heads: tuple[int, int, int], widths: tuple[int, int]
) -> dict[str, Any]:
    """`heads`: of queries, of keys, and of keys in full layers; `widths`: of a head in sliding
    layers and in full ones."""
    num_heads, kv_heads, global_kv_heads = heads
    head, global_head = widths
    return {
        "vocab_size": 262_144,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": len(layers),
        "num_attention_heads": num_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "global_head_dim": global_head,
        "num_global_key_value_heads": global_kv_heads,
        "attention_k_eq_v": True,
        "layer_types": layers,
        "sliding_window": 1024,
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision",
    }


def _vision(width: int) -> dict[str, Any]:
    sizes = {"patch_size": 16, "pooling_kernel_size": 3}
    return {**sizes, "mm_embed_dim": width, "output_proj_dims": width}


_FULL: Final = "full_attention"
_SLIDING: Final = ["sliding_attention"]

#: "tiny" trains on a CPU; "12b" has the sizes of Gemma-4-12B.
PRESETS: Final = {
    "tiny": Preset(
        _text(64, 128, [_FULL, *_SLIDING, _FULL], (4, 2, 1), (16, 32)) | {"sliding_window": 96},
        _vision(32),
        {"tie_word_embeddings": True},
    ),
    "12b": Preset(
        _text(3840, 15_360, [*_SLIDING * 5, _FULL] * 8, (16, 8, 1), (256, 512)),
        _vision(3840),
        {"tie_word_embeddings": True},
    ),
}

GEMMA4_UNIFIED: Final = Family(
    "gemma4_unified",
    Gemma4Options,
    Gemma4UnifiedEncoder,
    PRESETS["12b"].cost("Gemma-4-12B"),
    "Gemma4Unified",
    since="5.13",  # with videos 5.19
    presets=PRESETS,
)

"""Models of benchmark_training.py and gpu_suite.sh, by name: fields of `launch`'s model section."""

from typing import Any, Final

#: Words of the models for a CPU.
FOLDED_WORDS: Final = 1024


def _text(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """A text config of Qwen2-VL; the rotary sections are 1/8, 3/16 and 3/16 of a head."""
    head = hidden // heads
    sections = [head // 8, head * 3 // 16, head * 3 // 16]
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
    }


_CPU: Final = {
    **_text(256, 1024, 4, 4, 2),
    "vocab_size": FOLDED_WORDS,
    "bos_token_id": None,
    "eos_token_id": None,
}
_TOWER: Final = {"depth": 32, "embed_dim": 1280, "num_heads": 16}

#: "cpu": its decoder takes nearly all of the time, as in a large model. "cpu_7b": the same with a
#: tower whose operations for a picture are to the decoder's as in Qwen2-VL-7B: .44.
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "cpu": {"text": _CPU, "vision": {"hidden_size": 256, "depth": 1}},
    "cpu_7b": {
        "text": _CPU,
        "vision": {"hidden_size": 256, "depth": 1, "embed_dim": 112, "num_heads": 2},
    },
    "2b": {"text": _text(1536, 8960, 28, 12, 2), "vision": {**_TOWER, "hidden_size": 1536}},
    "7b": {
        "text": {**_text(3584, 18944, 28, 28, 4), "vocab_size": 152_064},
        "vision": {**_TOWER, "hidden_size": 3584},
        "tie_word_embeddings": False,
        "recompute": "full",
    },
}

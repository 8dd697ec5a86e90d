"""LLaVA-OneVision-1.5: Qwen2-VL's text and media tokens, Qwen3's vocabulary, positions that count
tokens."""

from typing import Final

from task_encoders.families.cost import ModelCost, TransformerShape
from task_encoders.families.family import Family
from task_encoders.families.qwen2_vl import DynamicImageOptions, Qwen2VLEncoder
from task_encoders.text.qwen_vocabulary import QWEN3_TEXT_TOKENS


class LlavaOneVision15Encoder(Qwen2VLEncoder):
    """Lengths are Qwen2-VL's, with the same tokenizer."""

    POSITION_ROWS = 1
    TEXT_TOKENS = QWEN3_TEXT_TOKENS


COST: Final = ModelCost(
    "LLaVA-OneVision-1.5-8B",
    TransformerShape(4096, 36, 12288, kv_share=8 / 32),
    TransformerShape(1024, 24, 4096, ffn_matrices=2, causal=False),
)

#: Its model is not part of transformers.
LLAVA_ONEVISION_1_5: Final = Family(
    "llava_onevision_1_5",
    DynamicImageOptions,
    LlavaOneVision15Encoder,
    COST,
    None,
    other_names=("llava_onevision1_5", "llavaonevision1_5"),  # transformers; the hub
)

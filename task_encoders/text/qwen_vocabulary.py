"""The built-in vocabulary: Qwen's BPE ranks, and the tokens that its generations add to them."""

import base64
import functools
import importlib.util
from pathlib import Path
from typing import Final

#: The name that stands for the vocabulary inside the `dashscope` package.
BUILTIN: Final = "builtin"

#: Qwen2's pre-tokenisation pattern.
QWEN_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: Qwen2-VL's special tokens; their ids follow the 151,643 ordinary ones in this order.
QWEN_SPECIAL_TOKENS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

#: Tokens that Qwen2.5 adds, with the ids that follow: not special, so text can spell them.
QWEN2_5_TEXT_TOKENS: Final = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)

#: Tokens that Qwen3 adds after these.
QWEN3_TEXT_TOKENS: Final = (
    *QWEN2_5_TEXT_TOKENS,
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


#: Ordinary tokens, and rows of the (padded) embedding in published checkpoints.
NUM_RANKS: Final = 151_643
VOCAB_SIZE: Final = 151_936

#: The tokens whose ids a model has to know, under the names of transformers' configs.
MEDIA_TOKENS: Final = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
MEDIA_TOKEN_IDS: Final[dict[str, int]] = {
    name: NUM_RANKS + QWEN_SPECIAL_TOKENS.index(token) for name, token in MEDIA_TOKENS.items()
}


@functools.cache
def qwen_ranks() -> dict[bytes, int]:
    """Read Qwen's 151,643 BPE ranks from the file inside the `dashscope` package.

    Raises:
        ValueError: the package is missing.
    """
    spec = importlib.util.find_spec("dashscope")  # found, not imported: importing takes 0.9 s
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"processor {BUILTIN!r} reads the vocabulary of the package dashscope, which is not "
            "installed; pip install 'dashscope>=1.20' (in a clone: pip install -e '.[builtin]'), "
            "or name a checkpoint folder as model.processor"
        )
    path = Path(spec.submodule_search_locations[0], "resources", "qwen.tiktoken")
    lines = path.read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines) if rank}

"""A small tokenizer built like GLM-V's, with its published names of control tokens."""

from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from task_encoders.families.glm4v import GLM_TEMPLATE
from tests.helpers.tiny_tokenizer import byte_level_bpe

PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ROLES = ("system", "user", "assistant", "observation")
_TAGS = [f"<|{tag}_of_{kind}|>" for kind in ("image", "video") for tag in ("begin", "end")]
CONTROL: Final = [
    *("<|endoftext|>", "[gMASK]", "<sop>"),
    *(f"<|{role}|>" for role in _ROLES),
    *(*_TAGS, "<|image|>", "<|video|>"),
]
#: Added tokens that text can spell.
WORDS: Final = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
    *("<|begin_of_box|>", "<|end_of_box|>"),
]


def save_glm_tokenizer(folder: Path, template: str | None = GLM_TEMPLATE, kind: str = "") -> Any:
    """Save one of fewer than 1,024 tokens. `kind`: the class of its processor."""
    backend = byte_level_bpe(PATTERN, ["\n\n\n", "0.5 seconds"])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in WORDS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=CONTROL[1:],
        **({"processor_class": kind} if kind else {}),
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer

"""A small tekken.json, the file that Mistral's checkpoints carry, built like theirs."""

import base64
import json
from pathlib import Path
from typing import Any, Final

from task_encoders.text.tokenizer import byte_level_alphabet
from tests.helpers.tiny_tokenizer import byte_level_bpe

PATTERN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: In Tekken's order; ids are ranks.
SPECIAL: Final = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] [ARGS] [CALL_ID] [THINK] [/THINK] "
    "[MODEL_SETTINGS] [/MODEL_SETTINGS]"
).split()
_FILLERS: Final = 14  # <SPECIAL_26> and so on: room that Tekken leaves


def save_tekken(folder: Path, template: str | None = None) -> None:
    """A checkpoint folder, as far as texts go; without `template` it has none of its own."""
    backend = byte_level_bpe(PATTERN, ["\n\n", "\n\n\n"])
    to_byte = byte_level_alphabet()
    by_id = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(to_byte[character] for character in token) for token, _ in by_id]
    # Ranks below 256 are the bytes in order, as in Tekken; merges follow in theirs.
    ranked = [*(bytes([i]) for i in range(256)), *(token for token in tokens if len(token) > 1)]
    spec: dict[str, Any] = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(ranked),
            "default_vocab_size": len(SPECIAL) + _FILLERS + len(ranked),
            "default_num_special_tokens": len(SPECIAL) + _FILLERS,
            "version": "v13",
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for i, token in enumerate(ranked)
        ],
        "special_tokens": [
            {"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(SPECIAL)
        ],
        "image": {
            "image_patch_size": 14,
            "max_image_size": 1540,
            "spatial_merge_size": 2,
        },
    }
    (folder / "tekken.json").write_text(json.dumps(spec))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "TokenizersBackend", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)

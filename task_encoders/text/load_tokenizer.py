"""The tokenizer that a configuration names: the built-in one, a checkpoint's, or one of the hub.

The hub is tried once: transformers would retry for a minute.
"""

import functools
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from task_encoders.text.qwen_vocabulary import (
    BUILTIN,
    QWEN_PATTERN,
    QWEN_SPECIAL_TOKENS,
    qwen_ranks,
)
from task_encoders.text.tokenizer import TiktokenTokenizer, Tokenizer, TransformersTokenizer

logger = logging.getLogger(__name__)

# Texts on which a tiktoken conversion must agree with the tokenizer it was made from.
_PROBES: Final = (
    "Hello world",
    "assistant\n\n\n  two  spaces,\ttab;\r\nI'll don't WE'RE 1234567890 3.14",
    "描述这张图片。图中有三个红色的圆形,价格为¥1,280。",
    "naïve café cafe\u0301 Ω≈ç√ 한국어 русский العربية 🙂👩‍👩‍👧‍👦",
    '<|im_start|>system\n<|image_pad|><tool_call>{"a": [1, 2]}</tool_call>',
    "<|fim_prefix|>cafe\u0301<think>\n<|file_sep|>\u0301</think>\n\n<tool_response>",
    "    def f(x):\n        return x ** 2  # comment\n\n\n",
)

_HUB_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FILES: Final = ("tokenizer_config.json", "config.json")
_TIMEOUT_SECONDS: Final = 10


def require_hub(name: str) -> None:
    """Do nothing for a folder, for a checkpoint that was downloaded before, and offline.

    Raises:
        ValueError: the checkpoint would have to be downloaded, and the hub is out of reach.
    """
    if Path(name).exists() or not _HUB_NAME.fullmatch(name):
        return
    import ssl
    import urllib.error
    import urllib.request

    from huggingface_hub import constants, try_to_load_from_cache

    is_cached = any(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES)
    if is_cached or constants.HF_HUB_OFFLINE:
        return
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS).close()
    except urllib.error.HTTPError:
        return  # an answer
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # the hub's client has certificates of its own
            return
        raise ValueError(
            f"processor {name!r} is not a folder here, and the hub {constants.ENDPOINT} is out of "
            f"reach ({reason}); name a folder with the checkpoint, set HF_ENDPOINT to a mirror, "
            "or use 'builtin' for Qwen's vocabulary"
        ) from error


@functools.cache
def checkpoint_tokenizer(processor: str) -> Any:
    """transformers' fast tokenizer of a checkpoint folder or a hub name; no remote code is run.

    Raises:
        ValueError: there is none of that name, or it is not a fast one.
    """
    from transformers import AutoTokenizer

    try:
        # With mistral-common installed, Mistral's tokenizer would otherwise not be fast.
        options = {"trust_remote_code": False, "mistral_format": False}
        tokenizer = AutoTokenizer.from_pretrained(processor, **options)
    except (OSError, ValueError) as error:
        raise ValueError(_explain_missing(processor)) from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"checkpoint {processor!r} has no fast tokenizer; save its tokenizer.json beside it"
        )
    return tokenizer


@functools.cache
def load_tokenizer(processor: str, text_tokens: tuple[str, ...] = ()) -> Tokenizer:
    """The tokenizer of "builtin", a checkpoint folder, or a hub name.

    Args:
        text_tokens: what a family adds to the built-in vocabulary after the special tokens.

    Raises:
        ValueError: as checkpoint_tokenizer.
    """
    if processor == BUILTIN:
        ranks = qwen_ranks()
        special = {token: len(ranks) + i for i, token in enumerate(QWEN_SPECIAL_TOKENS)}
        first = len(ranks) + len(special)
        added = {token: first + i for i, token in enumerate(text_tokens)}
        return TiktokenTokenizer(ranks, QWEN_PATTERN, special, added, nfc=True)
    tokenizer = checkpoint_tokenizer(processor)
    slow = TransformersTokenizer(tokenizer)
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    fast = _as_tiktoken(spec)
    if fast is not None and all(fast.encode(text) == slow.encode(text) for text in _PROBES):
        if any(not token["special"] for token in spec["added_tokens"]):
            fast.fingerprint = slow.fingerprint  # as when such tokenizers ran on transformers
        return fast
    logger.info("%s: no tiktoken form of this tokenizer; using transformers' own", processor)
    return slow


def _explain_missing(processor: str) -> str:
    """Reason why transformers found no tokenizer, in a line where it writes a paragraph."""
    path = Path(processor)
    if path.is_dir():
        why = "is a folder without a tokenizer (tokenizer.json, tokenizer_config.json)"
    elif path.exists():
        why = "is a file"
    elif path.is_absolute() or processor.startswith((".", "~")):
        why = "does not exist"
    else:
        why = "is not a folder here, and not on the hub or out of reach (offline, or no access)"
    return f"processor {processor!r} {why}; name a checkpoint folder or a hub name, or {BUILTIN!r}"


def _as_tiktoken(spec: Mapping[str, Any]) -> TiktokenTokenizer | None:
    """The tiktoken form of a tokenizer.json; None if it is not a byte-level BPE of known parts.

    tiktoken merges the pair whose result has the lowest rank, so the ranks must be the ids and the
    list of merges must be in the order of its results' ids.
    """
    model, steps = spec["model"], spec["pre_tokenizer"]
    steps = steps.get("pretokenizers", [steps]) if steps else []
    nfc = (spec["normalizer"] or {}).get("type") == "NFC"
    if (
        model["type"] != "BPE"
        or [step["type"] for step in steps] != ["Split", "ByteLevel"]
        or "Regex" not in steps[0]["pattern"]
        or steps[1]["add_prefix_space"]
        or not (nfc or spec["normalizer"] is None)
    ):
        return None
    added = {token["content"] for token in spec["added_tokens"]}
    vocab = {token: rank for token, rank in model["vocab"].items() if token not in added}
    unicode_to_byte = byte_level_alphabet()
    results: list[Any] = [vocab.get("".join(pair)) for pair in model["merges"]]
    if None in results or results != sorted(results):
        return None
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    if any(token[flag] for token in spec["added_tokens"] for flag in flags if not token["special"]):
        return None
    if any(character not in unicode_to_byte for token in vocab for character in token):
        return None
    ranks = {bytes(unicode_to_byte[c] for c in token): rank for token, rank in vocab.items()}
    special, text_tokens = (
        {one["content"]: one["id"] for one in spec["added_tokens"] if one["special"] == is_special}
        for is_special in (True, False)
    )
    return TiktokenTokenizer(ranks, steps[0]["pattern"]["Regex"], special, text_tokens, nfc=nfc)


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for the 256 bytes: character -> byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}

"""Small tokenizers built like those of the families, which load in no time."""

import base64
import functools
import json
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import transformers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import PreTrainedTokenizerFast

from task_encoders.families.glm4v import GLM_TEMPLATE
from task_encoders.families.llava_1_5 import DEFAULT_SYSTEM
from task_encoders.text.qwen_vocabulary import QWEN_PATTERN, QWEN_SPECIAL_TOKENS
from task_encoders.text.tokenizer import byte_level_alphabet
from tests.helpers.texts_and_images import random_text


@functools.cache
def random_texts() -> tuple[str, ...]:
    """Draw 100 texts to train on."""
    rng = np.random.default_rng(0)
    return tuple(random_text(rng, 30, chinese=i % 3 == 0) for i in range(100))


def byte_level_bpe(pattern: str, texts: list[str], normalizer: Any = None) -> Any:
    """Byte-level BPE of some hundred merges, trained on random texts and these."""
    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = Sequence([Split(Regex(pattern), "isolated"), byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([*random_texts(), *texts], trainer)
    return backend


def tiny_tokenizer(text_tokens: tuple[str, ...] = (), special: tuple[str, ...] = ()) -> Any:
    """A small tokenizer with Qwen's control tokens and those of a family."""
    texts = ["system\nuser\nassistant\n\n", "\n\n\n"]
    backend = byte_level_bpe(QWEN_PATTERN, texts, normalizers.NFC())
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in QWEN_SPECIAL_TOKENS])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in text_tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(QWEN_SPECIAL_TOKENS[1:]),
    )


def save_with_template(tokenizer: Any, template: str | None, folder: Path) -> None:
    """A checkpoint folder, as far as texts go."""
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def save_llama_tokenizer(folder: Path, *, legacy: bool = True) -> None:
    """Built like LLaMA's: spaces are ▁, with one in front of every text (not `legacy`: none)."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    prepended = [normalizers.Prepend("▁")] if legacy else []
    backend.normalizer = normalizers.Sequence([*prepended, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Replace("▁", " ")
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    texts = [DEFAULT_SYSTEM, "USER: What? ASSISTANT: It."]
    backend.train_from_iterator([*texts, *random_texts()], trainer)
    backend.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)


GEMMA_TEMPLATE = Path(__file__).parents[1] / "data" / "templates" / "gemma4.jinja"
#: Under transformers' names of its attributes.
_GEMMA_TOKENS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "sot_token": "<|turn>",
    "eot_token": "<turn|>",
    "soc_token": "<|channel>",
    "eoc_token": "<channel|>",
    "think_token": "<|think|>",
    "escape_token": '<|"|>',
    "std_token": "<|tool>",
    "etd_token": "<tool|>",
    "stc_token": "<|tool_call>",
    "etc_token": "<tool_call|>",
    "str_token": "<|tool_response>",
    "etr_token": "<tool_response|>",
}
_GEMMA_FIRST = ("<pad>", "<eos>", "<bos>", "<unk>")


def gemma_tokenizer(*, joins_digits: bool = False) -> Any:
    """BPE with bytes, ▁ for spaces, and each digit a token of its own (or not: `joins_digits`)."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    if not joins_digits:
        backend.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)  # of training alone
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=[*_GEMMA_FIRST, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    texts = [*random_texts(), "system\nuser\nmodel\n0123456789: ", *["user\n00:00 "] * 50]
    backend.train_from_iterator(texts, trainer)
    trained = json.loads(backend.to_str())
    del trained["added_tokens"][len(_GEMMA_FIRST) :]  # bytes are ordinary tokens
    spec = Tokenizer.from_str(json.dumps(trained))
    spec.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    names = [*_GEMMA_FIRST, *_GEMMA_TOKENS.values(), "<|video|>"]
    spec.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=spec,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        extra_special_tokens={**_GEMMA_TOKENS},
    )


def save_gemma_tokenizer(folder: Path, *, joins_digits: bool = False) -> None:
    """A checkpoint folder, as far as texts go."""
    tokenizer = gemma_tokenizer(joins_digits=joins_digits)
    save_with_template(tokenizer, GEMMA_TEMPLATE.read_text(), folder)


_GLM_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GLM_ROLES = ("system", "user", "assistant", "observation")
_GLM_TAGS = [f"<|{tag}_of_{kind}|>" for kind in ("image", "video") for tag in ("begin", "end")]
GLM_CONTROL: Final = [
    *("<|endoftext|>", "[gMASK]", "<sop>"),
    *(f"<|{role}|>" for role in _GLM_ROLES),
    *(*_GLM_TAGS, "<|image|>", "<|video|>"),
]
#: Added tokens that text can spell.
_GLM_WORDS: Final = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
    *("<|begin_of_box|>", "<|end_of_box|>"),
]


def save_glm_tokenizer(folder: Path, template: str | None = GLM_TEMPLATE, kind: str = "") -> Any:
    """Save one of fewer than 1,024 tokens. `kind`: the class of its processor."""
    backend = byte_level_bpe(_GLM_PATTERN, ["\n\n\n", "0.5 seconds"])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in GLM_CONTROL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in _GLM_WORDS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=GLM_CONTROL[1:],
        **({"processor_class": kind} if kind else {}),
    )
    save_with_template(tokenizer, template, folder)
    return tokenizer


_TEKKEN_PATTERN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: In Tekken's order; ids are ranks.
TEKKEN_SPECIAL: Final = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT] [ARGS] [CALL_ID] [THINK] [/THINK] "
    "[MODEL_SETTINGS] [/MODEL_SETTINGS]"
).split()
_TEKKEN_FILLERS: Final = 14  # <SPECIAL_26> and so on: room that Tekken leaves


def save_tekken(folder: Path) -> None:
    """A checkpoint folder, as far as texts go, without a template of its own."""
    backend = byte_level_bpe(_TEKKEN_PATTERN, ["\n\n", "\n\n\n"])
    to_byte = byte_level_alphabet()
    by_id = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(to_byte[character] for character in token) for token, _ in by_id]
    # Ranks below 256 are the bytes in order, as in Tekken; merges follow in theirs.
    ranked = [*(bytes([i]) for i in range(256)), *(token for token in tokens if len(token) > 1)]
    spec: dict[str, Any] = {
        "config": {
            "pattern": _TEKKEN_PATTERN,
            "num_vocab_tokens": len(ranked),
            "default_vocab_size": len(TEKKEN_SPECIAL) + _TEKKEN_FILLERS + len(ranked),
            "default_num_special_tokens": len(TEKKEN_SPECIAL) + _TEKKEN_FILLERS,
            "version": "v13",
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for i, token in enumerate(ranked)
        ],
        "special_tokens": [
            {"rank": i, "token_str": token, "is_control": True}
            for i, token in enumerate(TEKKEN_SPECIAL)
        ],
        "image": {"image_patch_size": 14, "max_image_size": 1540, "spatial_merge_size": 2},
    }
    (folder / "tekken.json").write_text(json.dumps(spec))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "TokenizersBackend", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save_processor(
    folder: Path, tokenizer: Any, template: str, model_type: str = "qwen2_vl", **limits: int
) -> None:
    """Save a checkpoint's whole processor, with which a trainer starts: with torchvision it can be
    built."""
    if model_type.startswith("qwen"):
        module = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
        backend = import_module(module).Qwen2VLImageProcessorPil  # not in every version
        name = f"Qwen{model_type[4]}VL"
        half = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        images = backend(**(half if name == "Qwen3VL" else {}), **limits)
    else:
        name = {"glm4v": "Glm4v", "glm46v": "Glm46V", "internvl": "InternVL"}[model_type]
        of_images = "GotOcr2" if name == "InternVL" else name
        images = getattr(transformers, f"{of_images}ImageProcessor")(**limits)
    videos = getattr(transformers, f"{name}VideoProcessor")()
    whole = getattr(transformers, f"{name}Processor")
    whole(images, tokenizer, videos, chat_template=template).save_pretrained(folder)

"""Small tokenizers built like Qwen's and LLaMA's, which load in no time."""

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import PreTrainedTokenizerFast

from task_encoders.families.llava_1_5 import DEFAULT_SYSTEM
from task_encoders.text.qwen_vocabulary import QWEN_PATTERN, QWEN_SPECIAL_TOKENS
from tests.helpers.texts_and_images import random_text


def byte_level_bpe(pattern: str, texts: list[str], normalizer: Any = None) -> Any:
    """Byte-level BPE of some hundred merges, trained on random texts and these."""
    rng = np.random.default_rng(0)
    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = Sequence([Split(Regex(pattern), "isolated"), byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    random_texts = [random_text(rng, 30, chinese=i % 3 == 0) for i in range(100)]
    backend.train_from_iterator([*random_texts, *texts], trainer)
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


def save_with_template(tokenizer: Any, template: str, folder: Path) -> None:
    """A checkpoint folder, as far as texts go."""
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def save_llama_tokenizer(folder: Path, *, legacy: bool = True) -> None:
    """Built like LLaMA's: spaces are ▁, with one in front of every text (not `legacy`: none)."""
    rng = np.random.default_rng(0)
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *spaces] if legacy else spaces
    )
    backend.decoder = decoders.Replace("▁", " ")
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    texts = [DEFAULT_SYSTEM, "USER: What? ASSISTANT: It."]
    texts += [random_text(rng, 30, chinese=i % 3 == 0) for i in range(100)]
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)

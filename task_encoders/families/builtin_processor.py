"""transformers' tokenizer and processor for the built-in vocabulary, without a hub: for checkpoints
and proofs of parity.
"""

import functools
import itertools
from typing import Any

from task_encoders.families import FAMILIES, build_sample_encoder
from task_encoders.families.qwen2_vl import Qwen2VLEncoder
from task_encoders.text.qwen_templates import QWEN2_VL_TEMPLATE
from task_encoders.text.qwen_vocabulary import QWEN_SPECIAL_TOKENS, qwen_ranks
from task_encoders.text.tokenizer import byte_level_alphabet
from task_encoders.versions import require_supported


@functools.cache
def builtin_tokenizer(text_tokens: tuple[str, ...] = ()) -> Any:
    """Make the fast `Qwen2Tokenizer` with the ids of every published Qwen2-VL checkpoint;
    `text_tokens` as in `load_tokenizer`."""
    require_supported("transformers")
    from transformers import AddedToken, Qwen2Tokenizer

    vocabulary, merges = _vocabulary_and_merges()
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        # Without fixed ids transformers would choose the special tokens' ids itself.
        added_tokens_decoder={
            len(vocabulary) + i: AddedToken(
                token, special=i < len(QWEN_SPECIAL_TOKENS), normalized=False
            )
            for i, token in enumerate(QWEN_SPECIAL_TOKENS + text_tokens)
        },
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(QWEN_SPECIAL_TOKENS[1:]),
        model_max_length=32768,
    )
    tokenizer.chat_template = QWEN2_VL_TEMPLATE
    return tokenizer


@functools.cache
def _vocabulary_and_merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Find Qwen's tokens and their merges, spelled as transformers does; it takes seconds."""
    ranks = qwen_ranks()
    characters = {byte: character for character, byte in byte_level_alphabet().items()}

    def spell(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    in_order = sorted(ranks.items(), key=lambda item: item[1])
    pairs = (_last_merge(ranks, token, rank) for token, rank in in_order if len(token) > 1)
    merges = [(spell(left), spell(right)) for left, right in pairs]
    return vocabulary, merges


def _last_merge(ranks: dict[bytes, int], token: bytes, rank: int) -> tuple[bytes, bytes]:
    """Find the two tokens whose merge makes this one: byte-pair merging, stopped before it."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        best, i = min(
            (ranks.get(left + right, rank), i)
            for i, (left, right) in enumerate(itertools.pairwise(parts))
        )
        if best >= rank:
            raise ValueError(f"vocabulary is not a byte-pair encoding: {token!r} has no last merge")
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def has_builtin_processor(family: str) -> bool:
    """Tell whether `builtin_processor` can make a family's processor."""
    return issubclass(FAMILIES[family].build, Qwen2VLEncoder)


def builtin_processor(family: str | None = None, **options: Any) -> Any:
    """Make a Qwen2-VL processor for images and text (its video part needs torchvision).

    Args:
        family: one with Qwen2-VL's template.
        options: the ModelOptions that images depend on.

    Raises:
        ValueError: the family has another template, or its name is unknown.
    """
    require_supported("transformers")
    from transformers import Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    encoder = build_sample_encoder(family, **options)
    if not isinstance(encoder, Qwen2VLEncoder):
        raise ValueError(f"family {family} has no built-in processor; name a checkpoint")

    class ImageTextProcessor(Qwen2VLProcessor):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    names = ("patch_size", "temporal_patch_size", "merge_size")
    images = {name: getattr(encoder.vision, name) for name in names}
    images |= {name: getattr(encoder.options, name) for name in ("min_pixels", "max_pixels")}
    return ImageTextProcessor(
        image_processor=Qwen2VLImageProcessorPil(**images),
        tokenizer=builtin_tokenizer(encoder.TEXT_TOKENS),
        chat_template=QWEN2_VL_TEMPLATE,
    )

"""LLaVA-1.5: tokens and pixels equal those of transformers' processor for LLaVA's own texts."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaTokenizer, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from task_encoders.families import build_sample_encoder
from task_encoders.families.llava_1_5 import DEFAULT_SYSTEM
from task_encoders.samples import IGNORE_INDEX, SourceSample, Turn
from tests.helpers.datasets import image_bytes
from tests.helpers.encoder_contract import opened, own_pairs, unequal
from tests.helpers.texts_and_images import KINDS, odd_pictures, random_text, random_turns
from tests.helpers.tiny_tokenizers import save_llama_tokenizer

SIZE, COUNT = 56, 42
IMAGE = -200  # LLaVA's number in place of an image


pytestmark = pytest.mark.parametrize("folder", ["llava_1_5"], indirect=True)


def processor_of(folder: Path, *, pad: bool) -> Any:
    images = LlavaImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}, do_pad=pad
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return LlavaProcessor(images, tokenizer, patch_size=14, vision_feature_select_strategy="full")


def written(sample: SourceSample, template: str) -> tuple[str, str]:
    """Text after the <s> in LLaVA's styles, images moved to the front of their question: images and
    caption of plain; of v1 the whole conversation, and no more."""
    if template == "plain":
        return "<image>" * len(sample.images), sample.turns[0].answer + "\n"
    text = f"{sample.system or DEFAULT_SYSTEM} "
    in_front = not any("<image>" in turn.prompt for turn in sample.turns)
    for i, turn in enumerate(sample.turns):
        count = turn.prompt.count("<image>") + (len(sample.images) if in_front and i == 0 else 0)
        question = "<image>\n" * count + turn.prompt.replace("<image>", "").strip()
        text += f"USER: {question} ASSISTANT: {turn.answer}</s>"
    return text, ""


# Restated from LLaVA, commit c121f04 (https://github.com/haotian-liu/LLaVA, Apache-2.0).


def tokenizer_image_token(tokenizer: Any, text: str) -> list[int]:
    """Of llava/mm_utils.py: <s>, then each stretch between images tokenized by itself."""
    chunks = [tokenizer.encode(part, add_special_tokens=False) for part in text.split("<image>")]
    ids = [tokenizer.bos_token_id, *chunks[0]]
    for chunk in chunks[1:]:
        ids += [IMAGE, *chunk]
    return ids


def preprocess_v1(
    tokenizer: Any, conversation: str, trained: Sequence[bool]
) -> tuple[list[int], list[int]]:
    """Of llava/train/train.py: what is masked is counted by tokenizing each round by itself, with
    and without its answer, if it is trained. Two off each instruction: its own <s>, and the blank
    that it ends in."""
    ids = tokenizer_image_token(tokenizer, conversation)
    labels, end = [IGNORE_INDEX, *ids[1:]], 1
    for text, is_trained in zip(conversation.split("</s>"), trained, strict=False):
        length = len(tokenizer_image_token(tokenizer, text))
        instruction, separator, _ = text.partition(" ASSISTANT: ")
        num_masked = len(tokenizer_image_token(tokenizer, instruction + separator)) - 2
        num_masked = num_masked if is_trained else length
        labels[end : end + num_masked] = [IGNORE_INDEX] * num_masked
        end += length
    assert end == len(ids)  # else LLaVA masks the whole sample
    return ids, labels


def preprocess_plain(tokenizer: Any, images: str, caption: str) -> tuple[list[int], list[int]]:
    """Of llava/train/train.py: everything but <s> and the image carries loss."""
    ids = tokenizer_image_token(tokenizer, images + caption)
    num_masked = len(tokenizer_image_token(tokenizer, images))
    return ids, [IGNORE_INDEX] * num_masked + ids[num_masked:]


def collapsed(tokenizer: Any, encoded: Any) -> tuple[list[int], list[int]]:
    """Our ids and labels, with one IMAGE for the tokens of each image."""
    image, num_tokens = tokenizer.convert_tokens_to_ids("<image>"), (SIZE // 14) ** 2
    is_image = encoded.tokens == image
    keeps = ~is_image | (np.cumsum(is_image) % num_tokens == 1)
    ids = np.where(is_image, IMAGE, encoded.tokens)[keeps]
    return ids.tolist(), encoded.labels[keeps].tolist()


@pytest.mark.parametrize(
    ("aspect", "template"), [("pad", "v1"), ("square", "v1"), ("pad", "plain")]
)
def test_every_array_equals_the_processors(folder: Path, aspect: str, template: str) -> None:
    processor = processor_of(folder, pad=aspect == "pad")
    options = {"image_size": SIZE, "image_aspect": aspect, "template": template}
    encoder: Any = build_sample_encoder("llava_1_5", str(folder), **options)
    rng, files = np.random.default_rng(3), odd_pictures()
    num_blanks = 0
    for index in range(COUNT):
        kind = KINDS[index % len(KINDS)]
        chosen = rng.integers(len(files), size={"text_only": 0, "multi_image": 3}.get(kind, 1))
        images = [files[i] for i in chosen]
        turns = random_turns(rng, kind, len(images))[: None if template == "v1" else 1]
        if template == "plain":
            turns = (replace(turns[0], prompt=""),)
        turns = tuple(
            replace(turn, weight=float(i == 0 or rng.random() < 0.8))
            for i, turn in enumerate(turns)
        )
        system = random_text(rng, 5) if rng.random() < 0.3 else None
        names = tuple(map(str, range(len(images))))
        sample = SourceSample(str(index), "bmr", turns, names, system)
        text, caption = written(sample, template)
        shown = [*map(opened, images)] or None
        expected = processor(text=[f"<s>{text}{caption}"], images=shown, return_tensors="np")
        encoded = encoder.encode(sample, images)
        if template == "plain":
            ids, labels = preprocess_plain(processor.tokenizer, text, caption)
        else:
            ids, labels = preprocess_v1(
                processor.tokenizer, text, [turn.weight > 0 for turn in turns]
            )
        found = collapsed(processor.tokenizer, encoded)
        pairs = {
            "tokens": (encoded.tokens, expected["input_ids"][0]),
            "LLaVA's tokens": (found[0], ids),
            "LLaVA's labels": (found[1], labels),
            "positions": (encoded.position_ids, [range(len(encoded.tokens))]),
            **own_pairs(encoder, sample, images, [], encoded),
        }
        if images:
            pixels = encoded.pixel_values.reshape(-1, 3, SIZE, SIZE)
            pairs["pixels"] = pixels, expected["pixel_values"]
        assert set(unequal(pairs)) <= {"patches", "patches of the grids"}  # a row is an image
        first = encoded.tokens[encoded.labels != IGNORE_INDEX][0]
        num_blanks += processor.tokenizer.convert_ids_to_tokens(int(first)) == "▁"
    assert num_blanks > COUNT / 9  # answers that begin with a blank of its own


def test_siglip_towers_by_options(folder: Path) -> None:
    options = {"image_size": 60, "tokens_per_image": 9, "tower": "siglip", "image_aspect": "square"}
    encoder = build_sample_encoder("llava_1_5", str(folder), **options)
    data = image_bytes(90, 70, "PNG")
    encoded = encoder.encode(SourceSample("k", "captioning", (Turn("", "A bar."),), ("a",)), [data])
    processor = SiglipImageProcessorPil(size={"height": 60, "width": 60}, resample=3)
    expected = processor([opened(data)], return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(encoded.pixel_values.reshape(1, 3, 60, 60), expected)
    start, image = map(encoder.tokenizer.special_id, ("<s>", "<image>"))
    # plain: <s> image caption newline, loss on the caption and the newline
    caption = encoder.tokenizer.encode("A bar.\n")
    assert encoded.tokens.tolist() == [start, *[image] * 9, *caption]
    assert encoded.labels[encoded.labels != IGNORE_INDEX].tolist() == caption


@pytest.mark.parametrize("legacy", [False, True])
def test_a_tokenizer_without_space_after_special_tokens(
    legacy: bool, folder: Path, tmp_path: Path
) -> None:
    """As transformers makes it of vocabulary and merges. The remedy is what `folder` holds."""
    spec = json.loads((folder / "tokenizer.json").read_text())["model"]
    merges = [tuple(pair) for pair in spec["merges"]]
    made = LlamaTokenizer(vocab=spec["vocab"], merges=merges, legacy=legacy)
    made.add_special_tokens({"additional_special_tokens": ["<image>"]})
    made.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"use the tokenizer files of a published") as told:
        build_sample_encoder("llava_1_5", str(tmp_path))
    assert "legacy" not in str(told.value)
    bare = tmp_path / "bare"  # no space in front of any text: consistent
    save_llama_tokenizer(bare, legacy=False)
    for consistent in (bare, folder):
        encoder = build_sample_encoder("llava_1_5", str(consistent))
        assert encoder.fingerprint["image_size"] == 336

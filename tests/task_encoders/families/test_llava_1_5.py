"""LLaVA-1.5: tokens and pixels equal those of transformers' processor for LLaVA's own texts."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import LlamaTokenizer, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from task_encoders.families import build_sample_encoder
from task_encoders.families.llava_1_5 import DEFAULT_SYSTEM
from task_encoders.media.image import read_image_header
from task_encoders.samples import IGNORE_INDEX, SampleError, SourceSample, Turn
from tests.helpers.texts_and_images import (
    KINDS,
    random_image,
    random_side,
    random_text,
    random_turns,
)
from tests.helpers.tiny_tokenizers import save_llama_tokenizer
from tests.helpers.videos import make_video
from tests.world import World

SIZE, COUNT = 56, 70
IMAGE = -200  # LLaVA's number in place of an image


@pytest.fixture
def folder(world: World) -> Path:
    return world.tokenizer("llava_1_5")


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


def preprocess_v1(tokenizer: Any, conversation: str) -> tuple[list[int], list[int]]:
    """Of llava/train/train.py: what is masked is counted by tokenizing each round by itself, with
    and without its answer. Two off each instruction: its own <s>, and the blank that it ends in."""
    ids = tokenizer_image_token(tokenizer, conversation)
    labels, end = [IGNORE_INDEX, *ids[1:]], 1
    for text in conversation.removesuffix("</s>").split("</s>"):
        instruction, separator, _ = text.partition(" ASSISTANT: ")
        num_masked = len(tokenizer_image_token(tokenizer, instruction + separator)) - 2
        labels[end : end + num_masked] = [IGNORE_INDEX] * num_masked
        end += len(tokenizer_image_token(tokenizer, text))
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


@pytest.fixture(scope="module")
def files() -> list[bytes]:
    """Images of all sizes and modes; transformers turns those in files, but not open ones."""
    rng = np.random.default_rng(2)
    sides = [(random_side(rng), random_side(rng)) for _ in range(60)]
    sides += [(int(rng.integers(1, 12)), int(rng.integers(1, 12))) for _ in range(10)]
    sides += [(5, 400), (400, 5)]
    return [random_image(rng, width, height) for width, height in sides]


@pytest.mark.parametrize(
    ("aspect", "template"), [("pad", "v1"), ("square", "v1"), ("pad", "plain")]
)
def test_every_array_equals_the_processors(
    folder: Path, files: list[bytes], aspect: str, template: str
) -> None:
    processor = processor_of(folder, pad=aspect == "pad")
    options = {"image_size": SIZE, "image_aspect": aspect, "template": template}
    encoder = build_sample_encoder("llava_1_5", str(folder), **options)
    rng = np.random.default_rng(3)
    num_blanks = 0
    for index in range(COUNT):
        kind = KINDS[index % len(KINDS)]
        chosen = rng.integers(len(files), size={"text_only": 0, "multi_image": 3}.get(kind, 1))
        images = [files[i] for i in chosen]
        turns = random_turns(rng, kind, len(images))[: None if template == "v1" else 1]
        system = random_text(rng, 5) if rng.random() < 0.3 else None
        names = tuple(map(str, range(len(images))))
        if template == "plain":
            turns = (replace(turns[0], prompt=""),)
        sample = SourceSample(str(index), "bmr", turns, names, system)
        text, caption = written(sample, template)
        expected = processor(
            text=[f"<s>{text}{caption}"],
            images=[Image.open(io.BytesIO(data)) for data in images] or None,
            return_tensors="np",
        )
        encoded = encoder.encode(sample, images)
        assert encoded.tokens.tolist() == expected["input_ids"][0].tolist()
        if template == "plain":
            theirs = preprocess_plain(processor.tokenizer, text, caption)
        else:
            theirs = preprocess_v1(processor.tokenizer, text)
        assert collapsed(processor.tokenizer, encoded) == theirs
        trained = encoded.tokens[encoded.labels != IGNORE_INDEX]
        num_blanks += processor.tokenizer.convert_ids_to_tokens(int(trained[0])) == "▁"
        if images:
            found = encoded.pixel_values.reshape(-1, 3, SIZE, SIZE)
            np.testing.assert_array_equal(found, expected["pixel_values"])
        headers = [read_image_header(io.BytesIO(data)) for data in images]
        measured = encoder.measure(sample, [(h.height, h.width) for h in headers])
        assert measured.num_tokens == len(encoded.tokens)
        assert measured.num_loss_tokens == (encoded.labels != IGNORE_INDEX).sum()
        assert encoded.position_ids.tolist() == [list(range(len(encoded.tokens)))]
    assert num_blanks > COUNT / 9  # answers that begin with a blank of its own


def test_only_trained_answers_carry_loss_and_tools_are_refused(folder: Path) -> None:
    encoder = build_sample_encoder("llava_1_5", str(folder))
    plain = SourceSample("k", "bmr", (Turn("a", "b"), Turn("c", "d")))
    first = replace(plain, turns=(replace(plain.turns[0], weight=0), plain.turns[1]))
    whole, part = encoder.encode(plain, []), encoder.encode(first, [])
    np.testing.assert_array_equal(whole.tokens, part.tokens)
    end = whole.tokens.tolist().index(encoder.tokenizer.special_id("</s>"))
    np.testing.assert_array_equal(part.labels[end + 1 :], whole.labels[end + 1 :])
    assert (part.labels[: end + 1] == IGNORE_INDEX).all()
    for turn in (Turn("a", "b", thought="t"), Turn("a", "b", role="tool")):
        with pytest.raises(SampleError, match="not_in_template"):
            encoder.measure(replace(plain, turns=(turn,)), [])


def test_siglip_towers_by_options(folder: Path) -> None:
    rng = np.random.default_rng(4)
    pixels = rng.integers(0, 256, (70, 90, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    encoder = build_sample_encoder(
        "llava_1_5",
        str(folder),
        image_size=60,
        tokens_per_image=9,
        tower="siglip",
        image_aspect="square",
    )
    sample = SourceSample("k", "captioning", (Turn("", "A bar."),), ("a",))
    encoded = encoder.encode(sample, [buffer.getvalue()])
    processor = SiglipImageProcessorPil(size={"height": 60, "width": 60}, resample=3)
    expected = processor([Image.fromarray(pixels)], return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(encoded.pixel_values.reshape(1, 3, 60, 60), expected)
    image = encoder.tokenizer.special_id("<image>")
    assert (encoded.tokens == image).sum() == 9
    # plain: <s> image caption newline, loss on the caption and the newline
    caption = encoder.tokenizer.encode("A bar.\n")
    assert encoded.tokens.tolist() == [encoder.tokenizer.special_id("<s>"), *[image] * 9, *caption]
    assert encoded.labels[encoded.labels != IGNORE_INDEX].tolist() == caption


def test_what_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    save_llama_tokenizer(tmp_path, legacy=False)
    build_sample_encoder("llava_1_5", str(tmp_path))  # no space in front of any text: consistent
    encoder = build_sample_encoder("llava_1_5", str(folder))
    with pytest.raises(SampleError, match="takes no videos"):
        encoder.encode(
            SourceSample("k", "vqa", (Turn("a", "b"),), videos=("v",)), [], [make_video(2)]
        )
    assert encoder.fingerprint["image_size"] == 336


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
    build_sample_encoder("llava_1_5", str(folder))

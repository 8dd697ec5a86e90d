"""InternVL3: tiles, pixels, ids and labels equal those of transformers' processor and template."""

import json
import os
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as tiling

from task_encoders.families import build_sample_encoder, model_options
from task_encoders.families.internvl3 import INTERNVL_TEMPLATE
from task_encoders.sample_encoder import IGNORE_INDEX
from task_encoders.samples import SampleError, SourceSample, Turn
from task_encoders.text.load_tokenizer import checkpoint_tokenizer
from task_encoders.text.pieces import to_chat
from tests.helpers.conversations import random_conversation
from tests.helpers.datasets import image_bytes
from tests.helpers.encoder_contract import unequal
from tests.helpers.media_references import BACKENDS, by_both, real_pictures
from tests.helpers.texts_and_images import random_image, random_side
from tests.helpers.tiny_families import INTERNVL, save_tokenizer

SAMPLES = int(os.environ.get("FUZZED_SAMPLES", "120"))
SQUARE = image_bytes(56, 56)
NORMAL: dict[str, Any] = {
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "crop_to_patches": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("internvl")
    save_tokenizer("internvl3", folder)
    return folder


@pytest.mark.parametrize(("least", "most"), [(1, 12), (1, 1), (3, 6)])
@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.exhaustive)])
def test_tiles_are_transformers_own(folder: Path, least: int, most: int, count: int) -> None:
    encoder = build_sample_encoder("internvl3", str(folder), min_tiles=least, max_tiles=most)
    size = {"height": 448, "width": 448}
    processor = tiling.GotOcr2ImageProcessorPil(
        size=size, min_patches=least, max_patches=most, crop_to_patches=True
    )
    sample = SourceSample("k", "captioning", (Turn("", "A."),), ("a",))
    text = len(encoder.tokenizer.encode("A.")) + 1
    rng = np.random.default_rng(0)
    sides = np.exp(rng.uniform(0, np.log(8000), (count, 2))).astype(int)
    sides[::5] = 448 * rng.integers(1, 7, sides[::5].shape)  # ratios of several arrangements
    for height, width in sides.tolist():
        tiles = processor.get_number_of_image_patches(height, width)
        measured = encoder.measure(sample, [(height, width)])
        assert measured.grid_thw == ((tiles, 32, 32),)
        assert measured.num_tokens == 256 * tiles + 2 + text


def differing_samples(
    encoder: Any, processor: Any, files: list[bytes]
) -> list[tuple[int, list[str]]]:
    """Numbers of the samples, of two images each, whose pixels, tiles, tokens or positions are not
    transformers', and which of these."""
    token, found = encoder.media_token_ids["image_token_id"], []
    for number, (encoded, ours, theirs) in enumerate(by_both(encoder, processor, files, 2)):
        tiles = np.asarray(theirs["num_patches"]).tolist()
        per_tile = encoded.image_grid_thw[0, 1] ** 2 // 4
        pairs = {
            "pixels": (ours["pixel_values"], theirs["pixel_values"]),
            "tiles": (encoded.image_grid_thw[:, 0], tiles),
            "tokens": ((encoded.tokens == token).sum(), sum(tiles) * per_tile),
            "positions": (encoded.position_ids, [range(len(encoded.tokens))]),
        }
        if names := unequal(pairs):
            found.append((number, names))
    return found


def image_processor(resize: str, side: int, **options: Any) -> Any:
    """transformers' own, of either backend; that of torch needs torchvision."""
    name = "GotOcr2ImageProcessor" + "Pil" * (resize == "pil")
    size = {"height": side, "width": side}
    return getattr(transformers, name)(size=size, **NORMAL, **options)


@BACKENDS
def test_pixels_are_transformers_own(folder: Path, resize: str) -> None:
    options = {"image_size": 56, "max_tiles": 6, "resize": resize}
    encoder = build_sample_encoder("internvl3", str(folder), **options)
    rng = np.random.default_rng(1)
    files = [random_image(rng, random_side(rng), random_side(rng)) for _ in range(40)]
    assert differing_samples(encoder, image_processor(resize, 56, max_patches=6), files) == []


@BACKENDS
def test_real_pictures(folder: Path, resize: str, request: pytest.FixtureRequest) -> None:
    encoder = build_sample_encoder("internvl3", str(folder), resize=resize)
    files = real_pictures(request.config.getoption("--real-data"))
    assert differing_samples(encoder, image_processor(resize, 448), files) == []


def test_conversations_equal_the_published_template(folder: Path) -> None:
    """Special tokens that a user types are data."""
    encoder: Any = build_sample_encoder("internvl3", str(folder), image_size=56)
    assert "chat_template" not in encoder.fingerprint
    tokenizer = checkpoint_tokenizer(str(folder))
    names = [*INTERNVL, "<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    control = re.compile("(" + "|".join(map(re.escape, names)) + ")")
    rng = np.random.default_rng(3)
    written = several = 0
    for index in range(SAMPLES):
        special = tuple(names) if index % 3 == 0 else ()
        sample = random_conversation(rng, index, special=special)
        images = [SQUARE] * len(sample.images)
        try:
            encoded = encoder.encode(sample, images)
        except SampleError as error:
            assert (error.reason, sample.is_plain) == ("not_in_template", False)  # noqa: PT017
            continue
        plain = json.dumps(to_chat(sample), ensure_ascii=False)
        hidden = control.sub(lambda found: f"\ue000{names.index(found[0])}\ue001", plain)
        messages = json.loads(hidden)
        text = tokenizer.apply_chat_template(
            messages, chat_template=INTERNVL_TEMPLATE, tokenize=False
        )
        ids: list[int] = []
        for i, part in enumerate(control.split(text.removesuffix("\n"))):
            if i % 2:
                tile = ["<img>", *["<IMG_CONTEXT>"] * 4, "</img>"]
                parts = tile if part == "<IMG_CONTEXT>" else [part]
                ids += tokenizer.convert_tokens_to_ids(parts)
                continue
            part = re.sub("\ue000(\\d+)\ue001", lambda found: names[int(found[1])], part)
            ids += tokenizer(part, split_special_tokens=True)["input_ids"]
        assert encoded.tokens.tolist() == ids
        labelled = np.split(encoded.labels, np.flatnonzero(encoded.labels == ids[-1]) + 1)[:-1]
        trained = [turn for turn in sample.turns if turn.weight]
        for turn, labels in zip(trained, labelled, strict=True):
            shown = tokenizer.decode(labels[labels != IGNORE_INDEX]).removesuffix("<|im_end|>")
            assert shown.lstrip("\n") == unicodedata.normalize("NFC", turn.answer).lstrip("\n")
        written += 1
        several += len(images) > 0
    assert written > 0.3 * SAMPLES
    assert several > 0.05 * SAMPLES


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="min_tiles 5 > max_tiles 4"):
        model_options(family="internvl3", min_tiles=5, max_tiles=4)
    with pytest.raises(ValueError, match="image_size 450 is not a multiple of 28"):
        model_options(family="internvl3", image_size=450)

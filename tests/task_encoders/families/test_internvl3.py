"""InternVL3: tiles, frames, pixels, ids and labels equal those of transformers."""

import io
import os
import re
import unicodedata
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as tiling
from transformers.models.internvl.processing_internvl import InternVLProcessor

from task_encoders.families import build_sample_encoder
from task_encoders.families.internvl3 import INTERNVL_TEMPLATE
from task_encoders.media.video_file import decode_frames, read_video_header
from task_encoders.samples import IGNORE_INDEX, SampleError, SourceSample, Turn
from task_encoders.text.pieces import to_chat
from task_encoders.text.tokenizer import checkpoint_tokenizer
from tests.helpers.datasets import image_bytes
from tests.helpers.encoder_contract import by_both, needs_transformers, own_pairs, unequal
from tests.helpers.texts_and_images import (
    TypedTokens,
    random_conversation,
    random_image,
    random_side,
)
from tests.helpers.tiny_families import INTERNVL
from tests.helpers.videos import make_video, odd_clips
from tests.world import World

SAMPLES = int(os.environ.get("FUZZED_SAMPLES", "120"))
#: Of one tile each.
SQUARES = [image_bytes(56, 56), image_bytes(60, 57)]
CLIPS = [make_video(7, 10), make_video(9, 3, 96, 40)]
CONTROL = [*INTERNVL, "<|im_end|>", "<|im_start|>", "<|endoftext|>", "<video>"]
NORMAL: dict[str, Any] = {
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "crop_to_patches": True,
}


@pytest.fixture
def folder(world: World) -> Path:
    return world.tokenizer("internvl3")


def test_pixels_are_transformers_own(folder: Path) -> None:
    """Also tiles, tokens and positions, of samples of two images each."""
    options = {"image_size": 56, "max_tiles": 6, "resize": "pil"}
    encoder: Any = build_sample_encoder("internvl3", str(folder), **options)
    size = {"height": 56, "width": 56}
    processor = tiling.GotOcr2ImageProcessorPil(size=size, max_patches=6, **NORMAL)
    rng = np.random.default_rng(1)
    files = [random_image(rng, random_side(rng), random_side(rng)) for _ in range(40)]
    token = encoder.media_token_ids["image_token_id"]
    for encoded, ours, theirs in by_both(encoder, processor, files, 2):
        tiles = np.asarray(theirs["num_patches"]).tolist()
        per_tile = encoded.image_grid_thw[0, 1] ** 2 // 4
        pairs = {
            "pixels": (ours["pixel_values"], theirs["pixel_values"]),
            "tiles": (encoded.image_grid_thw[:, 0], tiles),
            "tokens": ((encoded.tokens == token).sum(), sum(tiles) * per_tile),
            "positions": (encoded.position_ids, [range(len(encoded.tokens))]),
        }
        assert unequal(pairs) == []


class Reference:
    """Conversations by the published template and the processor's own replacements."""

    def __init__(self, folder: Path, num_frames: int) -> None:
        needs_transformers("5.15", "has no replace_video_token in its processor")
        self.tokenizer = checkpoint_tokenizer(str(folder))
        self.typed = TypedTokens(self.tokenizer, CONTROL)
        tokens = dict(zip(("start_image_token", "end_image_token"), INTERNVL, strict=False))
        self.processor = SimpleNamespace(**tokens, image_token=INTERNVL[2], image_seq_length=4)
        self.num_frames = num_frames

    def written(self, sample: SourceSample) -> str:
        """The template's text, with what control tokens spell in texts between noncharacters."""
        text = self.typed.write(to_chat(sample), None, INTERNVL_TEMPLATE)
        return str(text).removesuffix("\n")

    def medium(self, found: re.Match[str]) -> str:
        """The text of an image of one tile, or of a video."""
        if found[0] == "<video>":
            inputs = {"pixel_values_videos": [np.zeros(self.num_frames)]}
            return InternVLProcessor.replace_video_token(self.processor, inputs, 0)
        return InternVLProcessor.replace_image_token(self.processor, {"num_patches": [1]}, 0)

    def ids(self, written: str) -> list[int]:
        return self.typed.ids(re.sub("<IMG_CONTEXT>|<video>", self.medium, written))


def with_videos(rng: np.random.Generator, sample: SourceSample) -> SourceSample:
    """The sample with some of its images turned into videos."""
    kinds = ["<video>" if rng.integers(2) else "<image>" for _ in sample.images]
    left = iter(kinds)

    def chosen(text: str) -> str:
        return re.sub("<image>", lambda _: next(left), text)

    turns = tuple(
        replace(
            turn,
            before=tuple((role, chosen(text)) for role, text in turn.before),
            prompt=chosen(turn.prompt),
        )
        for turn in sample.turns
    )
    num_videos = kinds.count("<video>")
    images = sample.images[num_videos:]
    return replace(sample, turns=turns, images=images, videos=("v",) * num_videos)


def test_conversations_equal_the_published_template(folder: Path) -> None:
    """Special tokens that a user types are data, as is <video> where there are none."""
    encoder: Any = build_sample_encoder("internvl3", str(folder), image_size=56, video_num_frames=3)
    assert "chat_template" not in encoder.fingerprint
    reference, rng = Reference(folder, 3), np.random.default_rng(3)
    rows = {data: encoder.encode_image(encoder.decode_image(data))[0] for data in SQUARES}
    rows |= {data: encoder.encode_video(data)[0] for data in CLIPS}
    counts: Counter[str] = Counter()
    for index in range(SAMPLES):
        may_type_video = index % 6 == 0
        special = tuple(CONTROL if may_type_video else CONTROL[:-1] if index % 3 == 0 else ())
        sample = random_conversation(rng, index, special=special)
        sample = sample if may_type_video else with_videos(rng, sample)
        images = [SQUARES[i % 2] for i in range(len(sample.images))]
        videos = [CLIPS[i % 2] for i in range(len(sample.videos))]
        try:
            encoded = encoder.encode(sample, images, videos)
        except SampleError as error:
            assert (error.reason, sample.is_plain) == ("not_in_template", False)  # noqa: PT017
            continue
        written = reference.written(sample)
        ids = reference.ids(written)
        assert encoded.tokens.tolist() == ids
        assert unequal(own_pairs(encoder, sample, images, videos, encoded)) == []
        if sample.media:
            files = {"<IMG_CONTEXT>": iter(images), "<video>": iter(videos)}
            order = re.findall("<IMG_CONTEXT>|<video>", written)
            pixels = np.concatenate([rows[next(files[kind])] for kind in order])
            np.testing.assert_array_equal(encoded.image_pixels, pixels)
        labelled = np.split(encoded.labels, np.flatnonzero(encoded.labels == ids[-1]) + 1)[:-1]
        trained = [turn for turn in sample.turns if turn.weight]
        for turn, labels in zip(trained, labelled, strict=True):
            shown = reference.tokenizer.decode(labels[labels != IGNORE_INDEX])
            shown = shown.removesuffix("<|im_end|>").lstrip("\n")
            assert shown == unicodedata.normalize("NFC", turn.answer).lstrip("\n")
        counts.update(written=1, images=bool(images), videos=bool(videos))
        counts["both"] += bool(images and videos)
    assert counts["written"] > 0.3 * SAMPLES
    assert min(counts["images"], counts["videos"]) > 0.03 * SAMPLES
    assert counts["both"] > 0


OF_VIDEO = SourceSample("v", "captioning", (Turn("", "A."),), videos=("c",))


@pytest.mark.parametrize("clip", range(4))
def test_pixels(folder: Path, clip: int) -> None:
    """The steps of transformers' processor, one after another."""
    encoder: Any = build_sample_encoder(
        "internvl3", str(folder), image_size=56, video_num_frames=5, resize="torch"
    )
    data = odd_clips()[clip]
    header = read_video_header(io.BytesIO(data))
    frames = decode_frames(data, header, encoder.sample_video(header).frames, 10**6)
    pixels = torch.from_numpy(np.stack([np.array(one) for one in frames])).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(pixels, (56, 56), mode="bicubic", antialias=True)
    normal = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    mean, std = (torch.tensor(x)[:, None, None] * (1.0 / (1 / 255)) for x in normal)
    values = ((resized.float() - mean) / std).reshape(5, 3, 4, 14, 4, 14)
    encoded = encoder.encode(OF_VIDEO, [], [data])
    assert encoded.image_grid_thw.tolist() == [[1, 4, 4]] * 5
    expected = values.permute(0, 2, 4, 1, 3, 5).reshape(80, -1)
    np.testing.assert_array_equal(encoded.pixel_values, expected.numpy())

"""Gemma 4, and 12B of it (`gemma4_unified`): sizes, pixels, times, ids and labels equal
transformers' own, with the chat template it is published with, and what is measured is what is
encoded."""

import io
import os
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_transforms import convert_to_rgb
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.video_utils import VideoMetadata

from task_encoders.families import build_sample_encoder
from task_encoders.families.base.spans import Medium
from task_encoders.media.video_file import VideoHeader, read_video_header
from task_encoders.model_inputs import to_transformers_kwargs
from task_encoders.samples import IGNORE_INDEX, SourceSample, Turn
from tests.helpers.datasets import image_bytes
from tests.helpers.encoder_contract import opened, own_pairs, transformers_function, unequal
from tests.helpers.texts_and_images import TypedTokens, encoded_conversations, messages_and_tools
from tests.helpers.tiny_checkpoints import packed_batch
from tests.helpers.tiny_families import needs_family
from tests.helpers.tiny_tokenizers import GEMMA_TEMPLATE, gemma_tokenizer, save_gemma_tokenizer
from tests.helpers.videos import make_video

#: FUZZED_SAMPLES=2000 takes some minutes; sizes and videos are ten times as many.
SAMPLES = int(os.environ.get("FUZZED_SAMPLES", "60"))
BUDGETS = (70, 140, 280, 560, 1120)
IMAGE = image_bytes(56, 56)
TYPED = ("<turn|>", "<|turn>model\n", "<|image|>", "<|channel>thought\n", "<channel|>", "<eos>")
CLIPS = [make_video(7, 10), make_video(90, 1, 96, 40), make_video(40, 24, container="webm")]


@pytest.fixture(scope="module", params=["gemma4", "gemma4_unified"])
def family(request: Any) -> Any:
    needs_family(request.param)
    return request.param


@pytest.fixture(scope="module")
def encoder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(family)
    save_gemma_tokenizer(folder)
    return build_sample_encoder(family, str(folder), resize="pil", max_soft_tokens=70)


#: Around what a model writes.
_BEGIN, _END = "\ue010", "\ue011"


def marked(template: str) -> str:
    """The template with marks around what a model writes, where TRL's training template of the same
    layout (diffusion_gemma_training.jinja) has them."""
    thought = "'<|channel>thought\\n' + thinking_text + '\\n<channel|>'"
    for old, new in (
        (thought, f"'{_BEGIN}' + {thought} + '{_END}'"),
        ("'<|tool_call>call:'", f"'{_BEGIN}<|tool_call>call:'"),
        ("'}<tool_call|>'", f"'}}<tool_call|>{_END}'"),
        (
            "{{- captured_content -}}",
            f"{{{{- '{_BEGIN}' ~ captured_content ~ '{_END}' if role == 'model' and "
            "captured_content|trim else captured_content -}}",
        ),
    ):
        assert template.count(old) == 1
        template = template.replace(old, new)
    head, end, tail = template.rpartition("{{- '<turn|>\\n' -}}")
    shown = f"{{{{- '{_BEGIN}<turn|>{_END}\\n' if role == 'model' else '<turn|>\\n' -}}}}"
    assert end
    return head + shown + tail


class Reference:
    """Ids and labels by the published template."""

    def __init__(self, encoder: Any) -> None:
        self.encoder, self.tokenizer = encoder, gemma_tokenizer()
        self.typed = TypedTokens(self.tokenizer, self.tokenizer.all_special_tokens)
        self.template = GEMMA_TEMPLATE.read_text()
        self.marked = marked(self.template)

    def text(self, sample: SourceSample, template: str) -> str | None:
        text = self.typed.write(*messages_and_tools(sample, as_objects=True), template)
        return text and text.rstrip()

    def ids(self, sample: SourceSample) -> list[int] | None:
        """Tokens as transformers writes them; None where the template refuses the conversation."""
        text = self.text(sample, self.template)
        return None if text is None else self.typed.ids(text)

    def labels(self, sample: SourceSample) -> list[int]:
        """Labels where a token overlaps what is marked."""
        # The model hands over with the token that opens a result, and has no say in what follows.
        text = str(self.text(sample, self.marked))
        text = text.replace(f"{_END}<|tool_response>", f"<|tool_response>{_END}")
        text = text.replace(f"<tool_response|>{_BEGIN}<turn|>{_END}", "<tool_response|><turn|>")
        labels: list[int] = []
        inside = False
        for i, part in enumerate(self.typed.pattern.split(text)):
            if i % 2:
                own = self.tokenizer.convert_tokens_to_ids(part)
                labels.append(own if inside else IGNORE_INDEX)
                continue
            shown, trained = "", []
            for character in self.typed.shown(part):
                if character in (_BEGIN, _END):
                    inside = character == _BEGIN
                else:
                    shown += character
                    trained.append(inside)
            found = self.tokenizer(
                shown,
                split_special_tokens=True,
                add_special_tokens=False,
                return_offsets_mapping=True,
            )
            for one, (begin, end) in zip(found.input_ids, found.offset_mapping, strict=True):
                labels.append(one if any(trained[begin:end]) else IGNORE_INDEX)
        return labels


def one_per_medium(encoder: Any, encoded: Any) -> tuple[list[int], list[int]]:
    """Ids and labels of an encoded sample, with the template's one token for each image."""
    ids = encoder.media_token_ids
    image, around = ids["image_token_id"], [ids["boi_token_id"], ids["eoi_token_id"]]
    tokens = encoded.tokens
    again = (tokens == image) & np.append(False, tokens[:-1] == image)
    kept = ~(again | np.isin(tokens, around))
    return tokens[kept].tolist(), encoded.labels[kept].tolist()


def test_videos(encoder: Any) -> None:
    """Times, as the processor writes them."""
    rng = np.random.default_rng(2)
    tokens = {"boi_token": "<|image>", "eoi_token": "<image|>", "video_token": "<|video|>"}
    processor = SimpleNamespace(**tokens)
    for _ in range(2 * SAMPLES):
        total, fps = int(rng.integers(1, 20_000)), float(rng.uniform(0.5, 120))
        header = VideoHeader(total, fps if rng.random() < 0.9 else None, 100, 80)
        sampled = encoder.sample_video(header)
        metadata = VideoMetadata(total_num_frames=total, fps=header.fps)
        metadata.frames_indices = np.array(sampled.frames)
        inputs = {"num_soft_tokens_per_video": [1], "video_metadata": [metadata]}
        written = Gemma4Processor.replace_video_token(processor, inputs, 0)
        grid = (len(sampled.frames), encoder.POOL, encoder.POOL)
        spans = encoder.medium_spans(Medium(grid, sampled))
        ids = [one for span in spans for one in span.ids]
        assert "".join(text for text, _ in encoder.tokenizer.spell(ids)) == written


def by_transformers(
    family: str, image: Image.Image, resize: str, budget: int
) -> tuple[Any, Any, int]:
    """Patches of an image by transformers' processor of Pillow, with padding, their places, and its
    number of tokens; of torch, which needs torchvision, by the steps of one."""
    processor = Gemma4ImageProcessorPil(max_soft_tokens=budget)
    found = processor(images=[image], return_tensors="np")
    (values,), (count,) = found["pixel_values"], found["num_soft_tokens_per_image"]
    (places,) = found["image_position_ids"]
    if resize == "torch":
        height, width = get_aspect_ratio_preserving_size(*image.size[::-1], 16, 9 * budget, 3)
        pixels = torch.from_numpy(np.array(convert_to_rgb(image))).permute(2, 0, 1)[None]
        if pixels.shape[2:] != (height, width):
            pixels = torch.nn.functional.interpolate(
                pixels, (height, width), mode="bicubic", antialias=True
            )
        blocks = (pixels[0] * (1 / 255)).numpy().reshape(3, height // 16, 16, width // 16, 16)
        values = blocks.transpose(1, 3, 2, 4, 0).reshape(9 * count, -1)
    if family == "gemma4_unified":
        merge = transformers_function(family, "patches_merge")
        whole = (torch.from_numpy(one[: 9 * count])[None] for one in (values, places))
        values, places = (merged[0].numpy() for merged in merge(*whole, count))
    return values, places, count


@cache
def built(family: str, folder: str, resize: str, budget: int) -> Any:
    return build_sample_encoder(family, folder, resize=resize, max_soft_tokens=budget)


def differing_pixels(family: str, folder: Path, data: bytes, budget: int = 70) -> list[str]:
    """Names of what differs from transformers in an encoded image, in both backends, or in what is
    measured of it."""
    image = opened(data)
    sample = SourceSample("r", "vqa", (Turn("What?", "It."),), ("a",))
    found = []
    for resize in ("pil", "torch"):
        values, places, count = by_transformers(family, image, resize, budget)
        encoder = built(family, str(folder), resize, budget)
        encoded = encoder.encode(sample, [data])
        given = to_transformers_kwargs(packed_batch([encoded]))
        num_patches = count * encoder.POOL**2
        pairs = {
            "pixels": (encoded.pixel_values, values[:num_patches]),
            "padding": (values[num_patches:].any(), False),
            "places": (given["image_position_ids"][0], places[:num_patches]),
            "tokens": ((encoded.tokens == encoder.media_token_ids["image_token_id"]).sum(), count),
            **own_pairs(encoder, sample, [data], [], encoded),
        }
        found += [f"{name} by {resize}" for name in unequal(pairs)]
    return found


def test_pixels(family: str, tmp_path: Path) -> None:
    save_gemma_tokenizer(tmp_path)
    for index, (height, width) in enumerate([(40, 900), (333, 217), (384, 336), (8, 8)]):
        data = image_bytes(height, width)
        assert differing_pixels(family, tmp_path, data, BUDGETS[index % 2]) == []


def test_conversations(encoder: Any) -> None:
    """Ids and labels of the published template, with control tokens that a user typed."""
    reference, counts = Reference(encoder), Counter[str]()
    for sample, expected, encoded, typed in encoded_conversations(
        reference, SAMPLES, IMAGE, counts, seed=3, special=TYPED
    ):
        tokens, labels = one_per_medium(encoder, encoded)
        assert tokens == expected
        if all(turn.weight for turn in sample.turns):
            assert labels == reference.labels(sample)
            counts["labels"] += 1
        counts["typed"] += typed
    assert counts["refused plain"] == 0
    assert counts["written"] > 0.6 * SAMPLES
    assert min(counts["tools"], counts["typed"], counts["labels"]) > 0.1 * SAMPLES


def test_a_turn_with_calls_goes_on_after_their_results(encoder: Any) -> None:
    """Calls and what follows their results have weights of their own, and so do the tokens that
    end them."""
    call = '{"name": "f", "arguments": {}}'
    tools = '[{"type": "function", "function": {"name": "f", "description": ""}}]'
    turns = Turn("a", "", calls=(call,)), Turn("1", "b", role="tool")
    for trained in (0, 1):
        weighed = tuple(replace(turn, weight=float(i == trained)) for i, turn in enumerate(turns))
        encoded = encoder.encode(SourceSample("k", "bmr", weighed, tools=tools), [])
        names = [text for text, _ in encoder.tokenizer.spell(encoded.labels[encoded.labels >= 0])]
        assert "".join(names) == ("b<turn|>" if trained else CALLED)


CALLED = "<|tool_call>call:f{}<tool_call|><|tool_response>"


def test_captions_and_videos(encoder: Any) -> None:
    """A caption is not written by the template; a video in a pack has a grid of its frames."""
    caption = SourceSample("c", "captioning", (Turn("", "A cat."),), ("a",))
    encoded = encoder.encode(caption, [IMAGE])
    names = [text for text, is_control in encoder.tokenizer.spell(encoded.tokens) if is_control]
    assert [names[0], names[1], names[-2], names[-1]] == ["<bos>", "<|image>", "<image|>", "<eos>"]
    assert (encoded.labels != IGNORE_INDEX).sum() == len(encoder.tokenizer.encode("A cat.")) + 1
    sample = SourceSample("v", "vqa", (Turn("What is <video>?", "It."),), videos=("v",))
    for clip in CLIPS:
        encoded = encoder.encode(sample, [], [clip])
        assert unequal(own_pairs(encoder, sample, [], [clip], encoded)) == []
        num_frames = read_video_header(io.BytesIO(clip)).num_frames
        assert encoded.video_grid_thw[0, 0] == min(32, num_frames)


def test_checkpoints_that_do_not_fit(family: str, tmp_path: Path) -> None:
    tokenizer = gemma_tokenizer()
    tokenizer.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=r"has no chat template; copy chat_template.jinja"):
        build_sample_encoder(family, str(tmp_path / "base"))
    save_gemma_tokenizer(tmp_path, joins_digits=True)
    with pytest.raises(ValueError, match="joins digits with the text before them"):
        build_sample_encoder(family, str(tmp_path))

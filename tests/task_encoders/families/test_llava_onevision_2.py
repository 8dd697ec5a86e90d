"""LLaVA-OneVision-2: every patch and merge size against transformers' image processor, which the
project's processor calls; no video files; sizes of the checkpoint."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from task_encoders.families import build_sample_encoder
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.model_inputs import to_transformers_kwargs
from task_encoders.samples import IGNORE_INDEX, SampleError, SourceSample, Turn
from task_encoders.text.pieces import to_chat
from task_encoders.text.qwen_templates import QWEN2_VL_TEMPLATE
from task_encoders.text.qwen_vocabulary import QWEN3_TEXT_TOKENS
from tests.helpers.encoder_contract import opened, own_pairs, unequal
from tests.helpers.texts_and_images import KINDS, random_sample
from tests.helpers.tiny_checkpoints import packed_batch
from tests.helpers.tiny_tokenizers import save_with_template, tiny_tokenizer
from tests.helpers.videos import make_video

FAMILY = "llava_onevision_2"


@pytest.mark.parametrize(("patch_size", "merge_size"), [(14, 2), (14, 3), (16, 2), (16, 3)])
def test_fuzzed_conversations(patch_size: int, merge_size: int, tmp_path: Path) -> None:
    options = {"patch_size": patch_size, "merge_size": merge_size, "max_pixels": 90_000}
    encoder: Any = build_sample_encoder(FAMILY, resize="pil", **options)
    processor = builtin_processor(FAMILY, **options)
    end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    pad = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    rng, num_images = np.random.default_rng(patch_size + merge_size), 0
    for index in range(3 * len(KINDS)):
        sample, files = random_sample(rng, KINDS[index % len(KINDS)], index, tmp_path)
        text = processor.apply_chat_template(to_chat(sample), tokenize=False)
        images = [opened(data) for data in files] or None
        theirs = processor(text=[text], images=images, return_tensors="np")
        encoded = encoder.encode(sample, files)
        pairs = {
            "tokens": (encoded.tokens, theirs["input_ids"][0][:-1]),  # without the last newline
            "answers": ((encoded.labels == end).sum(), len(sample.turns)),
            "positions": (encoded.position_ids, np.arange(len(encoded.tokens))[None]),
            **own_pairs(encoder, sample, files, [], encoded),
        }
        if files:
            of_images = encoded.image_grid_thw.prod(1) // merge_size**2
            pairs["tokens of images"] = (of_images.sum(), (encoded.tokens == pad).sum())
            for name in ("image_grid_thw", "pixel_values"):
                pairs[name] = (getattr(encoded, name), theirs[name])
            places = [
                place for grid in encoded.image_grid_thw for place in in_blocks(grid, merge_size)
            ]
            inputs = to_transformers_kwargs(packed_batch([encoded]))
            pairs["patch positions"] = (inputs["patch_positions"], places)
            assert encoded.pixel_values.shape[1] == 3 * patch_size**2
        assert unequal(pairs) == []
        assert (encoded.labels != IGNORE_INDEX).any()
        num_images += len(files)
    assert num_images > 3 * len(KINDS)


def in_blocks(grid: Any, merge: int) -> Iterator[tuple[int, int, int]]:
    """(0, row, column) of each patch, in blocks of merge²."""
    rows, columns = (range(0, int(side), merge) for side in grid[1:])
    for row, column, y, x in itertools.product(rows, columns, range(merge), range(merge)):
        yield 0, row + y, column + x


def test_limits_are_those_of_merged_checkpoints() -> None:
    options = build_sample_encoder(FAMILY).fingerprint
    sizes = {"min_pixels": 3136, "max_pixels": 4_000_000, "patch_size": 14, "merge_size": 2}
    assert {name: options[name] for name in sizes} == sizes


def test_video_files_are_refused() -> None:
    encoder = build_sample_encoder(FAMILY)
    sample = SourceSample("v", "vqa", (Turn("What?", "A bar."),), videos=("a",))
    with pytest.raises(SampleError, match="bad_video: family llava_onevision_2 takes no videos"):
        encoder.encode(sample, [], [make_video(4)])


@pytest.mark.parametrize("model_type", ["llava_onevision2", "llava_onevision2_moe"])
def test_sizes_must_be_those_of_the_checkpoint(model_type: str, tmp_path: Path) -> None:
    save_with_template(tiny_tokenizer(QWEN3_TEXT_TOKENS), QWEN2_VL_TEMPLATE, tmp_path)
    vision = {"patch_size": 16, "spatial_merge_size": 3}
    config = {"model_type": model_type, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"patch_size 14, and 16 in .*; set model.patch_size=16"):
        build_sample_encoder(FAMILY, str(tmp_path))
    with pytest.raises(ValueError, match=r"merge_size 2, and 3 in .*; set model.merge_size=3"):
        build_sample_encoder(FAMILY, str(tmp_path), patch_size=16)
    encoder: Any = build_sample_encoder(FAMILY, str(tmp_path), patch_size=16, merge_size=3)
    assert encoder.image_medium(96, 144).grid == (1, 6, 9)

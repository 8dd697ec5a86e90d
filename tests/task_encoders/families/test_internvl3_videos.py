"""InternVL3's videos: frames, lengths and pixels equal those of transformers."""

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.internvl.processing_internvl import InternVLProcessor

from task_encoders.families import build_sample_encoder
from task_encoders.media.video_file import VideoHeader, decode_frames, read_video_header
from task_encoders.samples import SampleError, SourceSample, Turn
from task_encoders.text.load_tokenizer import checkpoint_tokenizer
from tests.helpers.tiny_families import INTERNVL, save_tokenizer
from tests.helpers.transformers_sources import needs_transformers, transformers_function
from tests.helpers.videos import odd_clips

#: FUZZED_SAMPLES=5000 takes some seconds.
SAMPLES = int(os.environ.get("FUZZED_SAMPLES", "120"))
OF_VIDEO = SourceSample("v", "captioning", (Turn("", "A."),), videos=("c",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("internvl")
    save_tokenizer("internvl3", folder)
    return folder


@pytest.mark.parametrize(
    ("num_frames", "longest"), [(8, 1_000_000), (1, 200_000), (13, 50_000), (64, 10_000)]
)
def test_frames_and_lengths(folder: Path, num_frames: int, longest: int) -> None:
    """Videos of as many frames or more; others are refused by both."""
    encoder: Any = build_sample_encoder("internvl3", str(folder), video_num_frames=num_frames)
    expected_length = len(video_ids(folder, num_frames)) + len(encoder.tokenizer.encode("A.")) + 1
    sample_frames = transformers_function("internvl", "sample_frames", "InternVLVideoProcessor")
    processor = SimpleNamespace(num_frames=num_frames, initial_shift=True)
    rng = np.random.default_rng(1)
    short = 0
    for _ in range(SAMPLES):
        total = int(np.exp(rng.uniform(0, np.log(longest))))
        height, width = (int(side) for side in rng.integers(1, 4000, 2))
        fps = float(rng.uniform(0.5, 120)) if rng.integers(2) else None
        header = VideoHeader(total, fps, height, width)
        metadata = SimpleNamespace(total_num_frames=total, fps=fps)
        try:
            measured = encoder.measure(OF_VIDEO, [], [header])
        except SampleError as error:
            assert error.reason == "bad_video"  # noqa: PT017
            with pytest.raises(ValueError, match="can't be sampled"):
                sample_frames(processor, metadata)
            short += 1
            continue
        assert encoder.sample_video(header).frames == sample_frames(processor, metadata).tolist()
        assert measured.grid_thw == ((num_frames, 32, 32),)
        assert measured.num_tokens == expected_length
    assert 0.6 * SAMPLES > short >= (num_frames > 1)


def video_ids(folder: Path, num_frames: int) -> list[int]:
    """Of the text that the processor writes in the place of <video>."""
    needs_transformers("5.15", "has no replace_video_token in its processor")
    start, end, image = INTERNVL
    tokens = {"start_image_token": start, "end_image_token": end, "image_token": image}
    processor = SimpleNamespace(**tokens, image_seq_length=256)
    inputs = {"pixel_values_videos": [np.zeros(num_frames)]}
    text = InternVLProcessor.replace_video_token(processor, inputs, 0)
    ids: list[int] = checkpoint_tokenizer(str(folder))(text)["input_ids"]
    return ids


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

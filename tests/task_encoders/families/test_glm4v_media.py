"""GLM-V's images and videos: grids, times, pixels and positions equal transformers', and what is
measured is what is encoded."""

import importlib.util
import io
import os
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from task_encoders.families import build_sample_encoder, model_options
from task_encoders.media.video_file import VideoHeader, decode_frames, read_video_header
from task_encoders.samples import SampleError, SourceSample, Turn
from tests.helpers.glm_reference import IMAGE, LIMITS, REFERENCES, Reference, differences
from tests.helpers.media_references import opened, real_pictures, wrong_files
from tests.helpers.texts_and_images import KINDS, random_sample, random_text
from tests.helpers.transformers_sources import transformers_function
from tests.helpers.videos import odd_clips

#: FUZZED_SAMPLES=20000 takes some minutes.
SAMPLES = int(os.environ.get("FUZZED_SAMPLES", "60"))


@pytest.fixture(scope="module", params=REFERENCES)
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(request.param, tmp_path_factory.mktemp(request.param))


def test_fuzzed_images(reference: Reference, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    for index in range(min(SAMPLES, 400)):
        sample, files = random_sample(rng, KINDS[index % len(KINDS)], index, tmp_path)
        assert differences(reference, sample, tmp_path, files, []) == []


def test_images_and_videos_in_one_conversation(reference: Reference, tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    for index in range(min(SAMPLES, 400) // 4):
        text = random_text(rng, 5)
        media = rng.permutation(["<image>", "<video>", "<video>"][: 1 + index % 3]).tolist()
        prompt = text + "".join(f"{medium}{random_text(rng, 3)}" for medium in media)
        chosen = rng.integers(0, len(odd_clips()), media.count("<video>"))
        clips = [odd_clips()[i] for i in chosen]
        images = [IMAGE] * media.count("<image>")
        names = tuple(f"{i}.jpg" for i in range(len(images)))
        (tmp_path / "0.jpg").write_bytes(IMAGE)
        turns = (Turn(prompt, "Yes.", thought="So."),)
        sample = SourceSample("v", "bmr", turns, names, videos=tuple("ab"[: len(clips)]))
        assert differences(reference, sample, tmp_path, images, clips) == []
        encoded = reference.encoder.encode(sample, images, clips)
        alone = [reference.encoder.encode(_of("image"), [data]).pixel_values for data in images]
        clip_rows = [reference.encoder.encode(_of("video"), [], [c]).pixel_values for c in clips]
        rows = {"<image>": iter(alone), "<video>": iter(clip_rows)}
        expected = np.concatenate([next(rows[medium]) for medium in media])
        np.testing.assert_array_equal(encoded.pixel_values, expected)


def _of(kind: str) -> SourceSample:
    return SourceSample("m", "bmr", (Turn("a", "b"),), **{f"{kind}s": ("c",)})


@pytest.mark.parametrize("clip", range(4))
def test_pictures_of_a_video_hold_what_transformers_cuts(reference: Reference, clip: int) -> None:
    """The steps of its torch backend, one after another."""
    torch_encoder: Any = build_sample_encoder(
        reference.family, reference.encoder.options.processor, resize="torch", **LIMITS
    )
    data = odd_clips()[clip]
    header = read_video_header(io.BytesIO(data))
    sampled = torch_encoder.sample_video(header)
    frames = [np.array(f) for f in decode_frames(data, header, sampled.frames, 10**6)]
    pixels = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    size = (sampled.grid[1] * 14, sampled.grid[2] * 14)
    resized = torch.nn.functional.interpolate(pixels, size, mode="bicubic", antialias=True)
    vision = torch_encoder.vision
    mean, std = (torch.tensor(x) * (1.0 / (1 / 255)) for x in (vision.mean, vision.std))
    values = (resized.float() - mean[:, None, None]) / std[:, None, None]
    patchify = transformers_function(reference.family, "patchify", reference.videos)
    expected, *grid = patchify(None, values[None], 14, 2, 2)
    encoded = torch_encoder.encode(_of("video"), [], [data])
    assert tuple(grid) == sampled.grid
    np.testing.assert_array_equal(encoded.pixel_values, expected[0].numpy())


def test_sizes_and_frames_are_those_of_transformers(reference: Reference) -> None:
    encoder: Any = build_sample_encoder(reference.family, reference.encoder.options.processor)
    options = encoder.options
    resize = transformers_function(reference.family, "smart_resize")
    sample_frames = transformers_function(reference.family, "sample_frames", reference.videos)
    processor = SimpleNamespace(fps=2, max_duration=300, temporal_patch_size=2)
    rng = np.random.default_rng(7)

    def size() -> tuple[int, int]:
        height, width = (int(np.exp(rng.uniform(0, np.log(5000)))) for _ in range(2))
        return height, width

    def expected_size(count: int, height: int, width: int, limits: Any) -> tuple[int, int] | None:
        try:
            resized = resize(count, height, width, 2, 28, *limits)
        except ValueError:
            return None
        return resized[0] // 14, resized[1] // 14

    counts: Counter[str] = Counter()
    for _ in range(50 * min(SAMPLES, 400)):
        height, width = size()
        expected = expected_size(2, height, width, (options.min_pixels, options.max_pixels))
        try:
            found = encoder.image_medium(height, width).grid[1:]
        except SampleError:
            found = None
            counts["narrow"] += 1
        assert found == expected, (height, width)
    limits = options.video_min_pixels, options.video_max_pixels
    for _ in range(12 * min(SAMPLES, 420)):
        fps = float(rng.choice([rng.uniform(0.2, 120), 23.976, 24, 25, 30, 60, 1]))
        total = max(1, min(int(np.exp(rng.uniform(-3, np.log(4000))) * fps), 50_000))
        height, width = size()
        metadata = SimpleNamespace(total_num_frames=total, fps=fps, duration=total / fps)
        frames = sample_frames(processor, metadata).tolist()
        try:
            sampled = encoder.sample_video(VideoHeader(total, fps, height, width))
        except SampleError as error:
            if error.reason == "bad_video":
                counts["no frame"] += 1
                assert frames == []
            else:
                assert expected_size(len(frames), height, width, limits) is None
            continue
        counts["odd"] += len(sampled.frames) % 2
        assert [*sampled.frames, *sampled.frames[len(sampled.frames) // 2 * 2 :]] == frames
        expected = expected_size(len(frames), height, width, limits)
        assert sampled.grid == (len(frames) // 2, *(expected or ()))
    assert counts["narrow"] > 100
    assert counts["odd"] > 100


def test_real_files(reference: Reference, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    root = request.config.getoption("--real-data")
    assert wrong_files(reference.encoder, root, tmp_path, partial(differences, reference)) == []


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs torchvision")
def test_torch_equals_transformers_itself(
    reference: Reference, request: pytest.FixtureRequest
) -> None:
    name = "Glm4vImageProcessor" if reference.family == "glm4v" else "Glm46VImageProcessor"
    limits = {"shortest_edge": LIMITS["min_pixels"], "longest_edge": LIMITS["max_pixels"]}
    processor = getattr(transformers, name)(size=limits)
    encoder: Any = build_sample_encoder(
        reference.family, reference.encoder.options.processor, resize="torch", **LIMITS
    )
    compared, pictures = 0, real_pictures(request.config.getoption("--real-data"))
    for data in pictures:
        try:
            encoded = encoder.encode(_of("image"), [data])
        except SampleError:
            continue
        expected = processor([opened(data)], return_tensors="np")
        np.testing.assert_array_equal(encoded.image_grid_thw, expected["image_grid_thw"])
        np.testing.assert_array_equal(encoded.pixel_values, expected["pixel_values"])
        compared += 1
    assert compared >= 0.9 * len(pictures)


@pytest.mark.parametrize("kind", ["", "video_"])
@pytest.mark.parametrize("limits", [(783, 784), (1000, 900)])
def test_limits_that_hold_no_token(kind: str, limits: tuple[int, int]) -> None:
    given = dict(zip((f"{kind}min_pixels", f"{kind}max_pixels"), limits, strict=True))
    with pytest.raises(ValueError, match=f"784 <= {kind}min_pixels <= {kind}max_pixels"):
        model_options(family="glm4v", **given)

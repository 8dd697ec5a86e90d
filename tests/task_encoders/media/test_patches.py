"""Patches of both backends: every value where it belongs, as transformers' own backend has it."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from task_encoders.families import build_sample_encoder, model_options
from task_encoders.media.image import VisionSettings, smart_resize
from task_encoders.media.patches import (
    BACKENDS,
    Bytes,
    frame_patches,
    interleaved_patches,
    normalisation,
)

FAMILIES = ("qwen2_vl", "qwen3_vl")


def grid_of(image: Image.Image, settings: VisionSettings) -> tuple[int, int, int]:
    height, width = smart_resize(image.height, image.width, settings)
    return 1, height // settings.patch_size, width // settings.patch_size


def image_patches(
    image: Image.Image, settings: VisionSettings
) -> tuple[Bytes, tuple[int, int, int]]:
    """Patches of an image as its family's encoder makes them, and their grid."""
    grid = grid_of(image, settings)
    return frame_patches([image], grid, 1, settings), grid


def smooth(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    coarse = rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)


def by_torch(image: Image.Image, grid: tuple[int, ...], vision: Any) -> Any:
    """The steps of transformers' torch backend, one after another."""
    _, h, w = grid
    patch, merge = vision.patch_size, vision.merge_size
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    size = (h * patch, w * patch)
    resized = torch.nn.functional.interpolate(pixels, size, mode="bicubic", antialias=True)
    mean, std = (torch.tensor(x) * (1.0 / (1 / 255)) for x in (vision.mean, vision.std))
    values = (resized.float() - mean[:, None, None]) / std[:, None, None]
    blocks = values.reshape(3, h // merge, merge, patch, w // merge, merge, patch)
    ordered = blocks.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    return ordered.expand(-1, -1, -1, -1, -1, 2, -1, -1).reshape(h * w, -1).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_resizes_as_transformers_torch_backend(family: str) -> None:
    rng = np.random.default_rng(0)
    vision = build_sample_encoder(family, resize="torch", max_pixels=200_000).vision  # type: ignore[attr-defined]
    for _ in range(20):
        width, height = (int(side) for side in rng.integers(20, 500, 2))
        image = smooth(rng, width, height)
        rows, grid = image_patches(image, vision)
        values = normalisation(vision).values(rows, 2)
        np.testing.assert_array_equal(values, by_torch(image, grid, vision))


@pytest.mark.parametrize("longest", [9, 60, 500])
def test_pillows_bytes(longest: int) -> None:
    """Enlarged, shrunk and squeezed, tall and wide, of noise and of black and white, whose sums
    leave the range of a byte."""
    rng = np.random.default_rng(longest)
    resize, _ = BACKENDS["pil"]
    for number in range(60):
        height, width, new_height, new_width = (int(n) for n in rng.integers(1, longest, 4))
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(pixels if number % 2 else (pixels > 127) * np.uint8(255))
        expected = np.asarray(image.resize((new_width, new_height), Image.Resampling.BICUBIC))
        resized = resize(image, new_height, new_width)
        np.testing.assert_array_equal(resized[..., :3], expected)


@pytest.mark.parametrize("resize", BACKENDS)
@pytest.mark.parametrize(("width", "height"), [(2500, 2000), (1200, 5000)])
def test_images_that_pillow_holds_in_blocks(resize: str, width: int, height: int) -> None:
    """Patches of 5 megapixels: their memory is not handed out."""
    vision = build_sample_encoder("qwen2_vl", resize=resize, max_pixels=200_000).vision  # type: ignore[attr-defined]
    image = smooth(np.random.default_rng(3), width, height)
    with pytest.raises(ValueError, match=r"not contiguous|in multiple array blocks"):
        pa.array(image)
    grid = grid_of(image, vision)
    rows = frame_patches([image], grid, 1, vision)
    size = grid[2] * 14, grid[1] * 14
    expected = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(expected, size[::-1], mode="bicubic", antialias=True)
    pixels = expected[0].permute(1, 2, 0).numpy()
    if resize == "pil":
        pixels = np.array(image.resize(size, Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(rows[0].reshape(3, 14, 14), pixels[:14, :14].transpose(2, 0, 1))


@pytest.mark.parametrize("resize", BACKENDS)
def test_lengths_do_not_depend_on_the_backend(resize: str) -> None:
    encoder: Any = build_sample_encoder("qwen2_vl", resize=resize)
    assert encoder.fingerprint == build_sample_encoder("qwen2_vl").fingerprint


@pytest.mark.parametrize("options", [{}, {"resize": "pil"}, {"resize": "torch"}])
@pytest.mark.parametrize(("family", "default"), [("qwen2_vl", "pil"), ("qwen3_vl", "torch")])
def test_the_backend_is_known_from_what_is_stored(
    family: str, default: str, options: dict[str, str]
) -> None:
    settings = model_options(**{"family": family, **options})
    assert settings.resize == options.get("resize", default)
    stored = settings.model_dump(mode="json")
    assert model_options(**stored) == settings
    assert stored["resize"] == settings.resize


@pytest.mark.parametrize("num_frames", [1, 2, 3, 4])
def test_the_last_frame_fills_its_step(num_frames: int) -> None:
    vision = build_sample_encoder("qwen2_vl").vision  # type: ignore[attr-defined]
    rng = np.random.default_rng(2)
    frames = [smooth(rng, 56, 56) for _ in range(num_frames)]
    grid = (-(-num_frames // 2), 4, 4)
    values = frame_patches(frames, grid, 2, vision).reshape(grid[0], 16, 3, 2, 196)
    for step in range(grid[0]):
        for within in range(2):
            frame = frames[min(step * 2 + within, num_frames - 1)]
            alone = frame_patches([frame], (1, 4, 4), 1, vision).reshape(16, 3, 196)
            np.testing.assert_array_equal(values[step, :, :, within], alone)


@pytest.mark.parametrize("resize", BACKENDS)
@pytest.mark.parametrize("side", [16, 48])
def test_channels_last(side: int, resize: str) -> None:
    """Each byte in its place, of all frames."""
    rng = np.random.default_rng(side)
    frames = [Image.fromarray(rng.integers(0, 256, (70, 90, 3), dtype=np.uint8)) for _ in range(2)]
    grid = (2, 3, 5)
    rows = interleaved_patches(frames, grid, side, resize)
    scale, _ = BACKENDS[resize]
    pixels = np.stack([scale(frame, 3 * side, 5 * side)[..., :3] for frame in frames])
    blocks = pixels.reshape(2, 3, side, 5, side, 3).swapaxes(2, 3)
    np.testing.assert_array_equal(rows, blocks.reshape(30, -1))

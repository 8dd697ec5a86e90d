"""Sizes of images, and frames and sizes of videos, of random sizes and lengths: as transformers
computes them, or refused as there."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as tiling
from transformers.models.pixtral import image_processing_pil_pixtral as pixtral
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from task_encoders.families import FAMILIES, build_sample_encoder
from task_encoders.media.video_file import VideoHeader
from task_encoders.samples import SampleError
from tests.helpers.encoder_contract import needs_transformers, transformers_function
from tests.world import World

#: FUZZED_SAMPLES=2000 takes some minutes.
SAMPLES = 10 * int(os.environ.get("FUZZED_SAMPLES", "30"))
Options = dict[str, Any]
#: Frames, and (steps, rows, columns) or None, of a length, a rate, a height and a width.
Rule = Callable[[int, float, int, int], tuple[list[int], Any]]


def resized(options: Any, count: int, height: int, width: int, kind: str = "") -> Any:
    """Rows and columns of so many frames by transformers, or None; `kind`: of the limits."""
    if options.family.startswith("gemma4"):
        tokens = getattr(options, f"{kind}max_soft_tokens")
        found = get_aspect_ratio_preserving_size(height, width, 16, tokens * 9, 3)
        side = 48 if options.family == "gemma4_unified" else 16
    else:
        side = 16 if options.family == "qwen3_vl" else 14
        resize = transformers_function(options.family, "smart_resize")
        least, most = (getattr(options, f"{kind}{end}_pixels") for end in ("min", "max"))
        counted, depth = ((), ()) if options.family == "qwen2_vl" else ((count,), (2,))
        if kind and (tokens := getattr(options, "video_max_tokens", None)):  # cap_pixels_per_frame
            most = max(min(most, int(tokens * 28**2 * 0.9) * 2 // count), int(least * 1.05))
        try:
            found = resize(*counted, height, width, *depth, 2 * side, least, most)
        except ValueError:
            return None
    return found[0] // side, found[1] // side


def image_grid(encoder: Any, height: int, width: int) -> Any:
    """(Steps or tiles, rows, columns) of an image by transformers, or None."""
    options = encoder.options
    if options.family == "internvl3":
        size = {"height": 448, "width": 448}
        least, most = options.min_tiles, options.max_tiles
        processor = tiling.GotOcr2ImageProcessorPil(
            size=size, min_patches=least, max_patches=most, crop_to_patches=True
        )
        return processor.get_number_of_image_patches(height, width), 32, 32
    if options.family == "mistral3":
        shape, edge = np.empty((height, width, 0)), options.longest_edge
        found = pixtral.get_resize_output_image_size(shape, edge, 28, "channels_last")
        return (1, found[0] // 14, found[1] // 14) if min(found) else None  # it makes no tokens
    grid = resized(options, 2, height, width)
    return grid and (1, *grid)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(("mistral3", {"longest_edge": edge}) for edge in (1540, 300)),
        *(("internvl3", {"min_tiles": a, "max_tiles": b}) for a, b in ((1, 12), (1, 1), (3, 6))),
        *(("gemma4", {"max_soft_tokens": budget}) for budget in (70, 1120)),
        ("gemma4_unified", {"max_soft_tokens": 70}),
        ("glm4v", {}),
        ("glm46v", {}),
        ("qwen2_vl", {}),
    ],
)
def test_images(family: str, options: Options, world: World) -> None:
    encoder: Any = build_sample_encoder(family, str(world.tokenizer(family)), **options)
    rng = np.random.default_rng(0)
    side = options.get("longest_edge", 448)
    sides = np.exp(rng.uniform(0, np.log(8000), (SAMPLES, 2))).astype(int)
    sides[::5] = side * rng.integers(1, 7, sides[::5].shape)  # ratios of several arrangements
    sides[1::5] = side + rng.integers(-2, 3, sides[1::5].shape)
    sides[:4] = [(2000, 10), (2001, 10), (10, 2000), (10, 2001)]  # where 200:1 is allowed
    refused = 0
    for height, width in sides.tolist():
        try:
            found = encoder.image_medium(height, width).grid
        except SampleError:
            found = None
        assert found == image_grid(encoder, height, width), (height, width)
        refused += found is None
    assert (refused > 0) == family.startswith(("mistral", "glm", "qwen"))
    assert refused < 0.3 * SAMPLES


def video_rule(encoder: Any) -> Rule:
    """What transformers takes and makes of a video; no frames where it refuses it."""
    options, name = encoder.options, encoder.options.family
    if name == "internvl3":
        count = options.video_num_frames
        take = transformers_function("internvl", "sample_frames", "InternVLVideoProcessor")
        processor = SimpleNamespace(num_frames=count, initial_shift=True)
    elif name.startswith("gemma4"):  # it refuses a video of fewer frames, taken whole here
        count, processor, take = 32, None, None
    else:
        kind = FAMILIES[name].transformers_name
        take = transformers_function(name, "sample_frames", f"{kind}VideoProcessor")
        names = ("min_frames", "max_frames", "fps")
        limits = {one: getattr(options, f"video_{one}", 2) for one in names}
        limits |= {"num_frames": None, "temporal_patch_size": 2, "max_duration": 300}
        processor = SimpleNamespace(**limits)

    def rule(total: int, fps: float, height: int, width: int) -> tuple[list[int], Any]:
        if take is None:
            metadata = VideoMetadata(total_num_frames=total, fps=fps)
            frames = default_sample_indices_fn(metadata, num_frames=min(count, total)).tolist()
        else:
            given = SimpleNamespace(total_num_frames=total, fps=fps, duration=total / fps)
            own = {"fps": processor.fps} if name.startswith("qwen") else {}
            try:  # Qwen2-VL's floats give some videos a number past the last frame
                frames = [one for one in take(processor, given, **own).tolist() if one < total]
            except ValueError:
                frames = []
        if name == "internvl3" or not frames:
            return frames, (len(frames), 32, 32)
        grid = resized(options, len(frames), height, width, "video_")
        steps = len(frames) if take is None else -(-len(frames) // 2)
        return frames, grid and (steps, *grid)

    return rule


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_vl", {"video_max_pixels": 4000 * 32**2}),
        ("qwen2_vl", {"video_max_tokens": 5000}),
        ("qwen2_vl", {"video_fps": 1.5, "video_max_frames": 32}),
        ("glm4v", {}),
        ("glm46v", {}),
        *(("gemma4", {"video_max_soft_tokens": budget}) for budget in (70, 560)),
        ("gemma4_unified", {"video_max_soft_tokens": 70}),
        *(("internvl3", {"video_num_frames": count}) for count in (1, 13)),
    ],
)
def test_videos(family: str, options: Options, world: World) -> None:
    if family == "qwen3_vl":
        needs_transformers("5.15", "refuses narrow videos")
    encoder: Any = build_sample_encoder(family, str(world.tokenizer(family)), **options)
    rng, rule, outcomes = np.random.default_rng(7), video_rule(encoder), set()
    for _ in range(SAMPLES):
        fps = float(rng.choice([rng.uniform(0.2, 120), 23.976, 24, 25, 30, 60, 1]))
        total = 2 + int(np.exp(rng.uniform(-2, np.log(20_000))))
        height, width = (int(np.exp(rng.uniform(0, np.log(5000)))) for _ in range(2))
        expected = rule(total, fps, height, width)
        try:
            found = encoder.sample_video(VideoHeader(total, fps, height, width))
        except SampleError as error:
            outcomes.add(error.reason)
            narrow = max(height, width) > 190 * min(height, width)
            assert narrow or not all(expected), (total, fps, height, width)
            continue
        frames = list(found.frames)
        if family.startswith("glm") and len(frames) % 2:
            outcomes.add("odd")
            frames.append(frames[-1])
        # Qwen2-VL's floats give neighbours of some frames in long videos.
        near, case = int(family == "qwen2_vl" and total > 10_000), (total, fps, height, width)
        np.testing.assert_allclose(frames, expected[0], rtol=0, atol=near, err_msg=str(case))
        assert found.grid == expected[1], case
    seen = {"qwen3_vl": {"aspect_ratio"}, "glm4v": {"odd"}, "internvl3": set()}
    assert outcomes >= seen.get(family, set())

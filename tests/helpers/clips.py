"""Frames and sizes of one video by options of its own, from functions of transformers and the rule
of qwen_vl_utils 0.0.14; and options drawn at random."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from task_encoders.media.video_file import VideoHeader
from task_encoders.samples.medium_options import MediumOptions
from tests.helpers.encoder_contract import transformers_function


def frame_range(given: dict[str, Any], total: int, fps: float) -> tuple[int, int] | None:
    """`calculate_video_frame_range`; None where it raises."""
    start, end = given.get("video_start"), given.get("video_end")
    if start is None and end is None:
        return 0, total - 1
    first, last = 0, total - 1
    if start is not None:
        first = math.ceil(max(0.0, min(start, total / fps)) * fps)
    if end is not None:
        last = min(math.floor(max(0.0, min(end, total / fps)) * fps), total - 1)
    return None if first >= last else (first, last)


def clip_of(encoder: Any, header: VideoHeader, asked: MediumOptions) -> Any:
    """Frames and grid of a video, as a family's processor has them where `asked` takes the place of
    its own settings; None: the sample is set aside."""
    own, given = encoder.options, asked.given
    is_qwen3 = own.family in ("qwen3_vl", "qwen3_5")
    name, side = ("qwen3_vl", 16) if is_qwen3 else ("qwen2_vl", 14)
    kind = "Qwen3VLVideoProcessor" if is_qwen3 else "Qwen2VLVideoProcessor"
    take = transformers_function(name, "sample_frames", kind)
    resize = transformers_function(name, "smart_resize")
    assert header.fps is not None
    found = frame_range(given, header.num_frames, header.fps)
    if found is None or header.num_frames < 2:
        return None
    first, total = found[0], found[1] - found[0] + 1
    if asked.nframes is not None:
        count = round(asked.nframes / 2) * 2
        if not 2 <= count <= total:
            return None
        numbers = (
            np.linspace(0, total - 1, count) if is_qwen3 else np.arange(count) * total // count
        )
    else:
        settings = SimpleNamespace(
            num_frames=None,
            temporal_patch_size=2,
            fps=given.get("fps", own.video_fps),
            min_frames=given.get("min_frames", own.video_min_frames),
            max_frames=given.get("max_frames", own.video_max_frames),
        )
        metadata = SimpleNamespace(total_num_frames=total, fps=header.fps)
        numbers = np.asarray(take(settings, metadata, fps=settings.fps))
        # Its floats give some videos a number past the last frame; ours are computed in integers.
        numbers = numbers[numbers < total]
        if is_qwen3:
            numbers = np.linspace(0, total - 1, len(numbers))
        else:
            numbers = np.arange(len(numbers)) * total // len(numbers)
    frames = (first + numbers).round().astype(int).tolist()
    volume = max(len(frames), 2) if is_qwen3 else 1
    least, most = (
        given.get(f"{end}_pixels", getattr(own, f"video_{end}_pixels") / volume) * volume
        for end in ("min", "max")
    )
    if least > most:
        return None
    counted = (volume,) if is_qwen3 else ()
    depth = {"temporal_factor": 2} if is_qwen3 else {}
    limits = {"factor": 2 * side, "min_pixels": least, "max_pixels": most, **depth}
    height, width = resize(*counted, header.height, header.width, **limits)
    return frames, (-(-len(frames) // 2), height // side, width // side)


def draw_options(rng: np.random.Generator, seconds: float, side: int) -> MediumOptions:
    """Options of a video, some of which cannot be."""
    found: dict[str, Any] = {}
    if rng.random() < 0.6:
        start, end = np.sort(rng.uniform(-0.2, 1.3, 2) * seconds)
        found |= {"video_start": float(start)} if rng.random() < 0.8 else {}
        found |= {"video_end": float(end)} if rng.random() < 0.8 else {}
    kind = rng.integers(4)
    if kind == 0:
        found["fps"] = float(rng.choice([0.5, 1, 3, 7.5]))
    elif kind == 1:
        found["nframes"] = int(rng.integers(1, 14))
    else:
        found |= {"min_frames": int(rng.integers(2, 6))} if kind == 2 else {}
        found |= {"max_frames": int(rng.integers(6, 12))} if rng.random() < 0.5 else {}
    least, most = np.sort(rng.integers(1, 40, 2)) * side**2
    found |= {"min_pixels": int(least)} if rng.random() < 0.4 else {}
    found |= {"max_pixels": int(most)} if rng.random() < 0.4 else {}
    return MediumOptions(**found)

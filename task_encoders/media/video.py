"""Videos: which frames are taken, and how large they are."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from task_encoders.media.image import VisionSettings, smart_resize
from task_encoders.media.video_file import VideoHeader


class SampledVideo(NamedTuple):
    """The frames that are taken from a video."""

    grid: tuple[int, int, int]  #: (t, h, w) in patches
    frames: Sequence[int]  #: their numbers, ascending
    seconds_per_step: float  #: seconds of video in one step of t, in float32
    fps: float | None  #: frames per second in the file


def sampled_frames(num_frames: int, num_sampled: int) -> list[int]:
    """Return the numbers of frames that are spread evenly: (10, 4) -> [0, 2, 5, 7].

    Computed in integers. In transformers' floating point, i·(num_frames / num_sampled) gives some
    videos one number too many, past the last frame (49 frames, 22 taken), and very long ones a
    neighbouring frame.
    """
    return [i * num_frames // num_sampled for i in range(num_sampled)]


def seconds_per_grid(header: VideoHeader, num_sampled: int, temporal_patch_size: int) -> float:
    """Return the seconds of video in a step of the grid, in float32 as transformers' processor."""
    if header.fps is None:
        return 1.0  # one frame: there is no second step
    sampled_fps = num_sampled / header.num_frames * header.fps
    return float(np.float32(temporal_patch_size / sampled_fps))


def volume_resize(
    num_frames: int, height: int, width: int, settings: VisionSettings, limits: tuple[int, int]
) -> tuple[int, int]:
    """Return the height and width that all frames are resized to, with the pixels of all of them
    together within `limits`: the rule of Qwen3-VL's videos, and of GLM-V's images and videos.

    Raises:
        SampleError: aspect ratio above the limit.
    """
    factor, depth = settings.factor, settings.temporal_patch_size
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    num_counted = round(num_frames / depth) * depth
    return smart_resize(height, width, settings, limits, num_frames, num_counted)

"""Videos: which frames are taken, and their patches for the vision tower.

header ──▶ which frames, by the rule of a family ──▶ grid
bytes  ──▶ those frames, decoded in order ──▶ patches, by the same code as for images

Both stages ask `video_file.read_video_header`, so that they agree on every grid.
"""

import math
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import NamedTuple

import numpy as np

from task_encoders.media import patches
from task_encoders.media.image import VisionSettings
from task_encoders.media.patches import Bytes
from task_encoders.media.video_file import (
    MAX_VIDEO_FRAMES,
    VideoHeader,
    decode_frames,
    read_video_header,
)
from task_encoders.samples import SampleError


class SampledVideo(NamedTuple):
    """The frames that are taken from a video."""

    grid: tuple[int, int, int]  #: (t, h, w) in patches
    frames: Sequence[int]  #: their numbers, ascending
    seconds_per_step: float  #: seconds of video in one step of t, in float32
    fps: float | None  #: frames per second in the file


def sampled_frames(num_frames: int, num_sampled: int) -> list[int]:
    """Numbers of the frames that are taken, spread evenly: (10, 4) -> [0, 2, 5, 7].

    Computed in integers. In transformers' floating point, i·(num_frames / num_sampled) gives some
    videos one number too many, past the last frame (49 frames, 22 taken), and very long ones a
    neighbouring frame.
    """
    return [i * num_frames // num_sampled for i in range(num_sampled)]


def frame_range(header: VideoHeader, start: float | None, end: float | None) -> tuple[int, int]:
    """Return the first and the last frame between two times in seconds, as qwen_vl_utils 0.0.14
    counts them (`calculate_video_frame_range`); None: from the beginning, to the end.

    Raises:
        SampleError: there are no two frames between them.
    """
    total = header.num_frames
    if start is None and end is None:
        return 0, total - 1
    if header.fps is None:
        raise SampleError("bad_video", f"a clip of {total} frames without a frame rate")
    seconds = total / header.fps
    begin, stop = (max(0.0, min(at or 0.0, seconds)) * header.fps for at in (start, end))
    first = math.ceil(begin)
    last = total - 1 if end is None else min(math.floor(stop), total - 1)
    if first >= last:
        raise SampleError(
            "bad_record",
            f"option video_start {start} and video_end {end} of a video of {seconds:g} seconds: "
            f"no two frames from {first} to {last}",
        )
    return first, last


def seconds_per_grid(header: VideoHeader, num_sampled: int, temporal_patch_size: int) -> float:
    """Seconds of video in a step of the grid (float32, as transformers' processor computes it)."""
    if header.fps is None:
        return 1.0  # one frame: there is no second step
    sampled_fps = num_sampled / header.num_frames * header.fps
    return float(np.float32(temporal_patch_size / sampled_fps))


def volume_resize(
    num_frames: int, height: int, width: int, settings: VisionSettings, limits: tuple[int, int]
) -> tuple[int, int]:
    """Height and width that all frames are resized to, with the pixels of all of them together
    within `limits`: the rule of Qwen3-VL's videos, and of GLM-V's images and videos.

    Raises:
        SampleError: aspect ratio above the limit.
    """
    factor = settings.factor
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > settings.max_aspect_ratio * min(height, width):
        limit = settings.max_aspect_ratio
        raise SampleError("aspect_ratio", f"{width}x{height} is longer than {limit:g}:1")
    least, most = limits
    depth = settings.temporal_patch_size
    rows, columns = round(height / factor), round(width / factor)
    volume = round(num_frames / depth) * depth * rows * columns * factor**2
    if volume > most:
        shrink = math.sqrt((num_frames * height * width) / most)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif volume < least:
        grow = math.sqrt(least / (num_frames * height * width))
        rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows * factor, columns * factor


def video_patches(
    data: bytes,
    sample: Callable[[VideoHeader], SampledVideo],
    vision_settings: VisionSettings,
    max_frames: int = MAX_VIDEO_FRAMES,
) -> tuple[Bytes, SampledVideo]:
    """A video file as patches.

    Args:
        sample: which frames are taken.
        max_frames: a video with more frames in its file is refused.

    Returns:
        bytes (t·h·w, C·T·p·p), and the frames they come from.

    Raises:
        SampleError: as read_video_header and `sample`; truncated_video where fewer frames can be
            decoded than the container has.
    """
    limit = vision_settings.max_image_pixels
    header = read_video_header(BytesIO(data), max_frame_pixels=limit, max_frames=max_frames)
    sampled = sample(header)
    frames = decode_frames(data, header, sampled.frames, limit)
    depth = vision_settings.temporal_patch_size
    return patches.frame_patches(frames, sampled.grid, depth, vision_settings), sampled

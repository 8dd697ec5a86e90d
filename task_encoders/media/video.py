"""Videos: which frames are taken, and their patches for the vision tower.

header ──▶ which frames (2 a second, as transformers' Qwen2VLVideoProcessor samples) ──▶ grid
bytes  ──▶ those frames, decoded in order ──▶ patches, by the code that makes those of images

Both stages ask `video_file.read_video_header`, so that they agree on every grid.
"""

import dataclasses
import math
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import numpy.typing as npt

from task_encoders.media import image
from task_encoders.media.image import VisionSettings
from task_encoders.media.video_file import (
    MAX_VIDEO_FRAMES,
    VideoHeader,
    decode_frames,
    read_video_header,
)
from task_encoders.samples import SampleError


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """Which frames of a video are taken, and how large they may become.

    Defaults are those of transformers' `Qwen2VLVideoProcessor`, with `fps` 2 as the published
    checkpoints were trained.
    """

    #: frames taken per second
    fps: float = 2.0
    #: frames taken of a shorter or longer video, as far as it has them
    min_frames: int = 4
    max_frames: int = 768
    #: limits of a frame after resizing
    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28
    #: with a number, the frames of a video share 0.9 times that many tokens' pixels (transformers'
    #: `cap_pixels_per_frame` and `max_video_tokens`)
    max_tokens: int | None = None
    #: a video with more frames in its file is refused
    max_file_frames: int = MAX_VIDEO_FRAMES

    def __post_init__(self) -> None:
        if not self.fps > 0 or not math.isfinite(self.fps):
            raise ValueError(f"video_fps {self.fps} must be above 0")
        for name in ("frames", "pixels"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if not 2 <= least <= most:
                raise ValueError(
                    f"video_min_{name} {least} and video_max_{name} {most} must satisfy "
                    "2 <= min <= max"
                )


@dataclass(frozen=True, slots=True)
class _FrameLimits:
    """Limits for `smart_resize`."""

    factor: int
    min_pixels: int
    max_pixels: int
    max_aspect_ratio: float


def num_sampled_frames(header: VideoHeader, settings: VideoSettings, multiple: int = 2) -> int:
    """How many frames are taken, as transformers' `sample_frames` counts them.

    A multiple of `multiple`, except of a video with fewer frames than that, which transformers
    refuses: all are taken then.

    Raises:
        SampleError: bad_video where the rate is unknown.
    """
    total = header.num_frames
    if total < multiple:
        return total
    if header.fps is None:
        raise SampleError("bad_video", f"{total} frames without a frame rate")
    most = min(settings.max_frames, total) // multiple * multiple
    wanted = min(max(total / header.fps * settings.fps, settings.min_frames), most, total)
    return math.floor(wanted / multiple) * multiple


def sampled_frames(num_frames: int, num_sampled: int) -> list[int]:
    """Numbers of the frames that are taken, spread evenly: (10, 4) -> [0, 2, 5, 7].

    In whole numbers. transformers computes i·(num_frames / num_sampled) in floating point, where
    some videos get one number more than frames are taken, behind the last frame (49 frames, 22
    taken), and very long ones a neighbouring frame.
    """
    return [i * num_frames // num_sampled for i in range(num_sampled)]


def seconds_per_grid(header: VideoHeader, num_sampled: int, temporal_patch_size: int) -> float:
    """Seconds of video in one step of the grid, in float32 as transformers' processor gives it."""
    if header.fps is None:
        return 1.0  # one frame: there is no second step
    sampled_fps = num_sampled / header.num_frames * header.fps
    return float(np.float32(temporal_patch_size / sampled_fps))


def video_grid(
    header: VideoHeader, settings: VideoSettings, vision_settings: VisionSettings
) -> tuple[int, int, int]:
    """(t, h, w) in patches of a video; its tokens are t·h·w / merge_size².

    Raises:
        SampleError: bad_video, or aspect_ratio.
    """
    depth = vision_settings.temporal_patch_size
    num_sampled = num_sampled_frames(header, settings, depth)
    limits = _FrameLimits(
        vision_settings.factor,
        settings.min_pixels,
        settings.max_pixels,
        vision_settings.max_aspect_ratio,
    )
    if settings.max_tokens is not None:
        budget = int(settings.max_tokens * limits.factor**2 * 0.9)
        share = max(
            min(settings.max_pixels, budget * depth // num_sampled), int(settings.min_pixels * 1.05)
        )
        limits = dataclasses.replace(limits, max_pixels=share)
    height, width = image.smart_resize(header.height, header.width, limits)
    patch = vision_settings.patch_size
    return -(-num_sampled // depth), height // patch, width // patch


def video_patches(
    data: bytes, settings: VideoSettings, vision_settings: VisionSettings
) -> tuple[npt.NDArray[np.float32], tuple[int, int, int], float]:
    """A video file as normalised patches, the counterpart of `image.image_patches`.

    Returns:
        pixel_values (t·h·w, C·T·p·p), the grid (t, h, w), and the seconds in one step of t.

    Raises:
        SampleError: as read_video_header and video_grid; truncated_video where fewer frames can be
            decoded than the container has.
    """
    header = read_video_header(
        BytesIO(data),
        max_frame_pixels=vision_settings.max_image_pixels,
        max_frames=settings.max_file_frames,
    )
    grid = video_grid(header, settings, vision_settings)
    depth = vision_settings.temporal_patch_size
    num_sampled = num_sampled_frames(header, settings, depth)
    numbers = sampled_frames(header.num_frames, num_sampled)
    frames = decode_frames(data, header, numbers, vision_settings.max_image_pixels)
    pixel_values = image.frame_patches(frames, grid, vision_settings)
    return pixel_values, grid, seconds_per_grid(header, num_sampled, depth)

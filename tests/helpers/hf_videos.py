"""transformers' whole processors, whose video part needs torchvision, as packs were measured."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
from transformers import (
    AutoTokenizer,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata


def save_processor(folder: Path, tokenizer: Any, template: str, **limits: int) -> None:
    """A checkpoint's whole processor: with torchvision it can be built."""
    images = Qwen2VLImageProcessorPil(**limits)
    videos = Qwen2VLVideoProcessor()
    Qwen2VLProcessor(images, tokenizer, videos, chat_template=template).save_pretrained(folder)


def with_processor(checkpoint: Path, **limits: int) -> Path:
    """The checkpoint, to which the whole processor of its tokenizer is added."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    save_processor(checkpoint, tokenizer, tokenizer.chat_template, **limits)
    return checkpoint


def video_files(videos: Sequence[bytes], folder: Path) -> list[str]:
    """Paths of videos, for readers that take no bytes."""
    paths = [folder / str(number) for number in range(len(videos))]
    for path, data in zip(paths, videos, strict=True):
        path.write_bytes(data)
    return [str(path) for path in paths]


def decoded_video(path: str) -> tuple[np.ndarray, float]:
    """Frames (T, H, W, 3), upright, and their rate."""
    with av.open(path) as file:
        rate = file.streams.video[0].average_rate
        assert rate is not None
        frames = [
            np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
            for frame in file.decode(video=0)
        ]
    return np.stack(frames), float(rate)


class _FromPyAV:
    """Decodes with PyAV: the default needs FFmpeg's libraries; transformers' own reader for PyAV
    neither turns videos upright nor finds frames in WebM."""

    def fetch_videos(self, videos: Any, sample_indices_fn: Callable[..., Any]) -> Any:
        if isinstance(videos, list):
            return list(
                zip(*[self.fetch_videos(v, sample_indices_fn) for v in videos], strict=True)
            )
        frames, rate = decoded_video(videos)
        metadata = VideoMetadata(len(frames), fps=rate)
        metadata.frames_indices = sample_indices_fn(metadata=metadata)
        return frames[metadata.frames_indices], metadata


class _Qwen2VLVideos(_FromPyAV, Qwen2VLVideoProcessor):
    pass


class _Qwen3VLVideos(_FromPyAV, Qwen3VLVideoProcessor):
    pass


_CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen2_vl": (Qwen2VLProcessor, _Qwen2VLVideos),
    "qwen2_5_vl": (Qwen2_5_VLProcessor, _Qwen2VLVideos),
    "qwen3_vl": (Qwen3VLProcessor, _Qwen3VLVideos),
}


def processor_of(family: str, encoder: Any, tokenizer: Any) -> Any:
    """A family's processor with the sizes and frames of an encoder that resizes with torch."""
    assert encoder.vision.resize == "torch"
    processor, videos = _CLASSES[family]
    shared = {
        "patch_size": encoder.vision.patch_size,
        "image_mean": list(encoder.vision.mean),
        "image_std": list(encoder.vision.std),
    }
    image_size, video_size = (
        {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
        for limits in (encoder.vision, encoder.video)
    )
    frames = {"min_frames": encoder.video.min_frames, "max_frames": encoder.video.max_frames}
    return processor(
        Qwen2VLImageProcessor(size=image_size, **shared),
        tokenizer,
        videos(size=video_size, fps=encoder.video.fps, do_sample_frames=True, **frames, **shared),
        chat_template=tokenizer.chat_template,
    )

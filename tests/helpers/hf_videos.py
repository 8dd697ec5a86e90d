"""transformers' whole processors, whose video part needs torchvision, as packs were measured."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import transformers
from transformers import AutoConfig, AutoTokenizer, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.video_utils import VideoMetadata


def save_processor(
    folder: Path, tokenizer: Any, template: str, model_type: str = "qwen2_vl", **limits: int
) -> None:
    """A checkpoint's whole processor: with torchvision it can be built."""
    if model_type.startswith("qwen3"):
        half = [0.5] * 3
        images = Qwen2VLImageProcessorPil(patch_size=16, image_mean=half, image_std=half, **limits)
        kind, videos = transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor()
    else:
        images = Qwen2VLImageProcessorPil(**limits)
        kind, videos = Qwen2VLProcessor, transformers.Qwen2VLVideoProcessor()
    kind(images, tokenizer, videos, chat_template=template).save_pretrained(folder)


def with_processor(checkpoint: Path, **limits: int) -> Path:
    """The checkpoint, to which the whole processor of its tokenizer is added."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model_type = AutoConfig.from_pretrained(checkpoint).model_type
    save_processor(checkpoint, tokenizer, tokenizer.chat_template, model_type, **limits)
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
        with av.open(videos) as file:
            stream = file.streams.video[0]
            assert stream.average_rate is not None
            total = sum(1 for _ in file.decode(stream))
            metadata = VideoMetadata(
                total, fps=float(stream.average_rate), duration=float(total / stream.average_rate)
            )
        metadata.frames_indices = sample_indices_fn(metadata=metadata)
        numbers = [int(number) for number in metadata.frames_indices]
        if max(numbers) >= total:
            raise IndexError(f"frame {max(numbers)} of {total}")  # as an array of all would
        return some_frames(videos, numbers), metadata


def some_frames(path: str, numbers: Sequence[int]) -> np.ndarray:
    """Frames of these numbers (T, H, W, 3), upright; one may be named several times."""
    found: dict[int, np.ndarray] = {}
    with av.open(path) as file:
        for number, frame in enumerate(file.decode(video=0)):
            if number in numbers:
                found[number] = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
    return np.stack([found[number] for number in numbers])


def processor_of(family: str, encoder: Any, tokenizer: Any) -> Any:
    """The processor of one of Qwen's families with the sizes and frames of an encoder that resizes
    with torch."""
    assert encoder.options.resize == "torch"
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    of_videos = "Qwen3VL" if family == "qwen3_vl" else "Qwen2VL"
    reading: Any = type(
        "Reading", (_FromPyAV, getattr(transformers, f"{of_videos}VideoProcessor")), {}
    )
    shared = {
        "patch_size": encoder.vision.patch_size,
        "image_mean": list(encoder.vision.mean),
        "image_std": list(encoder.vision.std),
    }
    own = encoder.options.model_dump()
    image_size, video_size = (
        {"shortest_edge": own[f"{kind}min_pixels"], "longest_edge": own[f"{kind}max_pixels"]}
        for kind in ("", "video_")
    )
    frames = {f"{end}_frames": own[f"video_{end}_frames"] for end in ("min", "max")}
    options = {"size": video_size, "fps": own["video_fps"], **frames, **shared}
    return getattr(transformers, f"{name}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(size=image_size, **shared),
        tokenizer=tokenizer,
        video_processor=reading(do_sample_frames=True, **options),
        chat_template=tokenizer.chat_template,
    )

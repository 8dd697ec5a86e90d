"""Small videos, drawn and encoded with PyAV, samples with them, and the boxes of an MP4, to damage
it by."""

import io
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from tests.helpers.datasets import WORDS, dialogue, image_bytes, packed_run, write_json

os.environ.setdefault("SVT_LOG", "1")  # the AV1 encoder would print its settings

#: Encoder per container; all are in PyAV's wheels.
CODECS = {"mp4": "libx264", "mov": "mpeg4", "webm": "libvpx-vp9", "matroska": "libx264"}
CODECS |= {"avi": "mpeg4"}


def draw_frame(number: int, width: int, height: int) -> np.ndarray:
    """(height, width, 3) uint8: a gradient with a bar that moves, so that frames can be told."""
    rows, columns = np.indices((height, width))
    frame = np.stack([rows * 255 // height, columns * 255 // width, rows * 0 + 60], axis=-1)
    bar = number * 8 % width
    frame[:, bar : bar + 8] = [255, 255, number * 5 % 256]
    return frame.astype(np.uint8)


def make_video(
    num_frames: int = 12,
    fps: int | Fraction = 10,
    width: int = 64,
    height: int = 48,
    *,
    container: str = "mp4",
    codec: str | None = None,
    rotation: int = 0,
    times: Sequence[int] | None = None,
    container_options: dict[str, str] | None = None,
    codec_options: dict[str, str] | None = None,
    tint: int = 0,
) -> bytes:
    """A video file.

    Args:
        rotation: degrees clockwise by which players are to turn it.
        times: of each frame in thousandths of a second, for a variable rate.
        tint: 0 to 255, flips bits of all colours.
    """
    with (
        tempfile.NamedTemporaryFile() as file,  # putting the index in front reads the file again
        av.open(file.name, "w", format=container, options=container_options or {}) as out,
    ):
        stream = out.add_stream(
            codec or CODECS[container], rate=fps, options=codec_options or {"threads": "1"}
        )
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if rotation:
            stream.set_display_rotation(-rotation)
        for i in range(num_frames):
            pixels = draw_frame(i, width, height) ^ np.uint8(tint)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[i], Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
        out.close()
        return Path(file.name).read_bytes()


@cache
def odd_clips() -> tuple[bytes, ...]:
    """Four for limits of frames and sizes: short, wide, one frame a second, upright in WebM."""
    return (
        make_video(7, 10),
        make_video(31, 10, 96, 40),
        make_video(12, 1),
        make_video(47, 24, 40, 64, container="webm"),
    )


def video_pairs(root: Path, count: int = 12) -> Path:
    """Dialogues: of videos, of images and videos, of images, and of text."""
    root.mkdir(parents=True)
    for i in range(count):
        text = dialogue(f"What happens in number {i}?", f"A bar moves {i} steps to the right.")
        record: dict[str, Any] = {"messages": text}
        stem = f"{i:04d}" if i % 4 < 3 else f"output_{i:08d}"
        if i % 4 == 0:  # a video of the record's name
            kind = ("mp4", "webm", "avi")[i // 4 % 3]
            (root / f"{stem}.{kind}").write_bytes(make_video(5 + 8 * i, container=kind))
        elif i % 4 == 1:
            record["images"], record["videos"] = [f"{i}_a.jpg"], [f"{i}_b.mp4", f"{i}_c.mov"]
            text[0]["content"] = "<video> or <image>? <video>"
            (root / f"{i}_a.jpg").write_bytes(image_bytes(70, 56))
            (root / f"{i}_b.mp4").write_bytes(make_video(4, width=80))
            (root / f"{i}_c.mov").write_bytes(make_video(3 + i, container="mov", rotation=90))
        elif i % 4 == 2:
            (root / f"{stem}.jpg").write_bytes(image_bytes(56, 28 * (i % 5 + 2)))
        write_json(root / f"{stem}.json", record)
    return root


def short_dialogues(root: Path, count: int, *, videos: bool = False) -> Path:
    """Dialogues of few words, so that packs hold several, with no picture, one, or two, each of
    colours of its own, or with a video."""
    root.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i in range(count):
        texts = [" ".join(rng.choice(WORDS, rng.integers(1, 8))) for _ in range(2 + 2 * (i % 3))]
        names = [f"{i}_{j}.png" for j in range(i % 3)]
        record: dict[str, Any] = {"images": names}
        for name in names:
            colours = rng.integers(0, 256, (3, 2 + i % 5, 3), np.uint8)
            picture = Image.fromarray(colours).resize((28 * (2 + i % 5), 84), Image.Resampling.BOX)
            picture.save(root / name)
        if videos and i % 4 == 3:
            record["videos"] = [f"{i}.mp4"]
            (root / f"{i}.mp4").write_bytes(make_video(4 + i % 9, tint=int(rng.integers(256))))
        texts[0] = "<video>\n" * len(record.get("videos", ())) + "<image>\n" * len(names) + texts[0]
        has_media = names or "videos" in record
        stem = f"sample{i}" if has_media else f"output_{i:08d}"
        write_json(root / f"{stem}.json", {"messages": dialogue(*texts), **record})
    return root


def make_audio(container: str = "mp4") -> bytes:
    """A file that holds sound only."""
    buffer = io.BytesIO()
    codec = {"mp4": "aac", "webm": "libopus"}[container]
    with av.open(buffer, "w", format=container) as out:
        stream = out.add_stream(codec, rate=48000)
        for i in range(20):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 960), np.float32), "fltp", "mono")
            frame.sample_rate, frame.pts = 48000, i * 960
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return buffer.getvalue()


def boxes(data: bytes, begin: int = 0, end: int | None = None) -> Iterator[tuple[bytes, int, int]]:
    """(kind, offset, size) of every box of an MP4 file, those inside others too."""
    end = len(data) if end is None else end
    while begin + 8 <= end:
        size, kind = struct.unpack_from(">I4s", data, begin)
        yield kind, begin, size
        if kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts"):
            yield from boxes(data, begin + 8, begin + size)
        begin += max(size, 8)


def patched(data: bytes, kind: bytes, offset: int, value: bytes) -> bytes:
    """The file with some bytes of its first box of a kind replaced; offset 0 is its size field."""
    at = next(begin for name, begin, _ in boxes(data) if name == kind) + offset
    return data[:at] + value + data[at + len(value) :]


#: Limits of pixels that shrink some of the images and frames, and enlarge others. Not resized by
#: Pillow: transformers has one way for videos, which is of torch.
VIDEO_MODEL: dict[str, Any] = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 12, "resize": "torch"}
VIDEO_MODEL |= {"video_min_pixels": 56 * 56, "video_max_pixels": 28 * 28 * 12}
#: Arguments for clips of 4, 4, 8 and 18 sampled frames.
CLIPS: dict[str, tuple[int, int, int, int]] = {
    "short": (7, 10, 96, 64),
    "slow": (12, 3, 84, 140),
    "other": (43, 10, 40, 64),
    "long": (92, 10, 56, 84),
}
#: Media of each sample: clips by name, and images by width.
_CLIP_MEDIA: tuple[tuple[str | int, ...], ...] = (
    *(("short",), (), ("slow",), (84,), ("other", 112)),
    *(("short", "slow"), (56, 84), ("long",)),
)


def video_packs(task: str, root: Path, **model: Any) -> Path:
    """Packs of a task: samples of a video, of several, of images, of both, and of text alone."""
    (root / "source").mkdir(parents=True, exist_ok=True)
    for i, media in enumerate(_CLIP_MEDIA * 2):
        if task == "captioning" and not media:
            continue
        texts = ["What moves?", f"A bar, {i} times.", "Where to?", "To the right."]
        record: dict[str, Any] = {"messages": dialogue(*texts[: 2 if task == "vqa" else 4])}
        if task == "captioning":
            record = {"captions": [{"content": f"A bar moves {i} times."}]}
        record |= {"images": [], "videos": []}
        for medium in media:
            kind = "videos" if isinstance(medium, str) else "images"
            data = (
                make_video(*CLIPS[medium]) if isinstance(medium, str) else image_bytes(medium, 60)
            )
            record[kind].append(f"{i}_{medium}.{'mp4' if kind == 'videos' else 'jpg'}")
            (root / "source" / record[kind][-1]).write_bytes(data)
        stem = f"sample{i}" if media else f"output_{i:08d}"
        write_json(root / f"source/{stem}.json", record)
    source = {"format": "pairs", "path": str(root / "source"), "task": task}
    packed_run(source, root / "packed", model=VIDEO_MODEL | model, pack={"seq_length": 512})
    return root / "packed"

"""Lists of frames -> videos, and the records that name them.

    python tools/join_frames.py data/clips.jsonl data/joined
    offline-packing init data/joined/records.jsonl

SOURCE is a JSON or JSONL file. These are lists of frames:

    {"type": "video", "video": ["0.jpg", "1.jpg"], "sample_fps": 4}    in messages, as Qwen has them
    {"videos": [["0.jpg", "1.jpg"], ["2.jpg", "3.jpg"]]}               LLaMA-Factory, ms-swift
    {"video": ["0.jpg", "1.jpg"]}

The files of a list, all JPEG or all PNG and of one size, become the packets of an MP4: they are not
encoded again. A video shows `sample_fps` of them a second, 2 if the list does not say. Frames that
are turned by EXIF, have transparency or other colours than grey and RGB are refused. Decoded frames
of PNG are the pictures; of JPEG without subsampled chroma, up to 3 of 255 apart; with it, edges of
colours differ more, as FFmpeg and Pillow enlarge chroma differently.

Records keep all else. If they name other media, OUT must lie in the folder that names start from.
"""

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, NamedTuple

import av
import orjson
from PIL import Image

from offline_packing.errors import StageError
from offline_packing.sources import Source, SourceRecord, open_source
from offline_packing.storage.files import write_atomically
from task_encoders.packs.pack_format import is_image_name
from task_encoders.records.forms import DIALOGUES
from task_encoders.records.record import to_sample
from task_encoders.samples import SampleError

SAMPLE_FPS: Final = 2.0
#: Fields of a list of frames that say how it was made.
_RATES: Final = ("sample_fps", "raw_fps")
#: Pillow's mode of frames of each format -> FFmpeg's pixel format, of the container's track alone.
_MODES: Final = {"L": "gray", "RGB": "rgb24", "P": "pal8"}
_EXIF_ORIENTATION: Final = 0x0112


class Frame(NamedTuple):
    """A picture's file, and what all frames of a video have in common."""

    data: bytes
    format: str
    size: tuple[int, int]
    mode: str


def read_frame(source: Source, record: SourceRecord, name: str) -> Frame:
    """Read a frame. Raises ValueError if it cannot be one."""
    with source.open_media(record, name)[1] as file:
        data = file.read()
    with Image.open(io.BytesIO(data)) as image:
        kind, mode = image.format, image.mode
        if kind not in ("JPEG", "PNG"):
            raise ValueError(f"{name} is {kind}; frames are JPEG or PNG")
        if image.getexif().get(_EXIF_ORIENTATION, 1) != 1:
            raise ValueError(f"{name} is turned by EXIF; turn its pixels, and take out the tag")
        if mode not in _MODES or "transparency" in image.info:
            raise ValueError(f"{name} has the mode {mode}, or transparency; save it as RGB")
        return Frame(data, kind, image.size, mode)


def join(frames: Sequence[Frame], rate: float) -> bytes:
    """Return an MP4 of frames that are alike, `rate` of them a second."""
    first, per_second = frames[0], Fraction(rate).limit_denominator(10_000)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4", options={"fflags": "+bitexact"}) as out:
        stream: Any = out.add_stream("mjpeg" if first.format == "JPEG" else "png", rate=per_second)
        stream.width, stream.height = first.size
        stream.pix_fmt = "yuvj420p" if first.format == "JPEG" else _MODES[first.mode]
        for number, frame in enumerate(frames):
            packet = av.Packet(frame.data)
            packet.stream, packet.time_base, packet.duration = stream, 1 / per_second, 1
            packet.pts = packet.dts = number
            packet.is_keyframe = True
            out.mux(packet)
    return file.getvalue()


class Joiner:
    """Writes the videos of records, one after another."""

    def __init__(self, source: Source, folder: Path, root: Path, rate: float) -> None:
        """`folder`: where videos go; `root`: where names of records start."""
        self.source, self.folder, self.root, self.rate = source, folder, root, rate
        self.count = 0

    def convert(self, record: SourceRecord) -> dict[str, Any]:
        """Return a record with names of videos in the place of lists. Raises ValueError."""
        assert not isinstance(record.content, SampleError)
        found = dict(record.content)
        for field in ("videos", "video"):
            listed = found.get(field)
            if not isinstance(listed, list):
                continue
            if are_frames(listed):
                found[field] = [self._write(record, listed, found)]
            else:
                found[field] = [
                    self._write(record, one, found) if are_frames(one) else one for one in listed
                ]
        for part in video_parts(found):
            if are_frames(part.get("video")):
                part["video"] = self._write(record, part["video"], part)
                for name in _RATES:
                    part.pop(name, None)
        return {name: value for name, value in found.items() if name not in _RATES}

    def _write(self, record: SourceRecord, names: Sequence[str], beside: dict[str, Any]) -> str:
        """Write the video of a list of frames; returns its name."""
        frames = [read_frame(self.source, record, name) for name in names]
        for name, frame in zip(names, frames, strict=True):
            if frame[1:] != frames[0][1:]:
                one, other = (" ".join(map(str, one[1:])) for one in (frames[0], frame))
                raise ValueError(f"{names[0]} is {one}, but {name} is {other}")
        rate = beside.get("sample_fps") or self.rate
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0.01 <= rate <= 1000:
            raise ValueError(f"sample_fps is {rate!r}, not a number from 0.01 to 1,000")
        path = self.folder / f"{self.count:08d}.mp4"
        write_atomically(path, join(frames, rate))
        self.count += 1
        return os.path.relpath(path, self.root)


def are_frames(value: Any) -> bool:
    """Return whether a value is a list of names of pictures."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(name, str) and is_image_name(name) for name in value)
    )


def video_parts(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a record's messages that hold a video."""
    for field in DIALOGUES:
        messages = content.get(field)
        for message in messages if isinstance(messages, list) else ():
            parts = message.get("content") if isinstance(message, dict) else None
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, dict) and part.get("video"):
                    yield part


def others_named(content: dict[str, Any], joined: Path) -> list[str]:
    """Return the media of a record that are not in the folder of joined videos."""
    try:
        named = to_sample(content, "", "bmr").media
    except SampleError:  # `measure` says so
        return []
    return [name for name in named if not (joined / name).exists()]


def join_frames(options: dict[str, Any], folder: Path, rate: float) -> tuple[int, Path]:
    """Write the videos and the records of a source into a folder. Returns the number of videos, and
    the folder that names in the records start from. Raises ValueError or StageError."""
    source = open_source(options)
    start = Path(options.get("image_root") or Path(options["path"]).resolve().parent).resolve()
    folder.mkdir(parents=True)
    is_inside = folder.resolve().is_relative_to(start)
    root = start if is_inside else folder.resolve()
    joiner, lines = Joiner(source, folder.resolve(), root, rate), list[bytes]()
    for part in source.scan(4096).parts:
        for record in source.records(part):
            try:
                if isinstance(record.content, SampleError):
                    raise record.content
                content = joiner.convert(record)
            except (SampleError, ValueError, OSError) as error:
                raise ValueError(f"record {record.key}: {error}") from error
            others = [] if is_inside else others_named(content, root)
            if others:
                raise ValueError(
                    f"record {record.key} also names {others[0]!r}: choose a folder in {start}, "
                    "from where its names start"
                )
            lines.append(orjson.dumps(content) + b"\n")
    write_atomically(folder / "records.jsonl", b"".join(lines))
    return joiner.count, root


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a .json or .jsonl file, also .gz or .zst")
    parser.add_argument("output", type=Path, help="folder for videos; must not exist")
    parser.add_argument("--sample-fps", type=float, default=SAMPLE_FPS, metavar="N",
                        help="frames a second, where a list does not say (default: 2)")  # fmt: skip
    parser.add_argument("--image-root", help="names of frames are relative to this folder")
    given = parser.parse_args(arguments)
    if given.output.exists():
        parser.error(f"{given.output} exists; choose another folder")
    kind = "jsonl" if ".jsonl" in Path(given.source).name.lower() else "json"
    options = {"format": kind, "path": given.source, "task": "bmr"}
    options |= {"image_root": given.image_root} if given.image_root else {}
    try:
        count, root = join_frames(options, given.output, given.sample_fps)
    except (StageError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(
        f"wrote {count:,} videos: source.format=jsonl source.path={given.output}/records.jsonl "
        f"source.image_root={root}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Video files: frames, rate and size without decoding them, and single frames decoded.

`mp4_header` reads the header of a plain MP4. PyAV (the extra `video`), which only this module
imports, reads that of other containers, and decodes.
"""

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, BinaryIO, Final

from PIL import Image

from task_encoders.media.mp4_header import is_mp4, mp4_rotation, read_mp4_header
from task_encoders.samples import SampleError
from task_encoders.samples.limits import DECODING_COST, MAX_IMAGE_PIXELS

#: Default limit on the frames in a file: nine hours at 30 per second.
MAX_VIDEO_FRAMES: Final = 1_000_000

#: Packets for each of these, of sound or without a picture; more are not read.
_PACKETS_PER_FRAME: Final = 4

_EBML: Final = b"\x1aE\xdf\xa3"
_EBML_SEGMENT: Final = b"\x18\x53\x80\x67"
_TURNS: Final = {
    90: Image.Transpose.ROTATE_270,  # Pillow rotates counterclockwise
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_90,
}


class MissingPyAVError(ImportError):
    """A video has to be read, but PyAV is not installed."""

    def __str__(self) -> str:
        return (
            "videos need the package av; pip install 'av>=18' (in a clone: pip install -e "
            "'.[video]'), or leave them out of the source"
        )


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """Header of a video, from which its length is computed. `fps` is the file's average, None
    where unknown; the size is that of upright frames, rotated by `rotation` degrees clockwise."""

    num_frames: int
    fps: float | None
    height: int
    width: int
    rotation: int = 0
    #: extension of a file in this container
    extension: str = "mp4"


def read_video_header(
    file: BinaryIO,
    *,
    max_frame_pixels: int = MAX_IMAGE_PIXELS,
    max_frames: int = MAX_VIDEO_FRAMES,
) -> VideoHeader:
    """Frames, rate and size of a video from its container (seekable, binary).

    MP4 and MOV list their frames. In other containers, and in fragments, the packets are counted,
    which reads the whole file; only what libavformat looks at on opening a file is decoded.
    Rotation is read from MP4 and MOV.

    Raises:
        SampleError: bad_video, truncated_video, video_too_large or video_too_long.
        MissingPyAVError: PyAV is not installed.
    """
    _pyav()  # even where the header does not need it: the frames will
    file.seek(0)
    head = file.read(12)
    if not head:
        raise SampleError("bad_video", "the file is empty")
    plain = read_mp4_header(file) if is_mp4(head) else None
    if plain is None:
        header = _ask_pyav(file, head, max_frame_pixels, max_frames)
    else:
        header = VideoHeader(plain.num_frames, plain.fps, plain.height, plain.width, plain.rotation)
    _check_limits(header, max_frame_pixels, max_frames)
    if header.rotation in (90, 270):
        return dataclasses.replace(header, height=header.width, width=header.height)
    return header


def _check_limits(header: VideoHeader, max_frame_pixels: int, max_frames: int) -> None:
    """Raise SampleError where frames are too large, too many, or none."""
    if header.height * header.width > _most_pixels(max_frame_pixels):
        raise SampleError(
            "video_too_large",
            f"frames of {header.width}x{header.height} pixels > max_image_pixels "
            f"{max_frame_pixels} / {DECODING_COST['video']:g} (video)",
        )
    if header.num_frames > max_frames:
        raise SampleError(
            "video_too_long", f"{header.num_frames} frames > max_video_frames {max_frames}"
        )
    if header.num_frames == 0:
        raise SampleError("bad_video", "the video has no frames")


def _most_pixels(max_frame_pixels: int) -> int:
    """Pixels of a frame at most."""
    return int(max_frame_pixels / DECODING_COST["video"])


def decode_frames(
    data: bytes,
    header: VideoHeader,
    numbers: Sequence[int],
    max_frame_pixels: int = MAX_IMAGE_PIXELS,
) -> Iterator[Image.Image]:
    """Some frames of a video as RGB images, upright. `numbers` ascend.

    Raises:
        SampleError: truncated_video where one of them cannot be decoded.
    """
    wanted = iter(numbers)
    following = next(wanted, None)
    turn = _TURNS.get(header.rotation)
    number = -1
    with _open(BytesIO(data), data[:12], max_frame_pixels) as container:
        stream = _video_stream(container)
        stream.codec_context.thread_count = 1  # loader workers share the cores
        # The codec's own header may name other sizes than the container's.
        stream.codec_context.options = {"max_pixels": str(_most_pixels(max_frame_pixels))}
        # PyAV 19's own is shared by all frames of a thread, with threads of its own that a worker
        # forked after a first video lacks, and would wait for forever.
        to_rgb = _pyav().video.reformatter.VideoReformatter()
        try:
            for number, frame in enumerate(container.decode(stream)):
                if number == following:
                    image = to_rgb.reformat(frame, format="rgb24", threads=1).to_image()
                    yield image if turn is None else image.transpose(turn)
                    following = next(wanted, None)
                if following is None:
                    return
        except _av_errors() as error:
            raise SampleError(
                "truncated_video", f"frame {number + 1}: {_one_line(error)}"
            ) from error
    if following is not None:
        raise SampleError(
            "truncated_video", f"only {number + 1} of {header.num_frames} frames can be decoded"
        )


def _ask_pyav(
    file: BinaryIO,
    head: bytes,
    max_frame_pixels: int = MAX_IMAGE_PIXELS,
    max_frames: int = MAX_VIDEO_FRAMES,
) -> VideoHeader:
    """The header of any container, its packets counted."""
    size = file.seek(0, os.SEEK_END)
    _check_complete(file, head, size)
    file.seek(0)
    with _open(file, head, max_frame_pixels) as container:
        stream = _video_stream(container)
        context = stream.codec_context
        if len(stream.index_entries) > max_frames:  # sixteen million in a damaged file
            claimed = len(stream.index_entries)
            raise SampleError("video_too_long", f"{claimed} frames > max_video_frames {max_frames}")
        num_frames = _count_frames(container, stream, max_frames)
        if is_mp4(head):
            end = max((entry.pos + entry.size for entry in stream.index_entries), default=0)
            if end > size:
                raise SampleError("truncated_video", f"the last frame ends at byte {end} of {size}")
        if not context.width or not context.height:
            raise SampleError("bad_video", f"frames of unknown size ({context.name})")
        fps = stream.average_rate
        return VideoHeader(
            num_frames,
            float(fps) if fps else None,
            context.height,
            context.width,
            mp4_rotation(file) if is_mp4(head) else 0,
            _extension(file, head),
        )


def _count_frames(container: Any, stream: Any, max_frames: int) -> int:
    """Frames in the packets of a stream. Raises SampleError: truncated_video or video_too_long."""
    codec, num_packets, num_frames = stream.codec_context.name, 0, 0
    try:
        for packet in container.demux(stream):
            num_packets += 1
            num_frames += _is_shown(packet, codec)
            if num_frames > max_frames or num_packets > _PACKETS_PER_FRAME * max_frames:
                break
        else:
            return num_frames
    except _av_errors() as error:
        raise SampleError("truncated_video", _one_line(error)) from error
    raise SampleError(
        "video_too_long", f"{num_packets:,} packets and more > max_video_frames {max_frames}"
    )


def _is_shown(packet: Any, codec: str) -> bool:
    """Whether decoding the packet returns a frame."""
    if not packet.size or packet.is_discard:
        return False
    # Of these codecs only VP8 puts hidden frames in packets of their own (RFC 6386, §9.1).
    return codec != "vp8" or bool(memoryview(packet)[0] & 0x10)


def _check_complete(file: BinaryIO, head: bytes, size: int) -> None:
    """Raise SampleError where the container says that it is longer than the file."""
    end = 0
    if head[:4] == b"RIFF":
        end = 8 + int.from_bytes(head[4:8], "little")
    elif head[:4] == _EBML:
        file.seek(0)
        end = _segment_end(file.read(4096))
    if end > size:
        raise SampleError("truncated_video", f"the file has {size} of its {end} bytes")


def _segment_end(head: bytes) -> int:
    """The byte after a Matroska file's segment; 0 where the file does not say."""
    at = head.find(_EBML_SEGMENT)
    if at < 0 or at + 5 > len(head) or not head[at + 4]:
        return 0
    length = 9 - head[at + 4].bit_length()  # as many bytes as the first has leading zeros, plus one
    field = int.from_bytes(head[at + 4 : at + 4 + length], "big") & ((1 << 7 * length) - 1)
    return 0 if field == (1 << 7 * length) - 1 else at + 4 + length + field


def _extension(file: BinaryIO, head: bytes) -> str:
    if head[:4] != _EBML:
        return "avi" if head[:4] == b"RIFF" else "mp4"
    file.seek(0)
    return "webm" if b"webm" in file.read(64) else "mkv"


def _open(file: BinaryIO, head: bytes, max_frame_pixels: int) -> Any:
    """An open container. Only its own demuxer is tried: others in libavformat would follow
    playlists to other files and hosts.

    Raises:
        SampleError: bad_video.
    """
    if head[:4] == _EBML:
        name = "matroska"
    elif head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        name = "avi"
    elif is_mp4(head):
        name = "mp4"
    else:
        raise SampleError("bad_video", "not an MP4, MOV, WebM, Matroska or AVI file")
    pixels = _most_pixels(max_frame_pixels)
    try:
        return _pyav().open(file, format=name, options={"max_pixels": str(pixels)})
    except _av_errors() as error:
        raise SampleError("bad_video", _one_line(error)) from error


def _video_stream(container: Any) -> Any:
    """The first video stream that is not a cover picture. Raises SampleError if there is none."""
    for stream in container.streams.video:
        if not stream.disposition & stream.disposition.attached_pic:
            if stream.codec_context is None:
                raise SampleError("bad_video", "no decoder for its codec")
            return stream
    raise SampleError("bad_video", "the container holds no video")


@functools.cache
def _pyav() -> Any:
    try:
        import av
    except ImportError as error:
        raise MissingPyAVError from error
    return av


def _av_errors() -> tuple[type[Exception], ...]:
    # For a closed or odd container PyAV raises these besides its own errors.
    return (_pyav().error.FFmpegError, ValueError, EOFError, OverflowError)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]

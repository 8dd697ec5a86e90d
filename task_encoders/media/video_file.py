"""Video files: frames, rate and size without decoding them, and single frames decoded.

The header of a plain MP4 or MOV is read from its boxes (ISO/IEC 14496-12): libavformat decodes
frames when it opens a file, which takes 5 to 30 ms, and reading the boxes a fiftieth of that. Most
files are plain: one video track whose sample table lists every frame, all of them shown. What is
not (fragments, edit lists that cut, several video tracks, ...) is left to PyAV (the extra `video`),
which only this module imports; it also reads other containers, and decodes.
"""

import dataclasses
import functools
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from task_encoders.samples import SampleError
from task_encoders.samples.limits import DECODING_COST, MAX_IMAGE_PIXELS
from task_encoders.storage.remote_requests import in_a_line

#: Default limit on the frames in a file: nine hours at 30 per second.
MAX_VIDEO_FRAMES: Final = 1_000_000

#: Packets of sound, or without a picture, for each packet with one; more are not read.
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
    """Header of a video, from which its length is computed. `fps` is the file's average, or None;
    height and width are those of frames turned upright, by `rotation` degrees clockwise."""

    num_frames: int
    fps: float | None
    height: int
    width: int
    rotation: int = 0
    #: extension of a file in this container
    extension: str = "mp4"


def read_video_header(
    file: BinaryIO, *, max_frame_pixels: int = MAX_IMAGE_PIXELS, max_frames: int = MAX_VIDEO_FRAMES
) -> VideoHeader:
    """Read frames, rate and size of a video from its container (seekable, binary).

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
    header, rotation = read_mp4_header(file) if is_mp4(head) else (None, 0)
    if header is None:
        header = _ask_pyav(file, head, rotation, max_frame_pixels, max_frames)
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
    if header.rotation in (90, 270):
        return dataclasses.replace(header, height=header.width, width=header.height)
    return header


def _most_pixels(max_frame_pixels: int) -> int:
    """Return how many pixels a frame may have."""
    return int(max_frame_pixels / DECODING_COST["video"])


def decode_frames(
    data: bytes,
    header: VideoHeader,
    numbers: Sequence[int],
    max_frame_pixels: int = MAX_IMAGE_PIXELS,
) -> Iterator[Image.Image]:
    """Decode some frames of a video as RGB images, upright. `numbers` ascend.

    Raises:
        SampleError: truncated_video where one of them cannot be decoded.
    """
    wanted, turn = frozenset(numbers), _TURNS.get(header.rotation)
    number = -1
    with _open(BytesIO(data), data[:12], max_frame_pixels) as container:
        stream = _video_stream(container)
        stream.codec_context.thread_count = 1  # loader workers share the cores
        # The codec's own header may name other sizes than the container's.
        stream.codec_context.options = {"max_pixels": str(_most_pixels(max_frame_pixels))}
        # PyAV 19's own is shared by all frames of a thread, and has threads that a worker forked
        # after a first video lacks, and would wait for forever.
        to_rgb = _pyav().video.reformatter.VideoReformatter()
        try:
            for number, frame in enumerate(container.decode(stream)):
                if number in wanted:
                    image = to_rgb.reformat(frame, format="rgb24", threads=1).to_image()
                    yield image if turn is None else image.transpose(turn)
                if number == numbers[-1]:
                    return
        except _av_errors() as error:
            why = f"frame {number + 1}: {in_a_line(error)[:200]}"
            raise SampleError("truncated_video", why) from error
    raise SampleError(
        "truncated_video", f"only {number + 1} of {header.num_frames} frames can be decoded"
    )


def _ask_pyav(
    file: BinaryIO,
    head: bytes,
    rotation: int = 0,
    max_frame_pixels: int = MAX_IMAGE_PIXELS,
    max_frames: int = MAX_VIDEO_FRAMES,
) -> VideoHeader:
    """Read the header of any container with PyAV, and count packets; `rotation` is an MP4's."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    beginning = file.read(4096)
    end, extension = 0, "mp4"
    if head[:4] == b"RIFF":
        end, extension = 8 + int.from_bytes(head[4:8], "little"), "avi"
    elif head[:4] == _EBML:
        extension = "webm" if b"webm" in beginning[:64] else "mkv"
        end = _segment_end(beginning)
    if end > size:
        raise SampleError("truncated_video", f"the file has {size} of its {end} bytes")
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
            rotation,
            extension,
        )


def _count_frames(container: Any, stream: Any, max_frames: int) -> int:
    """Count frames in a stream's packets. Raises SampleError: truncated_video, video_too_long."""
    codec, num_packets, num_frames = stream.codec_context.name, 0, 0
    try:
        for packet in container.demux(stream):
            num_packets += 1
            if packet.size and not packet.is_discard:
                # Only VP8 has packets with nothing but a hidden frame (RFC 6386, §9.1).
                num_frames += codec != "vp8" or bool(memoryview(packet)[0] & 0x10)
            if num_frames > max_frames or num_packets > _PACKETS_PER_FRAME * max_frames:
                break
        else:
            return num_frames
    except _av_errors() as error:
        raise SampleError("truncated_video", in_a_line(error)[:200]) from error
    raise SampleError(
        "video_too_long", f"{num_packets:,} packets and more > max_video_frames {max_frames}"
    )


def _segment_end(head: bytes) -> int:
    """Return the byte after a Matroska file's segment; 0 if the file does not say."""
    at = head.find(_EBML_SEGMENT)
    if at < 0 or at + 5 > len(head) or not head[at + 4]:
        return 0
    length = 9 - head[at + 4].bit_length()  # the first's leading zeros, plus one
    field = int.from_bytes(head[at + 4 : at + 4 + length], "big") & ((1 << 7 * length) - 1)
    return 0 if field == (1 << 7 * length) - 1 else at + 4 + length + field


def _open(file: BinaryIO, head: bytes, max_frame_pixels: int) -> Any:
    """Open a container. Only its own demuxer is tried: others in libavformat would follow playlists
    to other files and hosts.

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
        raise SampleError("bad_video", in_a_line(error)[:200]) from error


def _video_stream(container: Any) -> Any:
    """Return the first video stream other than a cover picture. Raises SampleError if none is."""
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


#: A larger index is left to PyAV; ten hours of video have one of about 15 MB.
_MAX_MOOV_BYTES: Final = 64 << 20
#: Sibling boxes, and frames: no real video has more.
_MAX_BOXES: Final = 10_000
_MAX_FRAMES: Final = 1 << 24
#: Boxes that may be at the top level of a file that is not fragmented.
_TOP_BOXES: Final = frozenset(
    (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"uuid", b"udta", b"meta", b"pnot")
)
#: Codecs that every build of the decoder has; each sample is one frame.
_CODECS: Final = frozenset(
    (b"avc1", b"avc3", b"hvc1", b"hev1", b"av01", b"vp09", b"mp4v", b"mjpg", b"jpeg")
)
#: Display matrices (a, b, c, d) and the degrees by which they turn the frames clockwise.
_ROTATIONS: Final[Mapping[tuple[float, float, float, float], int]] = {
    (1, 0, 0, 1): 0,
    (0, 1, -1, 0): 90,
    (-1, 0, 0, -1): 180,
    (0, -1, 1, 0): 270,
}

Array = npt.NDArray[np.int64]


class _NotPlainError(Exception):
    """The file has to be read by PyAV."""


def is_mp4(head: bytes) -> bool:
    """Tell whether a file that begins with these 12 bytes is in this format."""
    return head[4:8] in _TOP_BOXES


def read_mp4_header(file: BinaryIO) -> tuple[VideoHeader | None, int]:
    """Read the video track of a plain file, None if only PyAV can tell; and the clockwise rotation
    of the first one in degrees, 0 if the file gives none.

    Raises:
        SampleError: truncated_video where the file ends before its boxes or frames do.
    """
    size = file.seek(0, os.SEEK_END)
    damaged = struct.error, KeyError, IndexError, ValueError, OverflowError, StopIteration
    rotation = 0
    try:
        moov = _read_moov(file, size)
        tracks = [_boxes(data) for kind, data in _iterate_boxes(moov) if kind == b"trak"]
        rotation = next(_rotation(track) for track in tracks if _is_video(track))
        return _read_movie(_boxes(moov), filter(_is_video, tracks), size), rotation
    except (_NotPlainError, *damaged) as error:
        if isinstance(error, SampleError):
            raise
        return None, rotation


def _read_moov(file: BinaryIO, size: int) -> bytes:
    """Read the content of the box that describes all tracks."""
    moov: bytes | None = None
    offset = num_boxes = 0
    while offset + 8 <= size:
        num_boxes += 1
        file.seek(offset)
        head = file.read(16)
        length, kind = struct.unpack_from(">I4s", head)
        header_size = 8
        if length == 1:
            (length,) = struct.unpack_from(">Q", head, 8)
            header_size = 16
        elif length == 0:
            length = size - offset
        if kind not in _TOP_BOXES or length < header_size or num_boxes > _MAX_BOXES:
            raise _NotPlainError
        if offset + length > size:
            raise SampleError(
                "truncated_video", f"the file ends within {kind.decode()!r}, after {size} bytes"
            )
        if kind == b"moov":
            if moov is not None or length > _MAX_MOOV_BYTES:
                raise _NotPlainError
            file.seek(offset + header_size)
            moov = file.read(length - header_size)
        offset += length
    if moov is None:
        raise SampleError("truncated_video", f"no index of the frames ('moov') in {size} bytes")
    return moov


def _read_movie(
    movie: dict[bytes, bytes], videos: Iterable[dict[bytes, bytes]], size: int
) -> VideoHeader:
    if b"mvex" in movie or b"cmov" in movie or _matrix(movie[b"mvhd"], 36, 48) != (1, 0, 0, 1):
        raise _NotPlainError
    (track,) = videos  # ValueError if not one
    media = _boxes(track[b"mdia"])
    table = _boxes(_boxes(media[b"minf"])[b"stbl"])
    entries, entry_size, codec = struct.unpack_from(">4xII4s", table[b"stsd"])
    if entries != 1 or codec not in _CODECS or entry_size < 86:
        raise _NotPlainError
    width, height = struct.unpack_from(">HH", table[b"stsd"], 8 + 32)

    sizes = _sample_sizes(table[b"stsz"], size)
    durations = _runs(table[b"stts"], len(sizes))
    if not len(sizes) or not sizes.all() or not width or not height or (durations < 0).any():
        raise _NotPlainError
    end = _data_end(table, sizes)
    if end > size:
        raise SampleError("truncated_video", f"the last frame ends at byte {end} of {size}")
    times = np.cumsum(durations) - durations
    if b"ctts" in table:
        times = times + _runs(table[b"ctts"], len(sizes))
    timescale, duration = _timescale(media[b"mdhd"]), int(durations.sum())
    if b"edts" in track:
        _check_edits(_boxes(track[b"edts"]), times, timescale, _timescale(movie[b"mvhd"]))
    fps = timescale * len(sizes) / duration if duration else None
    return VideoHeader(len(sizes), fps, height, width, _rotation(track))


def _iterate_boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    offset = num_boxes = 0
    while offset + 8 <= len(data):
        num_boxes += 1
        length, kind = struct.unpack_from(">I4s", data, offset)
        if length < 8 or offset + length > len(data) or num_boxes > _MAX_BOXES:
            if length == 0 and kind == b"\0\0\0\0":  # QuickTime ends user data with a zero
                return
            raise _NotPlainError
        yield kind, data[offset + 8 : offset + length]
        offset += length


def _boxes(data: bytes) -> dict[bytes, bytes]:
    """Return the boxes in a box: the first of each kind."""
    found: dict[bytes, bytes] = {}
    for kind, content in _iterate_boxes(data):
        found.setdefault(kind, content)
    return found


def _is_video(track: dict[bytes, bytes]) -> bool:
    return _boxes(track[b"mdia"])[b"hdlr"][8:12] == b"vide"


def _timescale(header: bytes) -> int:
    """Return the units per second of `mvhd` or `mdhd`."""
    (timescale,) = struct.unpack_from(">I", header, 20 if header[0] == 1 else 12)
    if not timescale:
        raise _NotPlainError
    return int(timescale)


def _matrix(header: bytes, offset: int, offset_v1: int) -> tuple[float, float, float, float]:
    """Return (a, b, c, d) of a header's display matrix."""
    a, b, _, c, d = struct.unpack_from(">5i", header, offset_v1 if header[0] == 1 else offset)
    return a / 65536, b / 65536, c / 65536, d / 65536


def _rotation(track: dict[bytes, bytes]) -> int:
    rotation = _ROTATIONS.get(_matrix(track[b"tkhd"], 40, 52))
    if rotation is None:  # mirrored, slanted or scaled
        raise _NotPlainError
    return rotation


def _sample_sizes(box: bytes, file_size: int) -> Array:
    """Read the bytes of each frame, (num_frames,)."""
    common, count = struct.unpack_from(">4xII", box)
    # Before an array of the claimed length is allocated:
    if common * count > file_size:
        raise SampleError("truncated_video", f"{count} frames of {common} bytes in {file_size}")
    if count > _MAX_FRAMES:
        raise SampleError("video_too_long", f"{count} frames")
    if common:
        return np.full(count, common, np.int64)
    return _integers(box, 12, count, ">u4")


def _integers(box: bytes, offset: int, count: int, kind: str) -> Array:
    if count * np.dtype(kind).itemsize > len(box) - offset:
        raise _NotPlainError
    return np.frombuffer(box, kind, count, offset).astype(np.int64)


def _runs(box: bytes, num_frames: int) -> Array:
    """Expand run-length pairs (count, value), as in `stts` and `ctts`, to (num_frames,)."""
    (count,) = struct.unpack_from(">4xI", box)
    pairs = _integers(box, 8, 2 * count, ">i4").reshape(-1, 2)
    if (pairs[:, 0] < 0).any() or pairs[:, 0].sum() != num_frames:
        raise _NotPlainError
    return np.repeat(pairs[:, 1], pairs[:, 0])


def _data_end(table: dict[bytes, bytes], sizes: Array) -> int:
    """Return the byte after the last frame in the file."""
    wide = b"co64" in table
    box = table[b"co64" if wide else b"stco"]
    (num_chunks,) = struct.unpack_from(">4xI", box)
    offsets = _integers(box, 8, num_chunks, ">u8" if wide else ">u4")
    (count,) = struct.unpack_from(">4xI", table[b"stsc"])
    runs = _integers(table[b"stsc"], 8, 3 * count, ">u4").reshape(-1, 3)
    lengths = np.diff(runs[:, 0], append=num_chunks + 1)  # [1, 4], 5 chunks -> [3, 2]
    if not count or runs[0, 0] != 1 or (lengths < 0).any():
        raise _NotPlainError
    per_chunk = np.repeat(runs[:, 1], lengths)
    if per_chunk.sum() != len(sizes) or (offsets < 0).any():
        raise _NotPlainError
    ends = np.concatenate([[0], np.cumsum(sizes)])[np.cumsum(per_chunk)]
    return int((offsets + np.diff(ends, prepend=0)).max())


def _check_edits(edits: dict[bytes, bytes], times: Array, timescale: int, movie: int) -> None:
    """Raise _NotPlainError unless the edit list shows every frame once."""
    box = edits[b"elst"]
    (count,) = struct.unpack_from(">4xI", box)
    if count == 0:
        return
    length, start, rate = struct.unpack_from(">QqI" if box[0] == 1 else ">IiI", box, 8)
    end = start + length * timescale // movie
    if count != 1 or rate != 1 << 16 or start < 0 or start > times.min() or end <= times.max():
        raise _NotPlainError

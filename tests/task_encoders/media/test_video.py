"""Headers, frames and patches of videos; damaged ones, and those that claim too much, are refused
with a reason, or read in full."""

import dataclasses
import io
import math
import multiprocessing
import os
import struct
import sys
import tracemalloc
import zlib
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from task_encoders.families import build_sample_encoder
from task_encoders.media import video_file
from task_encoders.media.video_file import (
    MissingPyAVError,
    VideoHeader,
    _data_end,
    _NotPlainError,
    _sample_sizes,
    decode_frames,
    read_mp4_header,
    read_video_header,
)
from task_encoders.samples import SampleError
from tests.helpers.videos import boxes, draw_frame, make_audio, make_video, patched

LIMITS = {"video_min_pixels": 28 * 28, "video_max_pixels": 28 * 28 * 16}
SMALL: Any = build_sample_encoder(max_pixels=28 * 28 * 64, **LIMITS)
small_rule = SMALL.sample_video


def header_of(data: bytes) -> VideoHeader:
    """Header of a video file."""
    return read_video_header(io.BytesIO(data))


def by_pyav(data: bytes) -> VideoHeader:
    rotation = read_mp4_header(io.BytesIO(data))[1] if video_file.is_mp4(data[:12]) else 0
    return video_file._ask_pyav(io.BytesIO(data), data[:12], rotation)


def num_decoded(data: bytes) -> int:
    with av.open(io.BytesIO(data)) as container:
        return sum(1 for _ in container.decode(video=0))


# --- headers ---------------------------------------------------------------------------------

FILES: dict[str, dict[str, Any]] = {
    "h264": {"num_frames": 25, "fps": 30},
    "h264_without_b_frames": {"codec_options": {"bf": "0"}},
    "index_in_front": {"container_options": {"movflags": "faststart"}},
    "fragments": {"container_options": {"movflags": "frag_keyframe+empty_moov"}},
    "hevc": {"codec": "libx265", "codec_options": {"x265-params": "log-level=none:pools=1"}},
    "av1": {"codec": "libsvtav1", "codec_options": {"preset": "12", "svtav1-params": "lp=1"}},
    "mpeg4": {"codec": "mpeg4", "fps": 24},
    "ntsc": {"fps": Fraction(30000, 1001), "num_frames": 31},
    "one_frame": {"num_frames": 1},
    "two_frames": {"num_frames": 2},
    "variable_rate": {"num_frames": 5, "times": [0, 40, 500, 540, 1700]},
    "turned_90": {"rotation": 90},
    "turned_180": {"rotation": 180},
    "turned_270": {"rotation": 270},
    "mov": {"container": "mov"},
    "webm": {"container": "webm"},
    "webm_one_frame": {"container": "webm", "num_frames": 1},
    "webm_variable_rate": {"container": "webm", "num_frames": 4, "times": [0, 33, 900, 1000]},
    "mkv": {"container": "matroska", "num_frames": 13},
    "avi": {"container": "avi"},
}


@pytest.mark.parametrize("name", FILES)
def test_the_header_says_what_decoding_gives(name: str) -> None:
    """Read here, or by libavformat."""
    options = FILES[name]
    data = make_video(**options)
    header = header_of(data)
    assert header.num_frames == num_decoded(data) == options.get("num_frames", 12)
    turned = options.get("rotation", 0) in (90, 270)
    assert (header.height, header.width) == ((64, 48) if turned else (48, 64))
    assert header.rotation == options.get("rotation", 0)
    rows, (grid, _) = SMALL.encode_video(data)
    assert grid == small_rule(header).grid
    assert len(rows) == math.prod(grid)
    plain = read_mp4_header(io.BytesIO(data))[0] if video_file.is_mp4(data[:12]) else None
    is_plain = options.get("container", "mp4") in ("mp4", "mov") and name != "fragments"
    assert (plain is not None) == is_plain
    if plain is not None:
        theirs = by_pyav(data)
        assert plain.fps == pytest.approx(theirs.fps, rel=1e-9)
        assert dataclasses.replace(plain, fps=theirs.fps, extension=theirs.extension) == theirs


def test_frames_outside_the_edit_list_are_not_counted() -> None:
    data = make_video(num_frames=20, fps=10, codec_options={"bf": "0"})
    (edit,) = [(at, size) for kind, at, size in boxes(data) if kind == b"elst"]
    assert edit[1] == 28  # one edit of 12 bytes
    scale = 10240
    cut = patched(data, b"elst", 16 + 4, struct.pack(">i", 5 * scale // 10))
    assert read_mp4_header(io.BytesIO(cut))[0] is None
    assert header_of(cut).num_frames == num_decoded(cut) == 15
    short = patched(data, b"elst", 16, struct.pack(">I", 800))  # of 2,000 ms
    assert header_of(short).num_frames == num_decoded(short) < 20


def test_hidden_frames_of_vp8_are_not_counted() -> None:
    data = bytearray(make_video(20, container="webm", codec="libvpx"))
    with av.open(io.BytesIO(data)) as container:
        packets = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    for packet in packets[4:7]:
        data[data.index(packet)] &= 0xEF
    assert header_of(bytes(data)).num_frames == num_decoded(bytes(data)) == 17


def test_reading_at_a_byte_range_reads_the_index_only() -> None:
    data = make_video(num_frames=60, codec_options={"crf": "1"}, width=256, height=256)

    class Counting(io.BytesIO):
        count = 0

        def read(self, size: int | None = -1, /) -> bytes:
            found = super().read(size)
            self.count += len(found)
            return found

    file = Counting(data)
    assert read_video_header(file).num_frames == 60
    assert file.count < len(data) / 20


# --- patches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h264", "webm", "one_frame", "turned_90", "turned_270", "avi"])
def test_the_right_frames_are_decoded(name: str) -> None:
    """Frames are told by their bar, and by where its end lies when they are turned."""
    options = FILES[name]
    data = make_video(**options | {"width": 128, "height": 64})
    header = header_of(data)
    numbers = list(range(0, header.num_frames, 3))
    frames = list(decode_frames(data, header, numbers))
    assert len(frames) == len(numbers)
    for number, frame in zip(numbers, frames, strict=True):
        drawn = np.rot90(draw_frame(number, 128, 64), -options.get("rotation", 0) // 90)
        assert frame.size == (header.width, header.height) == drawn.shape[1::-1]
        difference = np.abs(np.asarray(frame).astype(int) - drawn).mean()
        assert difference < 12


def _frame_sums(data: bytes, header: VideoHeader) -> list[int]:
    """Checksum of each frame, decoded while no thread is started."""
    before, sums = len(os.listdir("/proc/self/task")), []
    for frame in decode_frames(data, header, range(header.num_frames)):
        assert len(os.listdir("/proc/self/task")) <= before
        sums.append(zlib.crc32(frame.tobytes()))
    return sums


def test_a_fork_decodes_after_its_parent() -> None:
    """As a loader's worker does. Converting a frame, PyAV starts threads, which a fork lacks."""
    data = make_video(4, width=640, height=480)
    with av.open(io.BytesIO(data)) as container:
        expected = [zlib.crc32(frame.to_image().tobytes()) for frame in container.decode(video=0)]
    header = header_of(data)
    assert _frame_sums(data, header) == expected
    with multiprocessing.get_context("fork").Pool(1) as pool:  # which kills its worker at the end
        assert pool.apply_async(_frame_sums, (data, header)).get(timeout=60) == expected


MP4 = make_video(num_frames=20, codec_options={"bf": "0"})
FRONT = make_video(num_frames=20, container_options={"movflags": "faststart"})
WEBM = make_video(num_frames=20, container="webm")
MKV = make_video(num_frames=20, container="matroska")
AVI = make_video(num_frames=20, container="avi")
FRAGMENTS = make_video(20, codec="mpeg4", **FILES["fragments"])
RUN = FRAGMENTS.index(b"trun") + 8

BAD: dict[str, tuple[str, bytes]] = {
    "empty": ("bad_video", b""),
    "one_byte": ("bad_video", b"\0"),
    "text": ("bad_video", b"this is no video, whatever its name says\n" * 20),
    "playlist": ("bad_video", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"),
    "image": ("bad_video", b"\xff\xd8\xff\xe0" + bytes(200)),
    "wave": ("bad_video", b"RIFF" + struct.pack("<I", 36) + b"WAVEfmt " + bytes(28)),
    "audio_mp4": ("bad_video", make_audio()),
    "audio_webm": ("bad_video", make_audio("webm")),
    "mp4_without_index": ("truncated_video", MP4[: MP4.index(b"moov") - 4]),
    "mp4_cut_in_its_frames": ("truncated_video", MP4[: len(MP4) // 3]),
    "front_cut_at_the_end": ("truncated_video", FRONT[:-1]),
    "webm_cut": ("truncated_video", WEBM[:-1]),
    "avi_cut": ("truncated_video", AVI[:-100]),
    "webm_without_frames": ("truncated_video", WEBM[: WEBM.index(b"\x1fC\xb6u")]),
    # A frame has 67 million pixels, and a decoder holds up to 17.
    "huge_frames": ("video_too_large", patched(MP4, b"stsd", 48, struct.pack(">HH", 8192, 8192))),
    "no_frames_listed": ("bad_video", patched(MP4, b"stsz", 12, struct.pack(">II", 0, 0))),
    "many_frames": ("truncated_video", patched(MP4, b"stsz", 12, struct.pack(">II", 1, 2**32 - 1))),
    # libavformat lists those, and finds that there are none.
    "many_in_fragments": (
        "bad_video",
        FRAGMENTS[:RUN] + struct.pack(">I", 1 << 20) + FRAGMENTS[RUN + 4 :],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str) -> None:
    reason, data = BAD[name]
    with pytest.raises(SampleError) as caught:
        header_of(data)
    assert caught.value.reason == reason
    assert "\n" not in str(caught.value)
    with pytest.raises(SampleError):
        SMALL.encode_video(data)


def test_claims_cost_no_memory() -> None:
    """Tables that name billions of frames or chunks are refused before they are made."""
    runs = patched(MP4, b"stts", 16, struct.pack(">I", 0x7FFFFFFF))
    chunks = patched(MP4, b"stco", 12, struct.pack(">I", 0xFFFFFFF0))
    first = patched(MP4, b"stsc", 16, struct.pack(">I", 0xFFFFFFF0))
    many = MP4[:32] + struct.pack(">I4s", 8, b"free") * 200_000 + MP4[32:]
    tracemalloc.start()
    try:
        for data in (runs, chunks, first, many):
            assert read_mp4_header(io.BytesIO(data))[0] is None
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(SampleError, match="video_too_long"):
        _sample_sizes(struct.pack(">III", 0, 1, 1 << 25), 1 << 40)
    # Two runs of chunks, the first of which claims four billion.
    table = {
        b"stco": struct.pack(">III", 0, 1, 0),
        b"stsc": struct.pack(">8I", 0, 2, 1, 1, 1, 0xFFFFFFF0, 1, 1),
    }
    with pytest.raises(_NotPlainError):
        _data_end(table, np.ones(1, np.int64))


def test_limits() -> None:
    frames, pixels = "max_frames", "max_frame_pixels"
    for data, limit, refused in (
        (WEBM, {frames: 20}, ""),
        (
            WEBM,
            {frames: 5},
            r"^video_too_long: 6 packets and more > .* 5",
        ),  # while they are counted
        (MP4, {frames: 20}, ""),
        (MP4, {frames: 19}, "video_too_long: 20 frames > max_video_frames 19"),
        (MP4, {pixels: 4 * 64 * 48}, ""),
        (MP4, {pixels: 4 * 64 * 48 - 1}, "of 64x48 pixels > max_image_pixels 12287 / 4"),
    ):
        with pytest.raises(SampleError, match=refused) if refused else nullcontext():
            read_video_header(io.BytesIO(data), **limit)
    small = patched(MP4, b"stsd", 16 + 32, struct.pack(">HH", 16, 16))
    assert header_of(small).width == 16
    for limit, refused in ((4 * 64 * 48, False), (4 * 64 * 48 - 1, True)):
        encoder: Any = build_sample_encoder(max_image_pixels=limit, **LIMITS)
        with pytest.raises(SampleError, match="max_pixels") if refused else nullcontext():
            encoder.encode_video(small)
    long = make_video(num_frames=2, width=16, height=512, codec="mpeg4")
    with pytest.raises(SampleError, match="aspect_ratio"):
        build_sample_encoder(max_aspect_ratio=30).encode_video(long)


def test_frames_without_a_rate_are_refused() -> None:
    no_duration = patched(MP4, b"stts", 16 + 4, struct.pack(">I", 0))
    for header in (VideoHeader(7, None, 8, 8), header_of(no_duration)):
        with pytest.raises(SampleError, match=r"bad_video: \d+ frames without a frame rate"):
            small_rule(header)


def test_frames_that_do_not_decode() -> None:
    begin, end = MP4.index(b"mdat") + 4, MP4.index(b"moov") - 4
    damaged = MP4[:begin] + bytes(end - begin) + MP4[end:]
    assert header_of(damaged).num_frames == 20
    with pytest.raises(SampleError, match="truncated_video"):
        SMALL.encode_video(damaged)


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    video_file._pyav.cache_clear()
    monkeypatch.setitem(sys.modules, "av", None)
    try:
        with pytest.raises(MissingPyAVError, match=r"pip install 'av>=18'"):
            header_of(MP4)
    finally:
        video_file._pyav.cache_clear()


CAREFUL: Any = build_sample_encoder(max_image_pixels=1 << 20, max_video_frames=2000, **LIMITS)


def survives(data: bytes) -> bool:
    """Return True if a file is accepted; it then encodes to its measured grid, or not at all."""
    try:
        grid = CAREFUL.sample_video(CAREFUL.video_header(io.BytesIO(data))).grid
    except SampleError:
        return False
    try:
        rows, (encoded, _) = CAREFUL.encode_video(data)
    except SampleError:
        return True
    assert encoded == grid
    assert len(rows) == math.prod(grid)
    return True


WHOLE = {"mp4": MP4, "front": FRONT, "webm": WEBM, "mkv": MKV, "avi": AVI}


@pytest.mark.parametrize("name", WHOLE)
def test_every_truncation(name: str) -> None:
    data = WHOLE[name]
    step = max(1, len(data) // 150)
    accepted = [survives(data[:end]) for end in range(0, len(data), step)]
    assert len(accepted) >= 100
    assert not any(accepted)
    assert survives(data)


@pytest.mark.parametrize("name", ["mp4", pytest.param("webm", marks=pytest.mark.exhaustive)])
def test_flipped_bytes_of_the_header(name: str) -> None:
    data = WHOLE[name]
    begin, end = (len(data) - 1200, len(data)) if name == "mp4" else (0, 1200)
    rng = np.random.default_rng(7)
    accepted = 0
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(int(rng.integers(1, 5))):
            damaged[int(rng.integers(begin, end))] = int(rng.choice([0, 1, 127, 255, 77]))
        accepted += survives(bytes(damaged))
    assert accepted > 0


@given(st.binary(max_size=300), st.sampled_from([b"", MP4[:32], WEBM[:64], AVI[:200], FRONT[:300]]))
def test_any_bytes(data: bytes, head: bytes) -> None:
    assert not survives(head + data)  # none of the heads is a whole video

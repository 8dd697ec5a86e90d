"""Damaged videos, and those that claim too much: refused with a reason, or read in full."""

import dataclasses
import io
import math
import struct
import sys
import tracemalloc
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from task_encoders.families import build_sample_encoder
from task_encoders.media import video_file
from task_encoders.media.video import (
    sample_video,
    video_patches,
)
from task_encoders.media.video_file import (
    MissingPyAVError,
    _data_end,
    _NotPlainError,
    _sample_sizes,
    read_mp4_header,
    read_video_header,
)
from task_encoders.samples import SampleError
from tests.helpers.small_videos import SMALL, VISION, header_of, small_rule
from tests.helpers.videos import make_audio, make_video, patched

MP4 = make_video(num_frames=20, codec_options={"bf": "0"})
FRONT = make_video(num_frames=20, container_options={"movflags": "faststart"})
WEBM = make_video(num_frames=20, container="webm")
MKV = make_video(num_frames=20, container="matroska")
AVI = make_video(num_frames=20, container="avi")

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
    "mp4_cut_in_its_index": ("truncated_video", MP4[:-40]),
    "mp4_first_bytes": ("truncated_video", MP4[:40]),
    "front_cut_at_the_end": ("truncated_video", FRONT[:-1]),
    "front_cut_in_its_frames": ("truncated_video", FRONT[: -len(FRONT) // 5]),
    "webm_cut": ("truncated_video", WEBM[:-1]),
    "mkv_cut": ("truncated_video", MKV[: len(MKV) // 2]),
    "avi_cut": ("truncated_video", AVI[:-100]),
    "webm_without_frames": ("truncated_video", WEBM[: WEBM.index(b"\x1fC\xb6u")]),
    "huge_frames": (
        "video_too_large",
        patched(MP4, b"stsd", 16 + 32, struct.pack(">HH", 65535, 65535)),
    ),
    "frames_of_8192": (  # a frame has 67 million pixels, and a decoder holds up to 17
        "video_too_large",
        patched(MP4, b"stsd", 16 + 32, struct.pack(">HH", 8192, 8192)),
    ),
    "no_frames_listed": ("bad_video", patched(MP4, b"stsz", 12, struct.pack(">II", 0, 0))),
    "billions_of_frames": (
        "truncated_video",
        patched(MP4, b"stsz", 12, struct.pack(">II", 1, 0xFFFFFFFF)),
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
        video_patches(data, small_rule, VISION)


def test_claims_cost_no_memory() -> None:
    """Tables that name billions of frames or chunks are refused before they are made."""
    runs = patched(MP4, b"stts", 16, struct.pack(">I", 0x7FFFFFFF))
    chunks = patched(MP4, b"stco", 12, struct.pack(">I", 0xFFFFFFF0))
    first = patched(MP4, b"stsc", 16, struct.pack(">I", 0xFFFFFFF0))
    many = MP4[:32] + struct.pack(">I4s", 8, b"free") * 200_000 + MP4[32:]
    tracemalloc.start()
    try:
        for data in (runs, chunks, first, many):
            assert read_mp4_header(io.BytesIO(data)) is None
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


def test_limits_while_packets_are_counted() -> None:
    with pytest.raises(SampleError, match=r"^video_too_long: 6 packets and more > .* 5"):
        read_video_header(io.BytesIO(WEBM), max_frames=5)
    assert read_video_header(io.BytesIO(WEBM), max_frames=20).num_frames == 20


def test_fragments_that_claim_many_frames() -> None:
    """libavformat lists those, and finds that there are none."""
    options = {"movflags": "frag_keyframe+empty_moov"}
    data = make_video(20, codec="mpeg4", container_options=options)
    assert header_of(data).num_frames == 20
    at = data.index(b"trun") + 8
    with pytest.raises(SampleError, match="bad_video"):
        header_of(data[:at] + struct.pack(">I", 1 << 20) + data[at + 4 :])


def test_limits() -> None:
    with pytest.raises(SampleError, match=r"video_too_long: 20 frames > max_video_frames 19"):
        read_video_header(io.BytesIO(MP4), max_frames=19)
    assert read_video_header(io.BytesIO(MP4), max_frame_pixels=4 * 64 * 48).width == 64
    with pytest.raises(SampleError, match=r"frames of 64x48 pixels > max_image_pixels 12287 / 4"):
        read_video_header(io.BytesIO(MP4), max_frame_pixels=4 * 64 * 48 - 1)
    small = patched(MP4, b"stsd", 16 + 32, struct.pack(">HH", 16, 16))
    assert header_of(small).width == 16
    for limit, refused in ((4 * 64 * 48, False), (4 * 64 * 48 - 1, True)):
        vision_settings = dataclasses.replace(VISION, max_image_pixels=limit)
        with pytest.raises(SampleError, match="max_pixels") if refused else nullcontext():
            video_patches(small, small_rule, vision_settings)
    long = make_video(num_frames=2, width=16, height=512, codec="mpeg4")
    with pytest.raises(SampleError, match="aspect_ratio"):
        video_patches(long, build_sample_encoder(max_aspect_ratio=30).sample_video, VISION)


def test_a_zero_duration_has_no_rate() -> None:
    data = patched(MP4, b"stts", 16 + 4, struct.pack(">I", 0))
    with pytest.raises(SampleError, match="bad_video"):
        sample_video(header_of(data), SMALL, VISION)


def test_frames_that_do_not_decode() -> None:
    begin = MP4.index(b"mdat") + 4
    damaged = (
        MP4[:begin]
        + bytes(len(MP4[begin : MP4.index(b"moov") - 4]))
        + MP4[MP4.index(b"moov") - 4 :]
    )
    assert header_of(damaged).num_frames == 20
    with pytest.raises(SampleError, match="truncated_video"):
        video_patches(damaged, small_rule, VISION)


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    video_file._pyav.cache_clear()
    monkeypatch.setitem(sys.modules, "av", None)
    try:
        with pytest.raises(MissingPyAVError, match=r"pip install 'av>=18'"):
            header_of(MP4)
    finally:
        video_file._pyav.cache_clear()


def survives(data: bytes) -> bool:
    """Return True if a file is accepted; it then encodes to its measured grid, or not at all."""
    try:
        header = read_video_header(io.BytesIO(data), max_frame_pixels=1 << 20, max_frames=2000)
        grid = sample_video(header, SMALL, VISION).grid
    except SampleError:
        return False
    vision_settings = dataclasses.replace(VISION, max_image_pixels=1 << 20)
    try:
        rows, (encoded, *_) = video_patches(data, small_rule, vision_settings, 2000)
    except SampleError:
        return True
    assert encoded == grid
    assert len(rows) == math.prod(grid)
    return True


@pytest.mark.parametrize("name", ["mp4", "front", "webm", "mkv", "avi"])
def test_every_truncation(name: str) -> None:
    data = {"mp4": MP4, "front": FRONT, "webm": WEBM, "mkv": MKV, "avi": AVI}[name]
    step = max(1, len(data) // 150)
    accepted = [survives(data[:end]) for end in range(0, len(data), step)]
    assert len(accepted) >= 100
    assert not any(accepted)
    assert survives(data)


@pytest.mark.parametrize(
    "name",
    [
        "mp4",
        *(
            pytest.param(one, marks=pytest.mark.exhaustive)
            for one in ("front", "webm", "mkv", "avi")
        ),
    ],
)
def test_flipped_bytes_of_the_header(name: str) -> None:
    data = {"mp4": MP4, "front": FRONT, "webm": WEBM, "mkv": MKV, "avi": AVI}[name]
    regions = {"mp4": (len(data) - 1200, len(data)), "front": (0, 1200)}
    begin, end = regions.get(name, (0, min(1200, len(data))))
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

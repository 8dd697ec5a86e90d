"""Headers, frames and patches of videos."""

import dataclasses
import io
import itertools
import math
import struct
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from task_encoders.media import video_file
from task_encoders.media.patches import normalisation
from task_encoders.media.video import (
    num_sampled_frames,
    sample_video,
    sampled_frames,
    seconds_per_grid,
    video_patches,
)
from task_encoders.media.video_file import (
    VideoHeader,
    decode_frames,
    read_mp4_header,
    read_video_header,
)
from task_encoders.samples import SampleError
from tests.helpers.small_videos import DEFAULTS, SMALL, VISION, header_of, small_rule
from tests.helpers.transformers_sources import transformers_function
from tests.helpers.videos import boxes, draw_frame, make_video, patched


def by_pyav(data: bytes) -> VideoHeader:
    return video_file._ask_pyav(io.BytesIO(data), data[:12])


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
    options = FILES[name]
    data = make_video(**options)
    header = header_of(data)
    assert header.num_frames == num_decoded(data) == options.get("num_frames", 12)
    turned = options.get("rotation", 0) in (90, 270)
    assert (header.height, header.width) == ((64, 48) if turned else (48, 64))
    assert header.rotation == options.get("rotation", 0)
    rows, (grid, *_) = video_patches(data, small_rule, VISION)
    assert grid == sample_video(header, SMALL, VISION).grid
    assert len(rows) == math.prod(grid)


@pytest.mark.parametrize("name", FILES)
def test_the_own_header_reader_agrees_with_libavformat(name: str) -> None:
    data = make_video(**FILES[name])
    plain = read_mp4_header(io.BytesIO(data)) if video_file.is_mp4(data[:12]) else None
    theirs = by_pyav(data)
    is_plain = FILES[name].get("container", "mp4") in ("mp4", "mov") and name != "fragments"
    assert (plain is not None) == is_plain
    if plain is not None:
        assert plain.fps == pytest.approx(theirs.fps, rel=1e-9)
        assert plain.num_frames == theirs.num_frames
        assert (plain.height, plain.width) == (theirs.height, theirs.width)
        assert plain.rotation == theirs.rotation


@pytest.mark.parametrize("name", ["h264", "mpeg4", "ntsc", "index_in_front"])
def test_the_rate_is_the_one_transformers_reads(name: str) -> None:
    data = make_video(**FILES[name])
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        rate = stream.average_rate
        assert rate is not None
        assert header_of(data).fps == pytest.approx(float(rate), rel=1e-9)
        assert header_of(data).num_frames == stream.frames


def test_frames_outside_the_edit_list_are_not_counted() -> None:
    data = make_video(num_frames=20, fps=10, codec_options={"bf": "0"})
    (edit,) = [(at, size) for kind, at, size in boxes(data) if kind == b"elst"]
    assert edit[1] == 28  # one edit of 12 bytes
    scale = 10240
    cut = patched(data, b"elst", 16 + 4, struct.pack(">i", 5 * scale // 10))
    assert read_mp4_header(io.BytesIO(cut)) is None
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


# --- which frames ----------------------------------------------------------------------------


def test_transformers_takes_as_many_frames() -> None:
    sample_frames = transformers_function("qwen2_vl", "sample_frames", "Qwen2VLVideoProcessor")
    processor = SimpleNamespace(num_frames=None, fps=2, temporal_patch_size=2)
    rng = np.random.default_rng(0)
    settings = DEFAULTS
    compared = extra = 0
    for _ in range(3000):
        total = int(rng.integers(2, 20_000))
        fps = float(rng.choice([1, 5, 23.976, 25, 29.97, 30, 60, float(rng.uniform(0.5, 120))]))
        rule = (
            settings
            if rng.random() < 0.5
            else dataclasses.replace(settings, fps=1.5, max_frames=32)
        )
        metadata = SimpleNamespace(total_num_frames=total, fps=fps)
        theirs = sample_frames(
            processor, metadata, fps=rule.fps, min_frames=rule.min_frames,
            max_frames=rule.max_frames,
        ).tolist()  # fmt: skip
        count = num_sampled_frames(VideoHeader(total, fps, 1, 1), rule)
        ours = sampled_frames(total, count)
        if len(theirs) > count:  # their rounding has given one number more, after the last frame
            assert len(theirs) == count + 1
            assert theirs.pop() == total
            extra += 1
        assert len(theirs) == count
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= (total > 10_000)
        compared += 1
    assert compared == 3000
    assert 0 < extra < 300


@pytest.mark.parametrize(
    ("num_frames", "fps", "taken"),
    [
        (1, None, [0]),
        (2, 10.0, [0, 1]),
        (3, 10.0, [0, 1]),
        (5, 10.0, [0, 1, 2, 3]),
        (100, 10.0, [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95]),
        (9, 1.0, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_frames_that_are_taken(num_frames: int, fps: float | None, taken: list[int]) -> None:
    count = num_sampled_frames(VideoHeader(num_frames, fps, 8, 8), DEFAULTS)
    assert sampled_frames(num_frames, count) == taken


def test_frames_without_a_rate_are_refused() -> None:
    with pytest.raises(SampleError, match="bad_video: 7 frames without a frame rate"):
        num_sampled_frames(VideoHeader(7, None, 8, 8), DEFAULTS)


def test_grids_are_those_of_transformers() -> None:
    smart_resize = transformers_function("qwen2_vl", "smart_resize")
    rng = np.random.default_rng(1)
    for _ in range(500):
        height, width = (int(n) for n in rng.integers(20, 2500, 2))
        tokens = None if rng.random() < 0.5 else int(rng.integers(100, 20_000))
        settings = dataclasses.replace(DEFAULTS, max_tokens=tokens)
        header = VideoHeader(int(rng.integers(1, 5000)), 25.0, height, width)
        taken = num_sampled_frames(header, settings)
        max_pixels = settings.max_pixels
        if tokens is not None:  # resize() with cap_pixels_per_frame
            total = int(tokens * 28 * 28 * 0.9)
            max_pixels = max(min(max_pixels, total * 2 // taken), int(settings.min_pixels * 1.05))
        resized = smart_resize(height, width, 28, settings.min_pixels, max_pixels)
        expected = (math.ceil(taken / 2), resized[0] // 14, resized[1] // 14)
        assert sample_video(header, settings, VISION).grid == expected


@pytest.mark.parametrize("bad", [{"min_frames": 1}, {"min_pixels": 9, "max_pixels": 8}])
def test_settings_that_cannot_be(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="video_"):
        dataclasses.replace(DEFAULTS, **bad)


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


def test_patches_are_those_of_transformers_given_the_same_frames() -> None:
    patchify = transformers_function("qwen2_vl", "patchify", "Qwen2VLVideoProcessor")
    data = make_video(num_frames=25, fps=10, width=150, height=100)
    header = header_of(data)
    rows, (grid, *_) = video_patches(data, small_rule, VISION)
    frames = decode_frames(data, header, sampled_frames(25, num_sampled_frames(header, SMALL)))
    size = (grid[2] * 14, grid[1] * 14)
    resized = [np.asarray(f.resize(size, Image.Resampling.BICUBIC)) for f in frames]
    table = torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(v)[:, None, None] for v in (VISION.mean, VISION.std))
    expected, *their_grid = patchify(None, ((table - mean) / std)[None], 14, 2, 2)
    assert tuple(their_grid) == grid
    values = normalisation(VISION).values(rows)
    np.testing.assert_allclose(values, expected[0].numpy(), atol=1e-6)


def test_torchs_resize_differs_from_pillows_by_rounding_only() -> None:
    """transformers resizes frames as tensors, which torchvision hands to this function."""
    frame = draw_frame(3, 150, 100)
    ours = np.asarray(Image.fromarray(frame).resize((112, 84), Image.Resampling.BICUBIC))
    tensor = torch.from_numpy(frame).permute(2, 0, 1)[None]
    theirs = F.interpolate(tensor, size=(84, 112), mode="bicubic", antialias=True)[0]
    difference = np.abs(theirs.permute(1, 2, 0).numpy().astype(int) - ours)
    assert difference.max() <= 1


def test_an_odd_number_of_frames_repeats_the_last() -> None:
    data = make_video(num_frames=1)
    rows, (grid, _, seconds, _) = video_patches(data, small_rule, VISION)
    assert grid[0] == 1
    halves = rows.reshape(len(rows), 3, 2, 196)
    np.testing.assert_array_equal(halves[:, :, 0], halves[:, :, 1])
    assert seconds > 0


def test_seconds_per_grid() -> None:
    header = VideoHeader(100, 25.0, 8, 8)
    assert seconds_per_grid(header, 8, 2) == 1.0
    assert seconds_per_grid(VideoHeader(1, None, 8, 8), 1, 2) == 1.0


def test_sampling_is_defined_for_every_length() -> None:
    for total, count in itertools.product(range(1, 60), range(1, 60)):
        if count <= total:
            numbers = sampled_frames(total, count)
            assert numbers == sorted(set(numbers))
            assert 0 <= numbers[0] <= numbers[-1] < total

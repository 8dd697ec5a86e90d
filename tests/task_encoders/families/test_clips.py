"""Options of single images and videos: the frames and sizes that they ask for, in which families,
and on the way from a record to a row."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offline_packing.errors import StageError
from offline_packing.export.export import export
from offline_packing.index.measured import hash_sample
from offline_packing.layouts import LAYOUTS
from offline_packing.measure.identity import digest_sample, hash_content
from offline_packing.sources.options import FieldMap
from offline_packing.sources.reading.locators import to_json
from task_encoders.media.video_file import VideoHeader
from task_encoders.packs.pack import restore_pack
from task_encoders.packs.pack_format import PackedSubSample, pack_json
from task_encoders.records.record import load_json, to_sample
from task_encoders.samples import SampleError, SourceSample, Turn
from task_encoders.samples.medium_options import MediumOptions, read_options
from tests.helpers.clips import clip_of, draw_options, frame_range
from tests.helpers.datasets import pack_all
from tests.helpers.tiny_families import encoder_of
from tests.scenarios import SCENARIOS
from tests.world import World

READING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava_onevision_1_5")
SMALL = {"video_min_pixels": 4 * 32**2, "video_max_pixels": 40 * 32**2}
CLIP = MediumOptions(video_start=1, video_end=2.5)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])  # the others' rules are theirs
def test_frames_and_sizes_follow_the_rule(family: str, world: World) -> None:
    encoder = encoder_of(
        world.tokenizer(family), **SMALL, min_pixels=4 * 32**2, max_pixels=50 * 32**2
    )
    rng = np.random.default_rng(3)
    set_aside = 0
    for _ in range(300):
        total, fps = int(rng.integers(2, 200)), float(rng.choice([1, 5, 23.976, 25, 29.97]))
        height, width = (int(one) for one in rng.integers(30, 400, 2))
        header = VideoHeader(total, fps, height, width)
        options = draw_options(rng, total / fps, encoder.vision.factor)
        expected = clip_of(encoder, header, options)
        set_aside += expected is None
        if expected is None:
            with pytest.raises(SampleError, match="bad_record: option"):
                encoder.for_medium(options).sample_video(header)
            continue
        found = encoder.for_medium(options).sample_video(header)
        assert (list(found.frames), found.grid) == expected
        first, last = frame_range(options.given, total, fps) or (0, 0)
        rate = np.float32(2 / (len(found.frames) / (last - first + 1) * fps))
        assert found.seconds_per_step == rate
    assert 10 < set_aside < 150


def test_families_that_read_no_options_set_the_sample_aside(folder: Path) -> None:
    encoder = encoder_of(folder)
    image = SourceSample("a", "vqa", (Turn("q", "a"),), ("i",))
    asked = replace(image, options=(MediumOptions(max_pixels=12 * 28**2),))
    if folder.name in READING:
        sizes = [(400, 400)]
        assert encoder.measure(asked, sizes).grid_thw < encoder.measure(image, sizes).grid_thw
        limited = encoder_of(folder, max_pixels=12 * 28**2)
        assert encoder.measure(asked, sizes) == limited.measure(image, sizes)
        assert encoder.for_medium(MediumOptions()) is encoder
    else:
        with pytest.raises(SampleError, match=r"reads no options of a medium \(max_pixels\)"):
            encoder.measure(asked, [(400, 400)])


@pytest.mark.parametrize(
    ("kind", "part", "expected"),
    [
        ("video", {"fps": 1, "video": "a.mp4", "type": "video"}, MediumOptions(fps=1)),
        ("video", {"fps": "0.5", "video_start": None}, MediumOptions(fps=0.5)),
        ("video", {"nframes": 4.0, "video_end": 7}, MediumOptions(nframes=4, video_end=7)),
        (
            "image",
            {"min_pixels": 100, "max_pixels": 100},
            MediumOptions(None, *[None] * 3, 100, 100),
        ),
        ("image", {"max_pixels": 0}, "'max_pixels' of a medium is 0, not a whole number above 0"),
        ("image", {"fps": 1}, r"'fps' of a medium \(image\) is not packed"),
        ("video", {"total_pixels": 9}, r"'total_pixels' of a medium \(video\) is not packed"),
        ("image", {"resized_height": 28}, "'resized_height' of a medium"),
        ("video", {"fps": True}, "'fps' of a medium is True, not a number above 0"),
        ("video", {"fps": 1, "nframes": 8}, "both options 'fps' and 'nframes'"),
        ("video", {"nframes": 7.5}, "'nframes' of a medium is 7.5, not a whole number"),
        ("video", {"max_frames": 1}, "not a whole number above 1"),
        ("video", {"video_start": "1:30"}, "'video_start' of a medium is '1:30', not a number"),
        ("video", {"video_end": float("nan")}, "'video_end' of a medium is nan"),
        ("video", {"min_frames": 9, "max_frames": 8}, "min_frames 9 > max_frames 8"),
    ],
)
def test_options_are_read_or_refused_by_name(kind: str, part: Any, expected: Any) -> None:
    if isinstance(expected, MediumOptions):
        assert read_options(part, kind) == expected
        assert bool(expected)
        return
    with pytest.raises(ValueError, match=expected):
        read_options(part, kind)


FIELDS = {"video_start": "start", "video_end": "end", "fps": "rate"}


def part(name: str | None, **options: Any) -> dict[str, Any]:
    return {"type": "video", "video": name, **options}


@pytest.mark.parametrize(
    ("parts", "beside", "expected"),
    [
        ([part("a", fps=1), part("a", video_end=2)], {}, [{"fps": 1}, {"video_end": 2}]),
        ([part("a"), part("b")], {"start": None, "fps": 9}, [{}, {}]),
        ([part(None, fps=1)], {"videos": ["a"]}, [{"fps": 1}]),
        ([part("a")], {"start": 1, "end": "2.5", "rate": 2}, [{"fps": 2, **CLIP.given}]),
        ([part("a", nframes=4)], {"start": 0}, [{"nframes": 4, "video_start": 0}]),
        ([part("a"), part("a")], {"start": [1, None]}, [{"video_start": 1}, {}]),
        ([part("a"), part("a")], {"start": 1}, "1 values of 'video_start' for 2 videos"),
        ([part("a", nframes=4)], {"rate": 1}, "both options 'fps' and 'nframes'"),
        ([part("a", resized_width=28)], {}, "option 'resized_width'"),
        ([{"type": "image", "image": "a", "max_pixels": 9}], {"rate": 1}, [{"max_pixels": 9}]),
    ],
)
def test_options_in_messages_and_columns(parts: Any, beside: Any, expected: Any) -> None:
    asked = {"role": "user", "content": parts}
    record = {"messages": [asked, {"role": "assistant", "content": "It."}], **beside}
    fields = FieldMap(FIELDS)
    content = fields.apply(record)
    absent = {one for one in FIELDS.values() if beside.get(one) is None}
    assert {one.rpartition("=")[2] for one in fields.missing(content)} == absent
    if isinstance(expected, str):
        with pytest.raises(SampleError, match=f"bad_record: {expected}|bad_record: a video has"):
            to_sample(content, "k", "bmr")
        return
    sample = to_sample(content, "k", "bmr")
    assert [one.given for one in sample.media_options] == expected
    assert bool(sample.options) == any(expected)
    again = to_sample(load_json(to_json(sample)), "k", "bmr")
    assert again == sample
    count = len(sample.videos)
    packed = PackedSubSample(sample, ("jpg",) * len(sample.images) + ("mp4",) * count, 9)
    (stored,) = restore_pack(pack_json([packed], "bmr"), "p").sub_samples
    assert isinstance(stored, SourceSample)
    assert stored.options == sample.options
    plain = replace(sample, options=())
    for identity in (
        lambda one: hash_sample(one, [1] * len(one.media)),
        lambda one: hash_content(one, []),
        lambda one: digest_sample(one, [b""]),
    ):
        assert (identity(plain) != identity(sample)) == any(expected)


def test_what_cannot_hold_options_refuses_them(world: World, tmp_path: Path) -> None:
    clip = SourceSample("a", "bmr", (Turn("q", "a"),), ("i",), options=(MediumOptions(None, 4),))
    for name, layout in LAYOUTS.items():
        found = layout.unfit(clip, [(56, 56)], {})
        assert found == (None if name == "energon" else "options of single images or videos")
    run = SCENARIOS["clips"].run(world, tmp_path / "out", pack={"share_prefixes": False})
    pack_all(run)
    for kind in ("raw", "nemo"):
        with pytest.raises(StageError, match="options of single images or videos"):
            export(run.workspace.root, tmp_path / kind, kind)

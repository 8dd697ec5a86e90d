"""Pack JSON: round trips in both forms, the layouts others write, and what cannot be aligned."""

import json
from dataclasses import replace
from typing import Any

import pytest

from task_encoders.packs.pack import PackFormatError, match_images, parse_json, restore_pack
from task_encoders.packs.pack_format import (
    PackedSubSample,
    image_extension,
    media_part_names,
    pack_json,
    pack_key,
    video_extension,
)
from task_encoders.samples import SampleError, SourceSample, Turn


def sub(key: str, task: str, turns: int, images: int, system: str | None = None) -> PackedSubSample:
    sample = SourceSample(
        key,
        task,
        tuple(Turn(f"q{i} of {key}", f"a{i} of {key}") for i in range(turns)),
        tuple(f"path/{key}_{i}.jpg" for i in range(images)),
        system,
    )
    return PackedSubSample(sample, ("jpg",) * images, num_tokens=10 + turns)


PACKS = {
    "flat captioning": ("captioning", [sub("a", "captioning", 1, 1), sub("b", "captioning", 1, 1)]),
    "flat vqa": ("vqa", [sub("a:1", "vqa", 1, 1), sub("b/图", "vqa", 1, 1)]),
    "vqa with text only": ("vqa", [sub("a", "vqa", 1, 1), sub("b", "vqa", 1, 0)]),
    "vqa with two images": ("vqa", [sub("a", "vqa", 1, 2)]),
    "bmr": (
        "bmr",
        [sub("a", "bmr", 3, 1), sub("b", "bmr", 1, 0, "Be brief."), sub("c", "bmr", 2, 2)],
    ),
}


TOOLS = '[{"type": "function", "function": {"name": "f"}}]'
RICH = (
    Turn("q", "", thought="t", calls=('{"name": "f", "arguments": {}}',)),
    Turn("2", "a", role="tool", before=(("tool", "1"), ("system", "s")), weight=0),
    Turn("q", "a"),
)


def test_tools_thoughts_and_weights_are_kept() -> None:
    rich = replace(sub("a", "bmr", 1, 0).sample, turns=RICH, tools=TOOLS)
    plain = sub("b", "bmr", 2, 0)
    packed = json.loads(pack_json([PackedSubSample(rich, (), 9), plain], "bmr"))
    restored = restore_pack(packed, "ps_0").sub_samples
    assert restored == (rich, plain.sample)
    assert packed["meta"]["turns"][1] is None
    assert packed["captions"][0] == ["", "a", "a"]
    assert {"tools", "turns"}.isdisjoint(json.loads(pack_json([plain], "bmr"))["meta"])


@pytest.mark.parametrize(
    "details",
    [
        5,
        [[{}]],
        [["x"], None],
        [[{"role": "assistant"}], None],
        [[{"unknown": 1}], None],
        [[{"before": [["tool"]]}], None],
        [[{"calls": "f"}], None],
        *([[{"calls": [call]}], None] for call in (5, "[", "[1]", "{}")),
        [[{"trained": 0}], None],
    ],
)
def test_details_that_are_none_set_their_sub_sample_aside(details: Any) -> None:
    packed = json.loads(pack_json([sub("a", "bmr", 1, 0), sub("b", "bmr", 1, 0)], "bmr"))
    packed["meta"]["turns"] = details
    try:
        first, second = restore_pack(packed, "ps_0").sub_samples
    except PackFormatError:
        assert details in (5, [[{}]])
        return
    assert isinstance(first, SampleError)
    assert isinstance(second, SourceSample)


@pytest.mark.parametrize("name", PACKS)
def test_round_trip(name: str) -> None:
    """The nested form is used only where it is needed, and videos are named only where they are."""
    task, subs = PACKS[name]
    data = pack_json(subs, task)
    record = json.loads(data)
    assert list(record) == ["images", "prompt", "captions", "meta"]
    for column in ("images", "prompt", "captions"):
        assert {isinstance(entry, list) for entry in record[column]} == {"flat" not in name}
    restored = restore_pack(data, "ps_0")
    assert restored.task == task
    assert restored.keys == tuple(s.sample.key for s in subs)
    assert restored.num_tokens == tuple(s.num_tokens for s in subs)
    names = iter(media_part_names([e for s in subs for e in s.extensions]))
    for before, after in zip(subs, restored.sub_samples, strict=True):
        assert isinstance(after, SourceSample)
        assert after.turns == before.sample.turns
        assert after.system == before.sample.system
        assert after.images == tuple(next(names) for _ in before.sample.images)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (pack_key(42), "ps_00000042"),
        (pack_key(42, "cap_"), "cap_ps_00000042"),
        (media_part_names(["jpg", "png"]), ["img000.jpg", "img001.png"]),
        (image_extension("photo.v2.JPG", "JPEG"), "jpg"),
        (image_extension("photo.pkl", "PNG"), "png"),
        (image_extension("no extension", "JPEG"), "jpg"),
        (video_extension("a.MP4", "mp4"), "mp4"),
        (video_extension("a.mov", "mp4"), "mov"),
        (video_extension("a.bin", "webm"), "webm"),
        (video_extension("x", "avi"), "avi"),
    ],
)
def test_the_documented_names(found: object, expected: object) -> None:
    assert found == expected


def of_others(number: int, prompt: str, answer: str, task: str, **media: Any) -> SourceSample:
    return SourceSample(f"p/{number}", task, (Turn(prompt, answer),), **media)


CAPTION = of_others(0, "", "x", "captioning", images=("img0.jpg",))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            {
                "images": ["img0.jpg", ""],
                "prompts": ["<image>\nWhat?", "Hi"],
                "captions": ["a", "b"],
            },
            [
                of_others(0, "<image>\nWhat?", "a", "vqa", images=("img0.jpg",)),
                of_others(1, "Hi", "b", "vqa"),
            ],
        ),
        (
            {"videos": ["vid0.mp4", None], "prompts": ["<video>?", "b"], "captions": ["x", "y"]},
            [
                of_others(0, "<video>?", "x", "vqa", videos=("vid0.mp4",)),
                of_others(1, "b", "y", "vqa"),
            ],
        ),
        (
            {"images": ["", None, [], [""]], "prompt": ["q"] * 4, "captions": ["a"] * 4},
            [of_others(i, "q", "a", "vqa") for i in range(4)],
        ),
        ({"images": ["img0.jpg"], "captions": ["x"]}, [CAPTION]),
        ({"images": ["img0.jpg"], "captions": ["x"], "prompts": []}, [CAPTION]),
        ({"images": ["img0.jpg"], "captions": ["x"], "prompt": None, "prompts": []}, [CAPTION]),
    ],
)
def test_packs_written_by_others_are_read(
    record: dict[str, Any], expected: list[SourceSample]
) -> None:
    task = None if expected == [CAPTION] else expected[0].task
    restored = restore_pack(record, "p", task)
    assert [*restored.sub_samples] == expected
    assert (restored.task, restored.num_tokens) == (None, None)


def test_codec_input_of_llava_onevision_2_is_refused_by_name() -> None:
    """Its images are cut out of frames, and `patch_positions` say from where; `fps` makes its
    encoder write all images of a sample as frames of one video."""
    record = {
        "images": [["a.jpg"]] * 4,
        "prompts": [["<image>What?"]] * 4,
        "captions": [["That."]] * 4,
        "patch_positions": [[""], ["a.npy"], [""], []],
        "fps": [None, None, [30], None],
    }
    first, codec, rate, last = restore_pack(record, "ps_1", "bmr").sub_samples
    assert isinstance(first, SourceSample)
    assert isinstance(last, SourceSample)
    for found, name in ((codec, "patch_positions"), (rate, "fps")):
        assert isinstance(found, SampleError)
        assert found.detail == f"codec input ({name} of LLaVA-OneVision-2) is not packed"


def test_images_are_matched_with_members() -> None:
    members = [f"img{i}.jpg" for i in (0, 10, 1)]
    assert match_images(["img1.jpg", "img9.jpg"], "ps_7", members) == {"img1.jpg": "img1.jpg"}
    assert match_images([["ps_7.img10.jpg"], []], "ps_7", members) == {
        "ps_7.img10.jpg": "img10.jpg"
    }
    paths = ["/data/b.jpg", "/data/a.jpg", "/data/a.jpg"]
    assert match_images(paths[:2], "ps_7", members) == {paths[0]: "img0.jpg", paths[1]: "img1.jpg"}
    padded = ["img000.png", "img002.png"]
    assert match_images(["x/a.png", "", "x/c.png"], "ps_7", padded) == {
        "x/a.png": "img000.png",
        "x/c.png": "img002.png",
    }
    placed = ["img0_0.jpg", "img2_1.jpg", "img2_0.jpg"]  # by sub-sample, as LLaVA-OneVision-2
    assert match_images([["a"], [], ["b", "c", "lost"]], "ps_7", placed) == {
        "a": "img0_0.jpg",
        "b": "img2_0.jpg",
        "c": "img2_1.jpg",
    }
    # Not by number: some names are members, or the pack is nested and numbers could be off.
    assert match_images(["img0.jpg", "lost.jpg"], "ps_7", members) == {"img0.jpg": "img0.jpg"}
    assert match_images([["x/a.jpg"], ["x/b.jpg"]], "ps_7", members) == {}
    assert match_images(None, "ps_7", members) == {}
    assert match_images([3], "ps_7", members) == {}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"images": [[]], "prompt": [["q"]], "captions": [["a", "b"]]}, "bad_record"),
        ({"images": [[]], "prompt": [["q"]], "captions": [[" "]]}, "empty_answer"),
        ({"images": [[]], "prompt": [["q"]], "captions": [[3]]}, "bad_record"),
        ({"images": [[]], "prompt": [[]], "captions": [[]]}, "bad_record"),
        ({"images": [[None]], "prompt": [["q"]], "captions": [["a"]]}, "bad_record"),
        (
            {"images": [["a", "b"]], "prompt": [["<image>"]], "captions": [["x"]]},
            "image_count_mismatch",
        ),
    ],
)
def test_a_bad_sub_sample_is_an_entry_and_not_the_end_of_its_pack(
    record: dict, reason: str
) -> None:
    good = {"images": [], "prompt": ["q"], "captions": ["a"]}
    both = {name: [*record[name], good[name]] for name in good}
    first, second = restore_pack(both, "ps_0", "bmr").sub_samples
    assert isinstance(first, SampleError)
    assert first.reason == reason
    assert isinstance(second, SourceSample)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"images": [], "captions": "x"},
        {"images": ["a"], "captions": ["x", "y"]},
        {"videos": ["a"], "captions": ["x", "y"]},
        {"images": ["a"], "captions": ["x"], "prompt": ["p", "q"]},
        {"images": ["a"], "captions": ["x"], "meta": {"keys": ["p", "q"]}},
        {"images": ["a"], "captions": ["x"], "meta": {"num_tokens": []}},
        {"images": ["a"], "captions": ["x"], "meta": {"num_tokens": None}},
        {"images": ["a"], "captions": ["x"], "meta": {"keys": 1}},
        {"images": ["a"], "captions": ["x"], "meta": {"system": True}},
        {"images": ["a"], "captions": ["x"], "meta": [1]},
        {"images": ["a"], "captions": ["x"], "meta": {"task": "captioninf"}},
    ],
)
def test_lists_that_cannot_be_aligned_are_refused(record: dict) -> None:
    with pytest.raises(PackFormatError, match="ps_0"):
        restore_pack(record, "ps_0", None)


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": NaN}'])
def test_bytes_that_are_no_object_are_refused(data: bytes) -> None:
    with pytest.raises(PackFormatError, match="ps_0"):
        parse_json(data, "ps_0")


def with_videos(key: str, images: int, videos: tuple[str, ...]) -> PackedSubSample:
    names = tuple(f"{i}.jpg" for i in range(images)), tuple(f"{i}" for i in range(len(videos)))
    sample = SourceSample(key, "vqa", (Turn("q", "a"),), names[0], None, names[1])
    return PackedSubSample(sample, ("jpg",) * images + videos, num_tokens=9)


def test_a_pack_with_videos() -> None:
    subs = [
        with_videos("a", 1, ("mp4", "webm")),
        with_videos("b", 0, ()),
        with_videos("c", 1, ("mov",)),
    ]
    names = media_part_names([extension for sub in subs for extension in sub.extensions])
    assert names == ["img000.jpg", "vid000.mp4", "vid001.webm", "img001.jpg", "vid002.mov"]
    data = pack_json(subs, "vqa")
    record = json.loads(data)
    assert record["images"] == [["img000.jpg"], [], ["img001.jpg"]]
    assert record["videos"] == [["vid000.mp4", "vid001.webm"], [], ["vid002.mov"]]
    assert record["prompt"] == [["q"], ["q"], ["q"]]
    restored = restore_pack(data, "ps_0").sub_samples
    assert [sub.videos for sub in restored if isinstance(sub, SourceSample)] == [
        ("vid000.mp4", "vid001.webm"),
        (),
        ("vid002.mov",),
    ]

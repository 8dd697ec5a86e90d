"""Pack JSON: round trips in both forms, the layouts others write, and what cannot be aligned."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from task_encoders.packs.pack import PackFormatError, match_images, restore_pack
from task_encoders.packs.pack_format import (
    PackedSubSample,
    image_extension,
    media_part_names,
    pack_json,
    pack_key,
    video_extension,
)
from task_encoders.samples import TASKS, SampleError, SourceSample, Turn
from task_encoders.samples.medium_options import MediumOptions

texts = st.text("ab .<>é图\n", max_size=8)
answers = texts.map("A{}".format)
others = st.tuples(st.sampled_from(["tool", "system"]), texts)
CALL = '{"name": "f", "arguments": {}}'
turns = st.builds(Turn, texts, answers) | st.builds(
    Turn,
    texts,
    st.just("") | answers,
    role=st.sampled_from(["user", "tool"]),
    before=st.lists(others, max_size=2).map(tuple),
    thought=st.none() | texts,
    calls=st.just((CALL,)),
    weight=st.sampled_from([1.0, 0.25, 0.0]),
)


@st.composite
def packs(draw: Any) -> tuple[str, list[PackedSubSample]]:
    """A task, and sub-samples whose media are named as they are in their pack."""
    task, subs = draw(st.sampled_from(TASKS)), []
    captions = st.builds(Turn, texts, answers)
    images, videos = itertools.count(), itertools.count()
    for number in range(draw(st.integers(1, 4))):
        kinds = draw(st.sampled_from(["p", "p", "p", "", "pp", "v", "pvv"]))
        names = tuple(f"img{next(images):03d}.png" for _ in range(kinds.count("p")))
        clips = tuple(f"vid{next(videos):03d}.mp4" for _ in range(kinds.count("v")))
        several = captions if task == "captioning" else turns
        said = draw(st.lists(several, min_size=1, max_size=1 if several is captions else 3))
        tools = draw(st.sampled_from(["", "[]"])) if several is turns else ""
        options = (MediumOptions(max_pixels=9),) * len(kinds) if draw(st.booleans()) else ()
        own = tuple(said), names, draw(st.none() | texts), clips, tools, options
        extensions = ("png",) * len(names) + ("mp4",) * len(clips)
        subs.append(PackedSubSample(SourceSample(f"{number}/图", task, *own), extensions, number))
    return task, subs


@given(packs())
def test_round_trip(pack: tuple[str, list[PackedSubSample]]) -> None:
    """The nested form, lists of videos, tools, … are written only where they are needed."""
    task, subs = pack
    samples = tuple(sub.sample for sub in subs)
    record = json.loads(data := pack_json(subs, task))
    restored = restore_pack(data, "ps_0")
    assert restored.sub_samples == samples
    assert (restored.task, restored.keys) == (task, tuple(sample.key for sample in samples))
    assert restored.num_tokens == tuple(range(len(subs)))
    has_videos = any(sample.videos for sample in samples)
    assert ("videos" in record) == has_videos
    is_flat = task != "bmr" and all(len(one.images) == len(one.turns) == 1 for one in samples)
    for column in ("images", "prompt", "captions"):
        assert isinstance(record[column][0], str) == (is_flat and not has_videos)
    assert ("tools" in record["meta"]) == any(sample.tools for sample in samples)


def test_the_documented_names() -> None:
    assert [pack_key(42), pack_key(42, "cap_")] == ["ps_00000042", "cap_ps_00000042"]
    names = ["img000.jpg", "vid000.mp4", "img001.png", "vid001.webm"]
    assert media_part_names(["jpg", "mp4", "png", "webm"]) == names
    for found, expected in (
        (image_extension("photo.v2.JPG", "JPEG"), "jpg"),
        (image_extension("photo.pkl", "PNG"), "png"),
        (image_extension("no extension", "JPEG"), "jpg"),
        (video_extension("a.MP4", "mp4"), "mp4"),
        (video_extension("a.mov", "mp4"), "mov"),
        (video_extension("a.bin", "webm"), "webm"),
        (video_extension("x", "avi"), "avi"),
    ):
        assert found == expected


def of_others(number: int, prompt: str, answer: str, task: str, **media: Any) -> SourceSample:
    return SourceSample(f"p/{number}", task, (Turn(prompt, answer),), **media)


@pytest.mark.parametrize(
    ("kind", "name", "none"), [("image", "img0.jpg", ""), ("video", "vid0.mp4", None)]
)
def test_packs_written_by_others_are_read(kind: str, name: str, none: Any) -> None:
    kinds, question = f"{kind}s", f"<{kind}>\nWhat?"
    record = {kinds: [name, none], "prompts": [question, "b"], "captions": ["x", "y"]}
    shown = of_others(0, question, "x", "vqa", **{kinds: (name,)})
    restored = restore_pack(record, "p", "vqa")
    assert [*restored.sub_samples] == [shown, of_others(1, "b", "y", "vqa")]
    assert (restored.task, restored.num_tokens) == (None, None)


def test_packs_of_others_without_pictures_or_prompts() -> None:
    record = {"images": ["", None, [], [""]], "prompt": ["q"] * 4, "captions": ["a"] * 4}
    bare: dict[str, Any] = {"images": ["img0.jpg"], "captions": ["x"]}
    caption = of_others(0, "", "x", "captioning", images=("img0.jpg",))
    expected = [of_others(i, "q", "a", "vqa") for i in range(4)]
    assert [*restore_pack(record, "p", "vqa").sub_samples] == expected
    for one in (bare, bare | {"prompts": []}, bare | {"prompt": None, "prompts": []}):
        assert [*restore_pack(one, "p").sub_samples] == [caption]


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
    ("images", "prompt", "captions", "details", "reason"),
    [
        ([], ["q"], ["a", "b"], None, "bad_record"),
        ([], ["q"], [" "], None, "empty_answer"),
        ([], ["q"], [3], None, "bad_record"),
        ([], [], [], None, "bad_record"),
        ([None], ["q"], ["a"], None, "bad_record"),
        (["a", "b"], ["<image>"], ["x"], None, "image_count_mismatch"),
        *(
            ([], ["q"], ["a"], [details], "bad_record")
            for details in (
                *("x", {"role": "assistant"}, {"unknown": 1}, {"before": [["tool"]]}),
                *({"calls": "f"}, {"trained": 0}),
                *({"calls": [call]} for call in (5, "[", "[1]", "{}")),
            )
        ),
    ],
)
def test_a_bad_sub_sample_is_an_entry_and_not_the_end_of_its_pack(
    images: list[Any], prompt: list[Any], captions: list[Any], details: Any, reason: str
) -> None:
    record = {"images": [images, []], "prompt": [prompt, ["q"]], "captions": [captions, ["a"]]}
    meta = {"meta": {"turns": [details, None]}}
    first, second = restore_pack({**record, **meta}, "ps_0", "bmr").sub_samples
    assert isinstance(first, SampleError)
    assert first.reason == reason
    assert isinstance(second, SourceSample)


@pytest.mark.parametrize(
    "record",
    [
        *(b"", b"{", b"[1]", b"\xff\xfe", b'{"a": NaN}'),
        {},
        {"images": [], "captions": "x"},
        {"images": ["a"], "captions": ["x", "y"]},
        {"videos": ["a"], "captions": ["x", "y"]},
        {"images": ["a"], "captions": ["x"], "prompt": ["p", "q"]},
        *(
            {"images": ["a"], "captions": ["x"], "meta": meta}
            for meta in (
                *({"keys": ["p", "q"]}, {"keys": 1}, {"num_tokens": []}, {"num_tokens": None}),
                *({"system": True}, {"turns": 5}, {"turns": [None, None]}, {"task": "no"}, [1]),
            )
        ),
    ],
)
def test_what_is_no_object_or_cannot_be_aligned_is_refused(record: Any) -> None:
    with pytest.raises(PackFormatError, match="ps_0"):
        restore_pack(record, "ps_0", None)

"""Documents: their forms, the places of their pictures, and the sections between which they are
cut."""

import re
from typing import Any

import numpy as np
import pytest

from task_encoders.records.record import to_sample
from task_encoders.samples import (
    SampleError,
    SourceSample,
    Turn,
    check_sample,
    join_sections,
    sections,
    split_at_media,
)


def document(text: str, *images: str, videos: tuple[str, ...] = ()) -> SourceSample:
    return SourceSample("k", "captioning", (Turn("", text),), images, None, videos)


TEXT = {"type": "text", "text": "One."}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            {"text": "One. <image> Two. <image>", "images": ["a.jpg", {"path": "b.jpg"}]},
            document("One. <image> Two. <image>", "a.jpg", "b.jpg"),
        ),
        ({"caption": "One.<image>", "image": "a.jpg"}, document("One.<image>", "a.jpg")),
        ({"text": "One.", "images": ["a.jpg"]}, document("One.", "a.jpg")),
        (
            {"text": "<video>One.<image>", "image": "a.jpg", "video": "v.mp4"},
            document("<video>One.<image>", "a.jpg", videos=("v.mp4",)),
        ),
        # LLaVA-Video's mark.
        ({"text": "One.<image>", "video": "v.mp4"}, document("One.<video>", videos=("v.mp4",))),
        ({"text": "What <video> means."}, document("What <video> means.")),
        # OBELICS: a picture that was filtered out leaves two texts in a row.
        (
            {
                "images": [None, "a.jpg", None, None, None, {"path": "b.jpg"}],
                "texts": ["One.", None, "Two.", None, "Three.", None],
                "metadata": "[]",
            },
            document("One.<image>Two.\n\nThree.<image>", "a.jpg", "b.jpg"),
        ),
        # MMC4.
        (
            {
                "text_list": ["One.", "Two.", "Three."],
                "image_info": [
                    {"image_name": "c.jpg", "raw_url": "https://x", "matched_text_index": 2},
                    {"image_name": "a.jpg", "matched_text_index": 0, "matched_sim": 0.3},
                    {"image_name": "b.jpg", "matched_text_index": 2},
                ],
                "similarity_matrix": [[0.1]],
            },
            document("<image>One. Two. <image><image>Three.", "a.jpg", "c.jpg", "b.jpg"),
        ),
        # ms-swift, and Qwen's content lists.
        (
            {"messages": [{"role": "assistant", "content": "<image>One."}], "images": ["a.jpg"]},
            document("<image>One.", "a.jpg"),
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [TEXT, {"type": "image", "image": "a.jpg"}]}
                ]
            },
            document("One.<image>", "a.jpg"),
        ),
        (
            {
                "messages": [{"role": "assistant", "content": [{"type": "image"}, TEXT]}],
                "images": ["a.jpg"],
            },
            document("<image>One.", "a.jpg"),
        ),
    ],
)
def test_forms(content: dict[str, Any], expected: SourceSample) -> None:
    assert to_sample(content, "k", "captioning") == expected


@pytest.mark.parametrize(
    ("content", "task", "message"),
    [
        ({"text": "a<image>b<image>", "images": ["a.jpg"]}, "captioning", "image_count_mismatch"),
        ({"text": "a<image>b"}, "captioning", "image_count_mismatch: 1 .* name them"),
        (
            {"text": "a<video>b<video>", "videos": ["v.mp4"]},
            "captioning",
            "video_count_mismatch",
        ),
        ({"text": "<image> \n", "images": ["a.jpg"]}, "captioning", "empty_answer"),
        ({"texts": ["a"], "images": ["b", "c"]}, "captioning", "1 entries of 'texts' and 2 of"),
        ({"texts": ["a"]}, "captioning", "1 entries of 'texts' and no of 'images'"),
        ({"texts": ["a"], "images": [None]}, "bmr", "a document; set source.task=captioning"),
        (
            {"text_list": ["a"], "image_info": [{"matched_text_index": 1}]},
            "captioning",
            "names no sentence",
        ),
        ({"text_list": ["a"], "image_info": [{}]}, "captioning", "names no sentence"),
        ({"text_list": "a"}, "captioning", "not a list of texts"),
        (
            {"text_list": ["a"], "image_info": [{"matched_text_index": 0}]},
            "captioning",
            "image_count_mismatch",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a"}]},
            "bmr",
            "bad_roles: roles are assistant: .* set source.task=captioning",
        ),
        ({"messages": [{"role": "user", "content": "a"}]}, "captioning", "bad_roles"),
        (
            {"messages": [{"role": "assistant", "content": "a", "loss_weight": 0.5}]},
            "captioning",
            "a caption has no",
        ),
    ],
)
def test_what_is_refused(content: dict[str, Any], task: str, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        to_sample(content, "k", task)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\n\nb\nc\n \n\n d", ["a\n\n", "b\nc\n \n\n", " d"]),
        ("a<image>b\n\nc", ["a", "<image>b\n\n", "c"]),
        ("a\n\n<image><image> <image>b", ["a\n\n", "<image><image> <image>b"]),
        # A picture stays with the text after it, the last ones with the text before them.
        (
            "<image>\n\nb\n\n<image>\n\nc<image>\n\n",
            ["<image>\n\nb\n\n", "<image>\n\nc<image>\n\n"],
        ),
        ("\n\na\n\n", ["\n\na\n\n"]),
        ("a", ["a"]),
    ],
)
def test_sections(text: str, expected: list[str]) -> None:
    sample = document(text, *["i"] * text.count("<image>"))
    found = sections(sample)
    assert [turn.answer for turn in found] == expected
    assert [turn.truncated for turn in found] == [True] * (len(found) - 1) + [False]
    assert join_sections(sample, found) == sample.turns


def test_random_sections() -> None:
    """They are the text, each has text, and no medium ends one that is not the last."""
    rng = np.random.default_rng(0)
    pieces = ["<image>", "<video>", "a", " ", "\n", "\n\n", "\n \n"]
    several = 0
    for _ in range(3000):
        text = "".join(rng.choice(pieces, rng.integers(1, 16)))
        videos = ("v",) * (text.count("<video>") if rng.random() < 0.5 else 0)
        sample = document(text, *["i"] * text.count("<image>"), videos=videos)
        if not "".join(split_at_media(sample, text)[::2]).strip():
            with pytest.raises(SampleError, match="empty_answer"):
                check_sample(sample)
            continue
        check_sample(sample)
        found = sections(sample)
        assert join_sections(sample, found) == sample.turns
        several += len(found) > 1
        for number, turn in enumerate(found):
            texts, is_last = split_at_media(sample, turn.answer)[::2], number == len(found) - 1
            assert any(one.strip() for one in texts)
            assert is_last or texts[-1].strip()
            assert not re.search(r"\S\s*\n\s*\n\s*\S", texts[0]) or not texts[0].strip()
    assert several > 500


def test_media_in_front_are_placed() -> None:
    placed = [turn.answer for turn in sections(document("a\n\nb", "i", "j"))]
    assert placed == ["<image><image>a\n\n", "b"]

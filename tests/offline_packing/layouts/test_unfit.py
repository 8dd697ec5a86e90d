"""What other trainers' readers take otherwise than it was measured."""

from typing import Any

import pytest

from offline_packing.layouts.unfit import (
    Sizes,
    begins_with_break,
    has_control_elsewhere,
    has_control_text,
    has_empty_system,
    has_own_system,
    has_small_image,
    has_thin_image,
    is_not_plain,
    is_untrained_or_has_roles,
)
from task_encoders.samples import SourceSample, Turn
from task_encoders.text.qwen_vocabulary import QWEN_SPECIAL_TOKENS

RULES = (
    begins_with_break,
    has_control_elsewhere,
    has_control_text,
    has_empty_system,
    has_own_system,
    has_small_image,
    has_thin_image,
    is_not_plain,
    is_untrained_or_has_roles,
)


def broken(sample: SourceSample, sizes: Sizes) -> set[Any]:
    return {breaks for breaks in RULES if breaks(sample, sizes)}


ASKED = Turn("What?", "That.")
END = "<|im_end|>"
MARKED = Turn("What?", f"It ends with {END}")
VIDEO = {"videos": ("a.mp4",)}
CAPTION = {"task": "captioning", "turns": (Turn(END, "A <video> tag."),), "system": "Be brief."}


@pytest.mark.parametrize(
    ("turn", "fields", "expected"),
    [
        (ASKED, {}, set()),
        (Turn("<image> here", "That."), {}, set()),
        (Turn("<|unknown|> <tool_call> < |im_end|>", "That."), {}, set()),
        (Turn("<video>", "That."), VIDEO, set()),
        (ASKED, CAPTION, set()),  # of captions neither prompt nor system is used
        (ASKED, CAPTION | {"turns": (MARKED,)}, {has_control_text}),
        (ASKED, CAPTION | {"turns": (Turn("", "A <image> b."),)}, {has_control_text}),
        (Turn("What?", "Write <image>."), {}, {has_control_text}),
        (ASKED, {"system": "You are a helpful assistant."}, set()),
        (ASKED, {"system": ""}, {has_own_system, has_empty_system}),
        (MARKED, {"system": "Be brief."}, {has_own_system, has_control_text}),
        (ASKED, {"system": f"Never say {END}."}, {has_own_system, has_control_elsewhere}),
        (ASKED, {"tools": "[{}]"}, {is_not_plain}),
        (ASKED, {"tools": f'[{{"name": "{END}"}}]'}, {is_not_plain, has_control_elsewhere}),
        (Turn("a", "b", thought="c"), {}, {is_not_plain}),
        (Turn("a", "b", thought=END), {}, {is_not_plain, has_control_elsewhere}),
        (
            Turn("a", "b", calls=(f'{{"name": "{END}"}}',)),
            {},
            {is_not_plain, has_control_elsewhere},
        ),
        (Turn("a", "b", before=(("tool", END),)), {}, {is_not_plain, has_control_elsewhere}),
        (Turn("a", "b", weight=0), {}, {is_not_plain, is_untrained_or_has_roles}),
        (Turn("What does <video> mean?", "b"), {}, {has_control_elsewhere}),
        (Turn("<video>", "It means <video>."), VIDEO, {has_control_elsewhere}),
        (Turn("What?", " \r\nYes."), {}, {begins_with_break}),
        (Turn("What?", "  Yes.\n"), {}, set()),
    ],
)
def test_texts(turn: Turn, fields: dict[str, Any], expected: set[Any]) -> None:
    whole = {"key": "k", "task": "bmr", "turns": (Turn("First", "One"), turn), **fields}
    assert broken(SourceSample(**whole), []) == expected


def test_every_control_token_counts() -> None:
    for token in QWEN_SPECIAL_TOKENS:
        for turn in (Turn(f"a{token}b", "That."), Turn("What?", token)):
            assert broken(SourceSample("k", "vqa", (turn,)), []) == {has_control_text}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(28, 28), (29, 300)], set()),
        ([(28, 28), (4, 300)], {has_small_image}),
        ([(300, 27)], {has_small_image}),
        ([(28, 28), (1, 90)], {has_thin_image, has_small_image}),
        ([(90, 3)], {has_thin_image, has_small_image}),
    ],
)
def test_thin_and_small_images(sizes: list[tuple[int, int]], expected: set[Any]) -> None:
    sample = SourceSample("k", "bmr", (ASKED,), ("x",) * len(sizes))
    assert broken(sample, sizes) == expected

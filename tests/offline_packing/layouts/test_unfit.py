"""Properties of samples that readers of other trainers would encode differently."""

from typing import Any

import pytest

from offline_packing.layouts import unfit
from task_encoders.samples import SourceSample, Turn
from task_encoders.text.qwen_vocabulary import QWEN_SPECIAL_TOKENS

RULES = [name for name in vars(unfit) if name.startswith(("has_", "is_", "begins_"))]


def broken(sample: SourceSample, sizes: unfit.Sizes) -> set[str]:
    """Return the names of the rules that a sample breaks."""
    return {name for name in RULES if getattr(unfit, name)(sample, sizes)}


ASKED = Turn("What?", "That.")
END = "<|im_end|>"
MARKED = Turn("What?", f"It ends with {END}")
VIDEO = {"videos": ("a.mp4",)}
CAPTION = {"task": "captioning", "turns": (Turn(END, "A <video> tag."),), "system": "Be brief."}


@pytest.mark.parametrize(
    ("turn", "fields", "expected"),
    [
        (ASKED, {}, ""),
        (Turn("<image> here", "That."), {}, ""),
        (Turn("<|unknown|> <tool_call> < |im_end|>", "That."), {}, ""),
        (Turn("<video>", "That."), VIDEO, ""),
        (ASKED, CAPTION, ""),  # of captions neither prompt nor system is used
        (ASKED, CAPTION | {"turns": (MARKED,)}, "has_control_text"),
        (ASKED, CAPTION | {"turns": (Turn("", "A <image> b."),)}, "has_control_text"),
        (Turn("What?", "Write <image>."), {}, "has_control_text"),
        (ASKED, {"system": "You are a helpful assistant."}, ""),
        (ASKED, {"system": ""}, "has_own_system has_empty_system"),
        (MARKED, {"system": "Be brief."}, "has_own_system has_control_text"),
        (ASKED, {"system": f"Never say {END}."}, "has_own_system has_control_elsewhere"),
        (ASKED, {"tools": "[{}]"}, "is_not_plain"),
        (ASKED, {"tools": f'[{{"name": "{END}"}}]'}, "is_not_plain has_control_elsewhere"),
        (Turn("a", "b", thought="c"), {}, "is_not_plain"),
        (Turn("a", "b", thought=END), {}, "is_not_plain has_control_elsewhere"),
        (Turn("a", "b", calls=(f'{{"name": "{END}"}}',)), {}, "is_not_plain has_control_elsewhere"),
        (Turn("a", "b", before=(("tool", END),)), {}, "is_not_plain has_control_elsewhere"),
        (Turn("a", "b", weight=0), {}, "is_not_plain is_untrained_or_has_roles"),
        (Turn("What does <video> mean?", "b"), {}, "has_control_elsewhere"),
        (Turn("<video>", "It means <video>."), VIDEO, "has_control_elsewhere"),
        (Turn("What?", " \r\nYes."), {}, "begins_with_break"),
        (Turn("What?", "  Yes.\n"), {}, ""),
    ],
)
def test_texts(turn: Turn, fields: dict[str, Any], expected: str) -> None:
    whole = {"key": "k", "task": "bmr", "turns": (Turn("First", "One"), turn), **fields}
    assert broken(SourceSample(**whole), []) == set(expected.split())


def test_every_control_token_counts() -> None:
    for token in QWEN_SPECIAL_TOKENS:
        for turn in (Turn(f"a{token}b", "That."), Turn("What?", token)):
            assert broken(SourceSample("k", "vqa", (turn,)), []) == {"has_control_text"}


def test_thin_and_small_images() -> None:
    for other, expected in (
        ((29, 300), ""),
        ((4, 300), "has_small_image"),
        ((300, 27), "has_small_image"),
        ((1, 90), "has_thin_image has_small_image"),
        ((90, 3), "has_thin_image has_small_image"),
    ):
        sample = SourceSample("k", "bmr", (ASKED,), ("x", "y"))
        assert broken(sample, [(28, 28), other]) == set(expected.split())

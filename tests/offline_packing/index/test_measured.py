"""Each trait is found where it is, and nowhere else."""

from typing import Any

import pytest

from offline_packing.index.measured import Trait, sample_traits
from task_encoders.samples import SourceSample, Turn
from task_encoders.text.qwen_vocabulary import QWEN_SPECIAL_TOKENS

PLAIN = Trait(0)
ELSEWHERE = Trait.CONTROL_ELSEWHERE
ASKED = Turn("What?", "That.")
END = "<|im_end|>"
MARKED = Turn("What?", f"It ends with {END}")
VIDEO = {"videos": ("a.mp4",)}
CAPTION = {"task": "captioning", "turns": (Turn(END, "An <image> tag."),), "system": "Be brief."}


@pytest.mark.parametrize(
    ("turn", "fields", "expected"),
    [
        (ASKED, {}, PLAIN),
        (Turn("<image> here", "That."), {}, PLAIN),
        (Turn("<|unknown|> <tool_call> < |im_end|>", "That."), {}, PLAIN),
        (Turn("<video>", "That."), VIDEO, PLAIN),
        (ASKED, CAPTION, PLAIN),  # of captions neither prompt nor system is used
        (ASKED, CAPTION | {"turns": (MARKED,)}, Trait.CONTROL_TEXT),
        (Turn("What?", "Write <image>."), {}, Trait.CONTROL_TEXT),
        (ASKED, {"system": "You are a helpful assistant."}, PLAIN),
        (ASKED, {"system": ""}, Trait.OWN_SYSTEM | Trait.EMPTY_SYSTEM),
        (MARKED, {"system": "Be brief."}, Trait.OWN_SYSTEM | Trait.CONTROL_TEXT),
        (ASKED, {"system": f"Never say {END}."}, Trait.OWN_SYSTEM | ELSEWHERE),
        (ASKED, {"tools": "[{}]"}, Trait.NOT_PLAIN),
        (ASKED, {"tools": f'[{{"name": "{END}"}}]'}, Trait.NOT_PLAIN | ELSEWHERE),
        (Turn("a", "b", thought="c"), {}, Trait.NOT_PLAIN),
        (Turn("a", "b", thought=END), {}, Trait.NOT_PLAIN | ELSEWHERE),
        (Turn("a", "b", calls=(f'{{"name": "{END}"}}',)), {}, Trait.NOT_PLAIN | ELSEWHERE),
        (Turn("a", "b", before=(("tool", END),)), {}, Trait.NOT_PLAIN | ELSEWHERE),
        (Turn("a", "b", weight=0), {}, Trait.NOT_PLAIN | Trait.UNTRAINED_OR_ROLES),
        (Turn("What does <video> mean?", "b"), {}, ELSEWHERE),
        (Turn("<video>", "It means <video>."), VIDEO, ELSEWHERE),
        (Turn("What?", " \r\nYes."), {}, Trait.BREAK_FIRST),
        (Turn("What?", "  Yes.\n"), {}, PLAIN),
    ],
)
def test_texts(turn: Turn, fields: dict[str, Any], expected: Trait) -> None:
    whole = {"key": "k", "task": "bmr", "turns": (Turn("First", "One"), turn), **fields}
    assert sample_traits(SourceSample(**whole), []) == expected


def test_every_control_token_counts() -> None:
    for token in QWEN_SPECIAL_TOKENS:
        for turn in (Turn(f"a{token}b", "That."), Turn("What?", token)):
            assert sample_traits(SourceSample("k", "vqa", (turn,)), []) == Trait.CONTROL_TEXT


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(2, 2), (4, 300)], PLAIN),
        ([(28, 28), (1, 90)], Trait.THIN_IMAGE),
        ([(90, 3)], Trait.THIN_IMAGE),
    ],
)
def test_thin_images(sizes: list[tuple[int, int]], expected: Trait) -> None:
    sample = SourceSample("k", "bmr", (ASKED,), ("x",) * len(sizes))
    assert sample_traits(sample, sizes) == expected

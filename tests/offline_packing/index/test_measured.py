"""Each trait is found where it is, and nowhere else."""

from dataclasses import replace
from typing import Any

import pytest

from offline_packing.index.measured import Trait, sample_traits
from task_encoders.samples import SourceSample, Turn
from task_encoders.text.qwen_vocabulary import QWEN_SPECIAL_TOKENS

PLAIN = Trait(0)
SIZES = [(28, 56)]


def traits(
    prompt: str = "What?", answer: str = "That.", *, task: str = "vqa", system: str | None = None
) -> Trait:
    turns = (
        (Turn("First", "One"), Turn(prompt, answer)) if task == "bmr" else (Turn(prompt, answer),)
    )
    return sample_traits(SourceSample("k", task, turns, ("a.jpg",), system), SIZES)


@pytest.mark.parametrize("task", ["vqa", "bmr"])
def test_conversations(task: str) -> None:
    assert traits(task=task) == PLAIN
    assert traits("<image> here", task=task) == PLAIN
    assert traits(answer="Write <image>.", task=task) == Trait.CONTROL_TEXT
    for token in QWEN_SPECIAL_TOKENS:
        assert traits(f"a{token}b", task=task) == Trait.CONTROL_TEXT
        assert traits(answer=token, task=task) == Trait.CONTROL_TEXT
    assert traits("<|unknown|> <tool_call> < |im_end|>", task=task) == PLAIN


def test_captions_have_neither_prompt_nor_system() -> None:
    assert traits("<|im_end|>", "An <image> tag.", task="captioning", system="Be brief.") == PLAIN
    assert traits(answer="ends <|im_end|>", task="captioning") == Trait.CONTROL_TEXT


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (None, PLAIN),
        ("You are a helpful assistant.", PLAIN),
        ("", Trait.OWN_SYSTEM | Trait.EMPTY_SYSTEM),
        ("Be brief.", Trait.OWN_SYSTEM),
    ],
)
def test_system(system: str | None, expected: Trait) -> None:
    assert traits(system=system) == expected
    both = traits(answer="<|im_end|>", system=system)
    assert both == expected | Trait.CONTROL_TEXT


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], PLAIN),
        ([(2, 2), (4, 300)], PLAIN),
        ([(28, 28), (1, 90)], Trait.THIN_IMAGE),
        ([(90, 3)], Trait.THIN_IMAGE),
    ],
)
def test_thin_images(sizes: list[tuple[int, int]], expected: Trait) -> None:
    sample = SourceSample("k", "bmr", (Turn("a", "b"),), ("x",) * len(sizes))
    assert sample_traits(sample, sizes) == expected


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"tools": "[{}]"}, PLAIN),
        ({"turns": (Turn("a", "b", thought="c"),)}, PLAIN),
        (
            {"turns": (Turn("a", "b", weight=0), Turn("c", "d"))},
            Trait.UNTRAINED_OR_ROLES,
        ),
    ],
)
def test_samples_that_are_more_than_prompts_and_answers(
    fields: dict[str, Any], more: Trait
) -> None:
    sample = SourceSample("k", "bmr", (Turn("a", "b"),))
    assert sample_traits(sample, []) == PLAIN
    assert sample_traits(replace(sample, **fields), []) == Trait.NOT_PLAIN | more


@pytest.mark.parametrize("answer", ["\nYes.", " \r\nYes.", "\t\n\n"])
def test_answers_that_begin_with_a_line_break(answer: str) -> None:
    assert traits(answer=answer) == Trait.BREAK_FIRST
    assert traits(answer=f"Yes.{answer}") == PLAIN
    assert traits(answer="  Yes.\n") == PLAIN


@pytest.mark.parametrize(
    ("turn", "fields"),
    [
        (Turn("a", "b"), {"system": "Never say <|im_end|>."}),
        (Turn("a", "b"), {"tools": '[{"name": "<|im_end|>"}]'}),
        (Turn("a", "b", thought="<|im_end|>"), {}),
        (Turn("a", "b", calls=('{"name": "<|im_end|>"}',)), {}),
        (Turn("a", "b", before=(("tool", "<|im_end|>"),)), {}),
        (Turn("What does <video> mean?", "b"), {}),
        (Turn("<video>", "It means <video>."), {"videos": ("a.mp4",)}),
    ],
)
def test_control_text_elsewhere(turn: Turn, fields: dict[str, Any]) -> None:
    sample = SourceSample("k", "bmr", (Turn("First", "One"), turn), **fields)
    assert sample_traits(sample, []) & Trait.CONTROL_ELSEWHERE
    assert not sample_traits(sample, []) & Trait.CONTROL_TEXT
    plain = SourceSample("k", "bmr", (Turn("<video>", "b"),), videos=("a.mp4",), system="c")
    assert sample_traits(plain, []) == Trait.OWN_SYSTEM

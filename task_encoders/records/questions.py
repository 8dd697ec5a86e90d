"""The prompts and answers of a record without messages, and the earlier turns that it names."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import orjson

from task_encoders.records.messages import kind_of
from task_encoders.samples import SampleError, Turn

DIALOGUE_FIELDS: Final = ("messages", "conversations", "texts")
PROMPT_FIELDS: Final = ("question", "prompt", "instruction", "query", "context")
#: Prompts of Alpaca's records and ms-swift's, and what only these have beside them.
_INSTRUCTIONS: Final = ("instruction", "query")
INPUT, HISTORY = "input", "history"
_ANSWERS: Final = ("answer", "answers")
_OUTPUTS: Final = ("output", "response")
_CAPTIONS: Final = ("captions", "caption")
ANSWER_FIELDS: Final = (*_ANSWERS, *_CAPTIONS, "text", *_OUTPUTS)


def read_turns(content: Mapping[str, Any], task: str) -> list[Turn]:
    """The turns of a record. Raises SampleError: bad_record."""
    is_caption = task == "captioning"
    names = answer_fields(task)
    answers = _texts(content, names)
    if answers is None:
        raise SampleError("bad_record", f"none of {quoted((*DIALOGUE_FIELDS, *names))}")
    prompts = _texts(content, PROMPT_FIELDS)
    if prompts is None:
        if not is_caption:
            raise SampleError(
                "bad_record", f"no prompt: none of {quoted(PROMPT_FIELDS)}; is it a caption?"
            )
        prompts = [""] * len(answers)
    if len(prompts) == 1 and first_field(content, names) == "answers":
        answers = answers[:1]  # of several to one prompt the first; lost_fields.py reports it
    if len(prompts) != len(answers):
        raise SampleError("bad_record", f"{len(prompts)} prompts for {len(answers)} answers")
    turns = list(zip(prompts, answers, strict=True))
    if (name := first_field(content, PROMPT_FIELDS)) in _INSTRUCTIONS:
        turns = _instructed(content, name, turns)
    return [Turn(*turn) for turn in turns]


def _instructed(
    content: Mapping[str, Any], name: str, turns: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Turns of an instruction record: its history, then the instruction with its input."""
    if name == "instruction" and content.get(INPUT):
        given = content[INPUT]
        if not isinstance(given, str) or len(turns) > 1:
            raise SampleError("bad_record", f"{INPUT!r} is {kind_of(given)} for {len(turns)} turns")
        turns = [(with_input(prompt, given), answer) for prompt, answer in turns]
    before = read_history(content.get(HISTORY))
    if not all(isinstance(text, str) for turn in before for text in turn):
        raise SampleError("bad_record", f"{HISTORY!r} holds something other than text")
    return [*((prompt, answer) for prompt, answer in before), *turns]


def read_history(history: Any) -> list[list[Any]]:
    """The earlier turns of Alpaca's records and ms-swift's, a list of [prompt, answer] or nothing.
    Raises SampleError: bad_record."""
    turns = history or []
    are_pairs = isinstance(turns, list) and all(
        isinstance(turn, list) and len(turn) == 2 for turn in turns
    )
    if not are_pairs:
        raise SampleError("bad_record", f"'history' is {history!r:.50}, not a list of pairs")
    return list(turns)


def with_input(instruction: str, given: str) -> str:
    """Alpaca's `instruction`, and on the next line the `input` that it is about, if any."""
    return f"{instruction}\n{given}" if instruction and given else instruction or given


def answer_fields(task: str) -> Sequence[str]:
    """Field that holds the answers of a record without messages: the first that exists."""
    known = (*_CAPTIONS, *_ANSWERS, "text") if task == "captioning" else (*_ANSWERS, *_CAPTIONS)
    return (*known, *_OUTPUTS)


def _texts(content: Mapping[str, Any], names: Sequence[str]) -> list[str] | None:
    """The first of the fields that exists, as a list: 'x', ['x'] and [{"content": 'x'}]; a number,
    true and false as their JSON."""
    name = first_field(content, names)
    if name is None:
        return None
    values = content[name] if isinstance(content[name], list) else [content[name]]
    texts = [value.get("content") if isinstance(value, dict) else value for value in values]
    texts = [orjson.dumps(text).decode() if is_scalar(text) else text for text in texts]
    if any(not isinstance(text, str) for text in texts):
        raise SampleError(
            "bad_record", f"{name!r} holds something other than text{_remedy(name, content[name])}"
        )
    return cast(list[str], texts)


def is_scalar(value: Any) -> bool:
    """Whether a value is a number, true or false."""
    return isinstance(value, int | float)


def _remedy(name: str, value: Any) -> str:
    """The option that takes a text out of an object, where a field holds objects."""
    first = value[0] if isinstance(value, list) and value else value
    own = first.items() if isinstance(first, dict) else ()
    inside = next((field for field, text in own if isinstance(text, str)), None)
    if inside is None:
        return ""
    field = "question" if name in PROMPT_FIELDS else "caption" if name in _CAPTIONS else "answer"
    place = f"{name}[0]" if isinstance(value, list) else name
    return f'; if its text is {inside!r}: source.fields={{{field}: "{place}.{inside}"}}'


def has_answer(content: Mapping[str, Any]) -> bool:
    """Whether a record holds an answer to learn, in any of the forms."""
    return first_field(content, (*DIALOGUE_FIELDS, *_ANSWERS, *_CAPTIONS, *_OUTPUTS)) is not None


def first_field(content: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first of some fields that a record has."""
    for name in names:
        if content.get(name) is not None:
            return name
    return None


def quoted(names: Sequence[str]) -> str:
    """'a', 'b'."""
    return ", ".join(map(repr, names))

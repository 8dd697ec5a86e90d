"""Messages in the forms that datasets have; what packs cannot hold is refused, never left out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from offline_packing.measure.measure import measure
from offline_packing.sources.reading.locators import to_json
from task_encoders.records.record import check_prompts_are_shown, to_sample
from task_encoders.samples import SampleError, Turn
from tests.helpers.datasets import dialogue, image_bytes, make_run
from tests.helpers.formats import lines, write_file

TEXT = {"type": "text", "text": "What is it?"}
ANSWER = {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}


def asked(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.jpg"},
        {"type": "image", "path": "a.jpg", "text": None},
        {"type": "image", "image": {"bytes": None, "path": "a.jpg"}},
        {"type": "image_url", "image_url": {"url": "a.jpg"}},
        {"type": "image_url", "image_url": "a.jpg"},
        {"type": "image_url", "value": "a.jpg"},
        {"image": "a.jpg"},
    ],
)
def test_parts_that_name_an_image(part: dict[str, Any]) -> None:
    sample = to_sample(asked(part, TEXT), "k", "bmr")
    assert sample.turns == (Turn("<image>What is it?", "A cat."),)
    assert sample.images == ("a.jpg",)
    assert to_sample({**asked(part, TEXT), "images": ["a.jpg"]}, "k", "bmr") == sample


def test_parts_without_a_name_are_the_record_s_media() -> None:
    content = asked({"type": "image"}, {"type": "video"}, TEXT)
    sample = to_sample({**content, "image": "a.jpg", "videos": ["b.mp4"]}, "k", "bmr")
    assert sample.turns[0].prompt == "<image><video>What is it?"
    assert sample.media == ("a.jpg", "b.mp4")


def test_turns_in_one_object() -> None:
    texts = [{"user": "a", "assistant": "b", "source": "x"}, {"user": "c", "assistant": "d"}]
    sample = to_sample({"texts": texts, "images": [{"path": "a.jpg"}]}, "k", "bmr")
    assert (sample.turns, sample.images) == ((Turn("a", "b"), Turn("c", "d")), ("a.jpg",))
    of_ms_swift = [{"human": "a", "assistant": "b"}, {"human": "c", "assistant": "d"}]
    assert to_sample({"messages": of_ms_swift}, "k", "bmr").turns == sample.turns


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (asked({"type": "audio", "audio": "a.mp3"}, TEXT), "bad_record"),
        (asked({"type": "image", "image": "a.jpg"}, {"type": "image"}, TEXT), "bad_record"),
        ({**asked({"type": "image", "image": "a.jpg"}), "images": ["b.jpg"]}, "bad_record"),
        (asked({"type": "image"}, TEXT), "image_count_mismatch"),
        (asked({"type": "image", "image": ["a.jpg"]}, TEXT), "bad_record"),
        (asked("What?"), "bad_record"),
        ({"messages": dialogue("a", "b"), "tools": "[{"}, "bad_record"),
        ({"messages": dialogue("a", "b"), "tools": [7]}, "bad_record"),
        ({"messages": dialogue("<audio>a", "b"), "audios": ["a.mp3"]}, "bad_record"),
        ({"messages": dialogue("Where?", "<bbox>"), "objects": {"bbox": [[1, 2]]}}, "bad_record"),
        ({"messages": dialogue("<ref-object>?", "b"), "objects": {"ref": ["a"]}}, "bad_record"),
        ({"messages": dialogue("a", "<image>"), "image": "a.jpg"}, "image_count_mismatch"),
        ({"messages": dialogue("a", "b"), "system": "s", "image": 7}, "bad_record"),
    ],
)
def test_what_cannot_be_packed(content: dict[str, Any], reason: str) -> None:
    with pytest.raises(SampleError) as error:
        to_sample(content, "k", "bmr")
    assert error.value.reason == reason


@pytest.mark.parametrize(
    "fields",
    [
        {"loss_weight": -0.5},
        {"weight": "2"},
        {"weight": 1e-9},
        {"tool_calls": [{"type": "function"}]},
        {"tool_calls": "no JSON"},
        {"reasoning_content": ["a"]},
        {"images": ["a.jpg"]},
    ],
)
def test_answers_that_would_be_trained_as_others(fields: dict[str, Any]) -> None:
    user, answer = dialogue("a", "b")
    plain = {"loss_weight": 1.0, "weight": None, "tool_calls": None, "images": [], "reasoning": ""}
    assert to_sample({"messages": [user, {**answer, **plain}]}, "k", "bmr").is_plain
    with pytest.raises(SampleError, match="bad_record"):
        to_sample({"messages": [user, {**answer, **fields}]}, "k", "bmr")
    with pytest.raises(SampleError, match="bad_record"):
        to_sample({"messages": [{**user, "loss_weight": 1}, answer]}, "k", "bmr")


@pytest.mark.parametrize(
    "fields",
    [
        *({name: 0} for name in ("loss_weight", "weight")),
        *({name: False} for name in ("loss", "train")),
    ],
)
def test_answers_without_loss(fields: dict[str, Any]) -> None:
    user, answer = dialogue("a", "b")
    messages = [user, {**answer, **fields}, *dialogue("c", "d")]
    turns = to_sample({"messages": messages}, "k", "bmr").turns
    assert turns == (Turn("a", "b", weight=0), Turn("c", "d"))


FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"name": "f", "arguments": {"a": 1}}
WITH_TOOLS = (
    Turn("q", "", calls=('{"name":"f","arguments":{"a":1}}',) * 2),
    Turn("2", "d", role="tool", before=(("tool", "<image>1"),), thought="t"),
)


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], [FUNCTION]])
def test_tools_their_calls_and_results_are_read(tools: Any) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}, CALL]}
    result = {"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "1"}]}
    answer = {"role": "assistant", "content": "d", "reasoning_content": "t"}
    messages = [
        *({"role": "user", "content": "q"}, called),
        *(result, {"role": "tool", "content": "2"}, answer),
    ]
    content = {"messages": messages, "tools": tools, "images": ["a.jpg"]}
    sample = to_sample(content, "k", "bmr")
    assert sample.turns == WITH_TOOLS
    assert json.loads(sample.tools) == [TOOL]
    assert to_sample(orjson.loads(to_json(sample)), "k", "bmr") == sample


def test_tools_in_sharegpt() -> None:
    said = [
        *(("human", "q"), ("function_call", json.dumps(CALL)), ("function_call", json.dumps(CALL))),
        *(("observation", "<image>1"), ("observation", "2"), ("gpt", "d")),
    ]
    messages = [{"from": who, "value": text} for who, text in said]
    sample = to_sample({"conversations": messages, "images": ["a.jpg"]}, "k", "bmr")
    first, last = WITH_TOOLS
    assert sample.turns == (first, replace(last, thought=None))


@pytest.mark.parametrize(
    "roles",
    [
        *("user", "user user assistant", "assistant user assistant", "system assistant"),
        *("user assistant assistant", "user critic assistant", "user assistant user", "user tool"),
    ],
)
def test_roles_that_no_conversation_has(roles: str) -> None:
    messages = [{"role": role, "content": "a"} for role in roles.split()]
    with pytest.raises(SampleError, match="bad_roles"):
        to_sample({"messages": messages}, "k", "bmr")


def test_system_messages_of_questions_are_kept() -> None:
    asked_of = {"question": "a", "answer": "b", "system": "Be brief."}
    assert to_sample(asked_of, "k", "vqa").system == "Be brief."
    inside = [{"role": "system", "content": "s"}, *dialogue("a", "b")]
    assert to_sample({"messages": inside, "system": "s"}, "k", "bmr").system == "s"
    with pytest.raises(SampleError, match="system"):
        to_sample({"messages": inside, "system": "t"}, "k", "bmr")


def test_one_of_two_media_fields_that_is_empty_does_not_hide_the_other() -> None:
    content = {"question": "a", "answer": "b", "images": [], "image": "a.jpg"}
    assert to_sample(content, "k", "vqa").images == ("a.jpg",)


@pytest.mark.parametrize(
    ("content", "is_lost"),
    [
        ({"messages": dialogue("<image>What is it?", "A cat.")}, True),
        ({"question": "What is it?", "answer": "A cat."}, True),
        ({"messages": dialogue("<image>\n", "A cat.")}, False),
        ({"caption": "A cat."}, False),
        ({"text": "Plain text."}, False),
    ],
)
def test_prompts_that_captioning_would_not_show(content: dict[str, Any], is_lost: bool) -> None:
    sample = to_sample({**content, "images": ["a.jpg"]}, "k", "captioning")
    if is_lost:
        with pytest.raises(SampleError, match=r"lost_prompt: .*source\.task to vqa or bmr"):
            check_prompts_are_shown(sample)
    else:
        check_prompts_are_shown(sample)


def test_the_wrong_task_trains_nothing_unless_asked_to(tmp_path: Path) -> None:
    records = [
        {"messages": dialogue(f"<image>What {i}?", "So."), "images": ["a.jpg"]} for i in range(6)
    ]
    write_file(tmp_path / "a.jpg", image_bytes())
    write_file(tmp_path / "data.jsonl", lines(records))
    source = {"format": "jsonl", "path": str(tmp_path / "data.jsonl"), "task": "captioning"}
    assert measure(make_run(source, tmp_path / "a")).info.set_aside == {"lost_prompt": 6}
    wanted = measure(make_run({**source, "ignore_prompts": True}, tmp_path / "b")).info
    assert (wanted.num_samples, wanted.set_aside) == (6, {})

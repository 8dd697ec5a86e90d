"""Records, messages and documents in the forms that datasets have: each means what it says, and
what packs cannot hold is refused, never left out."""

import copy
import json
import re
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from offline_packing.sources.reading.locators import to_json
from task_encoders.records.forms import form_of
from task_encoders.records.record import RATED, check_prompts_are_shown, to_sample
from task_encoders.samples import (
    SampleError,
    SourceSample,
    Turn,
    check_sample,
    join_sections,
    sections,
    split_at_media,
)
from tests.helpers.datasets import dialogue


def turns(*texts: str) -> tuple[Turn, ...]:
    return tuple(Turn(*pair) for pair in zip(texts[::2], texts[1::2], strict=True))


def of(task: str, *texts: str, images: tuple[str, ...] = (), **more: Any) -> SourceSample:
    """The sample of these prompts and answers."""
    return SourceSample("k", task, turns(*texts), images, **more)


X, XY, V = ("x.jpg",), ("x.jpg", "y.jpg"), ("v",)
SAID = [{"role": "system", "content": "s"}, *dialogue("a", "b")]
VIDEOS = of("bmr", "<video>, <video>?", "a", videos=("v", "w"))
NOT_TRAINED = SourceSample("k", "bmr", (Turn("a", "b", weight=0),))


PART = {"type": "text", "text": "What is it?"}
ANSWER = {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}


def asked(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


def ask(prompt: str, **fields: Any) -> dict[str, Any]:
    """A dialogue of one question."""
    return {"messages": dialogue(prompt, "a"), **fields}


def answered(**fields: Any) -> list[dict[str, Any]]:
    """A question, and an answer with other fields."""
    question, answer = dialogue("a", "b")
    return [question, {**answer, **fields}]


FORMS = [
    (
        {"messages": dialogue("<image>a", "b", "c", "d"), "images": ["x.jpg"]},
        of("bmr", "<image>a", "b", "c", "d", images=X),
    ),
    ({"messages": SAID, "images": []}, of("bmr", "a", "b", system="s")),
    ({"captions": [{"content": "a"}], "images": [*XY]}, of("captioning", "", "a", images=XY)),
    ({"captions": ["a"], "image": "x.jpg"}, of("captioning", "", "a", images=X)),
    ({"caption": " a\n", "image": "x.jpg", "images": None}, of("captioning", "", " a\n", images=X)),
    ({"prompt": "q", "answers": ["a"], "captions": None, "images": []}, of("vqa", "q", "a")),
    ({"context": "q", "answer": "a", "other": {"deep": 1}}, of("vqa", "q", "a")),
    (
        {"question": ["q", "r"], "answers": ["a", {"content": "b"}], "images": []},
        of("bmr", "q", "a", "r", "b"),
    ),
    (
        {"messages": dialogue("Describe it.", "a"), "images": ["x.jpg"]},
        of("captioning", "Describe it.", "a", images=X),
    ),
    # A turn in one object.
    (
        {
            "texts": [{"user": "a", "assistant": "b", "x": "y"}, {"user": "c", "assistant": "d"}],
            "images": [{"path": "x.jpg"}],
        },
        of("bmr", "a", "b", "c", "d", images=X),
    ),
    ({"messages": [{"human": "a", "assistant": "b"}]}, of("bmr", "a", "b")),
    ({"question": "a", "answer": "b", "system": "s"}, of("vqa", "a", "b", system="s")),
    ({"messages": SAID, "system": "s"}, of("bmr", "a", "b", system="s")),
    # Weights and fields that change nothing.
    ({"messages": answered(loss_weight=1.0, weight=None, images=[])}, of("bmr", "a", "b")),
    ({"messages": answered(reasoning="", tool_calls=None)}, of("bmr", "a", "b")),
    *(({"messages": answered(**{n: 0})}, NOT_TRAINED) for n in ("loss_weight", "weight")),
    *(({"messages": answered(**{n: False})}, NOT_TRAINED) for n in ("loss", "train")),
    # LLaVA-Video's records mark the places of videos by <image>.
    (
        {"messages": dialogue("<image>?", "An <image>.", "And?", "a"), "video": "v"},
        of("bmr", "<video>?", "An <image>.", "And?", "a", videos=V),
    ),
    (ask("<image>, <image>?", videos=["v", "w"]), VIDEOS),
    (ask("<video>?", video="v"), of("bmr", "<video>?", "a", videos=V)),
    (ask("What?", video="v"), of("bmr", "What?", "a", videos=V)),
    (
        ask("<image>?", video="v", image="x.jpg"),
        of("bmr", "<image>?", "a", images=X, videos=("v",)),
    ),
    (ask("What is <video>?"), of("bmr", "What is <video>?", "a")),
    # Parts of a message that name an image, which the record may name as well.
    *(
        ({**asked(part, PART), **more}, of("bmr", "<image>What is it?", "A cat.", images=X))
        for more in ({}, {"images": ["x.jpg"]})
        for part in (
            {"type": "image", "image": "x.jpg"},
            {"type": "image", "path": "x.jpg", "text": None},
            {"type": "image", "image": {"bytes": None, "path": "x.jpg"}},
            {"type": "image_url", "image_url": {"url": "x.jpg"}},
            {"type": "image_url", "image_url": "x.jpg"},
            {"type": "image_url", "value": "x.jpg"},
            {"image": "x.jpg"},
        )
    ),
    # Questions and what they are about.
    ({"instruction": "Add.", "input": "1, 2", "output": "3"}, of("vqa", "Add.\n1, 2", "3")),
    ({"instruction": "Hi.", "input": "", "output": "Hi."}, of("vqa", "Hi.", "Hi.")),
    ({"query": "Hi.", "response": "Hi.", "input": "lost"}, of("vqa", "Hi.", "Hi.")),
    (
        {"query": "And?", "response": "No.", "history": [["Who?", "I."]]},
        of("vqa", "Who?", "I.", "And?", "No."),
    ),
    # In doubt, what was read before.
    ({"question": "q", "query": "x", "answer": "a", "response": "x"}, of("vqa", "q", "a")),
    ({"prompt": "q", "response": "a", "history": "of the west"}, of("vqa", "q", "a")),
    ({"instruction": "q", "context": "x", "response": "a"}, of("vqa", "q", "a")),
    # Numbers are their text; of several answers to one prompt the first counts.
    ({"question": "How many?", "answer": 3}, of("vqa", "How many?", "3")),
    ({"question": "How much?", "answer": 2.5}, of("vqa", "How much?", "2.5")),
    ({"question": "Is it?", "answer": True}, of("vqa", "Is it?", "true")),
    ({"question": "Is it?", "answers": [False, True]}, of("vqa", "Is it?", "false")),
    ({"question": "What?", "answers": ["a", "b", "c"]}, of("vqa", "What?", "a")),
    ({"question": ["What?"], "answers": ["a", "b"]}, of("vqa", "What?", "a")),
    (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": 7}]},
        of("vqa", "q", "7"),
    ),
]


@pytest.mark.parametrize(
    ("fields", "paired", "images", "videos"),
    [
        ({}, None, (), ()),  # a format that does not pair by name
        ({}, ["a.jpg"], ("a.jpg",), ()),
        ({"images": []}, ["a.jpg"], (), ()),  # names none, and says so
        ({"images": ["b.jpg"]}, ["a.jpg", "a.png"], ("b.jpg",), ()),
        ({"images": None}, ["a.jpg"], ("a.jpg",), ()),
        ({"image": "b.jpg"}, [], ("b.jpg",), ()),
        ({"images": [], "image": "a.jpg"}, None, ("a.jpg",), ()),  # an empty one hides no other
        ({"video": "b.mp4"}, None, (), ("b.mp4",)),
        ({"videos": ["b.mp4", "c.webm"]}, ["a.jpg"], (), ("b.mp4", "c.webm")),
        ({"videos": ["b.mp4"], "image": "a.jpg"}, None, ("a.jpg",), ("b.mp4",)),
        ({}, ["a.mp4"], (), ("a.mp4",)),
        ({"videos": []}, ["a.jpg"], ("a.jpg",), ()),
        ({"video": None, "images": []}, ["a.mp4"], (), ()),
    ],
)
def test_media(fields: dict[str, Any], paired: Any, images: Any, videos: Any) -> None:
    sample = to_sample({"caption": "a", **fields}, "k", "captioning", paired)
    assert (sample.images, sample.videos) == (images, videos)
    assert sample.media == images + videos


@pytest.mark.parametrize(
    ("asked", "stars", "prompts"),
    [
        (["<image>a", "b", "<image>c"], [3, 3, 3], ["<image>a", "b", "<image>c"]),
        (["<image>a", "b", "<image>c"], [1, 3, 3], ["<image>b", "<image>c"]),
        (["<image>a", "b", "<image>c"], [3, 1, 2], ["<image>a<image>"]),
        (["<image>a<video>", "<image>b", "c"], [1, 2, None], ["<image><video><image>c"]),
        (["a", "b<image>", "c"], [1, None, 1], ["b<image>"]),
        (["a", "", "c"], [None, 1, 3], ["a", "c"]),
    ],
)
def test_media_of_turns_that_are_left_out(
    asked: list[str], stars: list[int | None], prompts: list[str]
) -> None:
    """They stay, in their order; also where no model could use the turn."""
    media = {name: "".join(asked).count(f"<{name}>") for name in ("image", "video")}
    record: dict[str, Any] = {f"{n}s": [f"{n}{i}" for i in range(c)] for n, c in media.items()}
    texts = [text for prompt in asked for text in (prompt, prompt and "Yes.")]
    record["messages"] = dialogue(*texts)
    sample = to_sample({**record, RATED: {"stars": (stars, 3)}}, "k", "bmr")
    assert [turn.prompt for turn in sample.turns] == prompts
    assert [*sample.images, *sample.videos] == [*record["images"], *record["videos"]]


def test_media_go_before_those_of_messages_in_front_of_a_prompt() -> None:
    messages = [
        *dialogue("<image>a", "A"),
        *({"role": role, "content": "<image>"} for role in ("system", "user")),
        {"role": "assistant", "content": "B"},
    ]
    record = {"messages": messages, "images": ["0", "1", "2"]}
    (turn,) = to_sample({**record, RATED: {"stars": ([0, 1], 1)}}, "k", "bmr").turns
    assert (turn.before, turn.prompt) == ((("system", "<image><image>"),), "<image>")
    with pytest.raises(SampleError, match=r"each turn is below source\.min_rating .stars 2") as why:
        to_sample({**record, RATED: {"stars": ([0, 1], 2)}}, "k", "bmr")
    assert why.value.reason == "not_chosen"


_PARTS = [
    {"type": "image", "image": "a.jpg"},
    {"type": "video_url", "video_url": {"url": "b.mp4"}},
    {"type": "text", "text": "q"},
]
_CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
#: A record of each form.
RECORDS: list[dict[str, Any]] = [
    {"id": "x", "system": "s", "tools": [{"name": "f"}], "messages": dialogue(_PARTS, "a")},
    {"messages": dialogue("<image>q", "a"), "images": ["a.jpg"], "objects": {"bbox": [[1, 2]]}},
    {
        "conversations": [
            {"from": "human", "value": "<video>q"},
            {"from": "gpt", "value": "a", "loss_weight": 0.5, "reasoning": "t"},
            {"from": "human", "value": "r"},
            {"from": "gpt", "value": None, "tool_calls": [_CALL]},
        ],
        "video": {"path": "v.mp4"},
    },
    {"captions": [{"content": "c"}], "image": "a.jpg"},
    {"question": ["q"], "answers": ["a"], "image": "a.jpg"},
    {"instruction": "i", "input": "j", "output": "o", "history": [["a", "b"]]},
    {"texts": ["a", None], "images": [None, "a.jpg"]},
    {"text_list": ["a"], "image_info": [{"image_name": "a.jpg", "matched_text_index": 0}]},
    {"texts": [{"user": "u", "assistant": "a"}], "images": ["a.jpg"]},
]
ODD = [[], [1], [[1]], {}, {"a": 1}, {"type": ["image"]}, {"url": {"a": 1}}, 1, 1.5, "", "x", None]


@pytest.mark.parametrize("task", ["bmr", "vqa", "captioning"])
def test_fields_that_are_not_used_change_nothing(task: str) -> None:
    """Of two records in one, the first form counts; it needs nothing but its fields."""
    num_read = num_lost = 0
    for content in ({**one, **other} for one in RECORDS for other in RECORDS):
        names = form_of(content).used(content, task)
        used = {name: value for name, value in content.items() if name in names}
        with suppress(SampleError):
            assert to_sample(content, "k", task) == to_sample(used, "k", task)
            num_read += 1
            num_lost += len(used) < len(content.keys() - {"id", "objects"})
    assert num_read > num_lost > 5


def _replaced(value: Any, odd: Any) -> Iterator[Any]:
    """Yield a value with `odd` in each of its places."""
    yield odd
    many = value if isinstance(value, list) else ()
    for key, one in value.items() if isinstance(value, dict) else enumerate(many):
        for changed in _replaced(one, odd):
            copied = copy.copy(value)
            copied[key] = changed
            yield copied


@pytest.mark.parametrize("task", ["bmr", "vqa", "captioning"])
def test_odd_values_anywhere_are_read_or_refused(task: str) -> None:
    num_read = num_refused = 0
    for content in (one for record in RECORDS for odd in ODD for one in _replaced(record, odd)):
        if not isinstance(content, dict):
            continue
        try:
            sample = to_sample(content, "k", task)
        except SampleError:
            num_refused += 1
        else:
            num_read += 1
            assert all(isinstance(name, str) for name in sample.media), content
    assert min(num_read, num_refused) > 100


URI = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize("task", ["bmr", "captioning"])
def test_pictures_in_texts_are_those_of_a_field(task: str) -> None:
    """Read data URIs, and files, in their places; leave all else, and answers, as text."""
    rng = np.random.default_rng(0)
    forms = ("<img>{}</img>", "![]({})", "![a b]({})")
    others = ["and", "\n", "![]", "![]()", "<img></img>", "[a](a.jpg)", "![](a.txt)", "![](b.jpg)"]
    others += ["<img>c.jpg</img>", "![](https://x.org/a.jpg)"]
    for _ in range(300):
        pieces, names = ["Of"], [str(name) for name in rng.choice([URI, "a.jpg", "b/c.png"], 3)]
        for name in names[: rng.integers(1, 4)]:
            pieces += [str(rng.choice(forms)).format(name), str(rng.choice(others))]
        shown = " ".join(["<image>" if i % 2 else text for i, text in enumerate(pieces)])
        text, fields = " ".join(pieces), {"images": names[: len(pieces) // 2]}
        inline, placed = (
            {"text": one}
            if task == "captioning"
            else {"messages": dialogue(one, "So: ![](a.jpg).", "![](d)", "B.")}
            for one in (text, shown)
        )
        sample = to_sample(inline, "k", task, (), {"a.jpg", "a.txt", "b/c.png"}.__contains__)
        assert sample == to_sample({**placed, **fields}, "k", task)
        if task == "bmr":  # where no files are known
            assert to_sample(inline, "k", task).turns[0].prompt == text


def test_pictures_in_documents_and_beside_others() -> None:
    text = {"text": "One. ![](a.jpg) Two."}
    sample = to_sample(text, "k", "captioning", (), lambda name: True)
    assert sample == document("One. <image> Two.", "a.jpg")
    with pytest.raises(SampleError, match="has pictures in its texts, such as 'a"):
        to_sample({**text, "image": "b.jpg"}, "k", "captioning", None, lambda name: True)
    kept = to_sample({**text, "image": "b.jpg"}, "k", "captioning", None, lambda name: False)
    assert kept == document(text["text"], "b.jpg")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<image_1> and <image_2>?", "<image> and <image>?"),
        ("<image 1>, <|image_2|>", "<image>, <image>"),
        ("<image_00><image_01>", "<image><image>"),
        ("(<image>./</image>)(<image>./</image>)", "<image><image>"),
        ("<img><IMG_CONTEXT></img>[IMG]", "<image><image>"),
        ("<|vision_start|><|image_pad|><|vision_end|><start_of_image>", "<image><image>"),
        ("<IMAGE> <ImageHere>", "<image> <image>"),
        # What cannot be told stays text.
        ("<image_2> and <image_1>?", ""),
        ("<image_1> and <image_1>?", ""),
        ("<image_2> and <image_3>?", ""),
        ("[IMG] [IMG] [IMG]", ""),
        ("<image><image> of [IMG]", ""),
        ("<img> <media>", ""),
    ],
)
def test_marks_of_other_projects(prompt: str, expected: str) -> None:
    content = {"messages": dialogue(prompt, "[IMG]"), "images": ["a.jpg", "b.jpg"]}
    assert to_sample(content, "k", "bmr").turns == turns(expected or prompt, "[IMG]")


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
    said = [
        *(("human", "q"), ("function_call", json.dumps(CALL)), ("function_call", json.dumps(CALL))),
        *(("observation", "<image>1"), ("observation", "2"), ("gpt", "d")),
    ]
    sharegpt = [{"from": who, "value": text} for who, text in said]
    sample = to_sample({"conversations": sharegpt, "images": ["a.jpg"]}, "k", "bmr")
    assert sample.turns == (WITH_TOOLS[0], replace(WITH_TOOLS[1], thought=None))


@pytest.mark.parametrize(
    ("content", "lost"),
    [
        ({"messages": dialogue("<image>What is it?", "A cat.")}, "lost_prompt: .*to vqa or bmr"),
        ({"question": "What is it?", "answer": "A cat."}, "lost_prompt"),
        ({"messages": dialogue("<image>\n", "A cat.")}, None),
        ({"text": "Plain text."}, None),
    ],
)
def test_prompts_that_captioning_would_not_show(content: dict[str, Any], lost: str | None) -> None:
    sample = to_sample({**content, "images": ["a.jpg"]}, "k", "captioning")
    with pytest.raises(SampleError, match=lost) if lost else nullcontext():
        check_prompts_are_shown(sample)


def document(text: str, *images: str, videos: tuple[str, ...] = ()) -> SourceSample:
    return SourceSample("k", "captioning", (Turn("", text),), images, None, videos)


def said(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


SENTENCE = {"type": "text", "text": "One."}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        *FORMS,
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
        (
            {**asked({"type": "image"}, {"type": "video"}, PART), "image": "x.jpg", "video": "v"},
            of("bmr", "<image><video>What is it?", "A cat.", images=X, videos=V),
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
        (  # as tables have null
            {"images": ["", "a.jpg"], "texts": ["One.", ""]},
            document("One.<image>", "a.jpg"),
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
            {"messages": [said("<image>One.")], "images": ["a.jpg"]},
            document("<image>One.", "a.jpg"),
        ),
        (
            {"messages": [said([SENTENCE, {"type": "image", "image": "a.jpg"}])]},
            document("One.<image>", "a.jpg"),
        ),
        (
            {"messages": [said([{"type": "image"}, SENTENCE])], "images": ["a.jpg"]},
            document("<image>One.", "a.jpg"),
        ),
    ],
)
def test_forms_and_documents(content: dict[str, Any], expected: SourceSample) -> None:
    assert to_sample(content, "k", expected.task) == expected


def mmc4(**picture: Any) -> dict[str, Any]:
    return {"text_list": ["a"], "image_info": [picture]}


DOCUMENT = {"role": "assistant", "content": "a"}
CONFIDENT = {"answer": "yes", "answer_confidence": "maybe", "answer_id": 1}
#: Task, record, and what is said of it.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # media that do not fit
    ("vqa", ask("<image> <image>", video="a.mp4"), "image_count_mismatch"),
    ("vqa", ask("<image> <video>", video="a.mp4"), "image_count_mismatch"),
    ("vqa", ask("<video> <video>", video="a.mp4"), "video_count_mismatch"),
    ("vqa", ask("<video>", videos=["a.mp4", "b.mp4"]), "video_count_mismatch"),
    ("vqa", ask("What?", videos=[7]), "bad_record"),
    ("bmr", asked({"type": "image", "image": "a.jpg"}, {"type": "image"}, PART), "bad_record"),
    ("bmr", {**asked({"type": "image", "image": "a.jpg"}), "images": ["b.jpg"]}, "bad_record"),
    ("bmr", asked({"type": "image"}, PART), "image_count_mismatch"),
    ("bmr", asked({"type": "image", "image": ["a.jpg"]}, PART), "bad_record"),
    ("bmr", {"messages": dialogue("a", "<image>"), "image": "a.jpg"}, "image_count_mismatch"),
    ("bmr", ask("a", system="s", image=7), "bad_record"),
    ("bmr", {"messages": SAID, "system": "t"}, "'system' is not the system message"),
    # what is not packed, or is something else
    ("bmr", asked({"type": "audio", "audio": "a.mp3"}, PART), "bad_record"),
    ("bmr", asked("What?"), "bad_record"),
    ("bmr", ask("a", tools="[{"), "bad_record"),
    ("bmr", ask("a", tools=[7]), "bad_record"),
    ("bmr", ask("<audio>a", audios=["a.mp3"]), "bad_record"),
    ("bmr", ask("<ref-object>?", objects={"ref": ["a"]}), "bad_record"),
    ("bmr", {"messages": dialogue("?", "<bbox>"), "objects": {"bbox": [[1, 2]]}}, "bad_record"),
    # answers that would be trained as others
    *(
        ("bmr", {"messages": answered(**fields)}, "bad_record")
        for fields in (
            *({"loss_weight": -0.5}, {"weight": "2"}, {"weight": 1e-9}, {"images": ["a.jpg"]}),
            *({"tool_calls": [{"type": "function"}]}, {"tool_calls": "no JSON"}),
            {"reasoning_content": ["a"]},
        )
    ),
    ("bmr", {"messages": [{**SAID[1], "loss_weight": 1}, SAID[2]]}, "bad_record"),
    # questions and what they are about
    ("vqa", {"output": "a", "instruction": "q", "input": {"a": 1}}, "bad_record"),
    ("vqa", {"output": ["a", "b"], "instruction": ["p", "q"], "input": "both?"}, "bad_record"),
    ("vqa", {"output": "a", "query": "q", "history": "x"}, "bad_record"),
    ("vqa", {"output": "a", "query": "q", "history": [["a"]]}, "bad_record"),
    ("vqa", {"output": "a", "query": "q", "history": [["a", 1]]}, "bad_record"),
    ("vqa", {"question": "?", "answers": [CONFIDENT]}, r'{answer: "answers\[0\]\.answer"}'),
    ("captioning", {"caption": {"en": "A cat."}}, r'source\.fields={caption: "caption\.en"}'),
    ("bmr", {"question": ["a", "b", "c"], "answers": ["a", "b"]}, "3 prompts for 2 answers"),
    # documents
    ("captioning", {"text": "a<image>b<image>", "images": ["a.jpg"]}, "image_count_mismatch"),
    ("captioning", {"text": "a<image>b"}, "image_count_mismatch: 1 .* name them"),
    ("captioning", {"text": "a<video>b<video>", "videos": ["v.mp4"]}, "video_count_mismatch"),
    ("captioning", {"text": "<image> \n", "images": ["a.jpg"]}, "empty_answer"),
    ("captioning", {"texts": ["a"], "images": ["b", "c"]}, "1 entries of 'texts' and 2 of"),
    ("captioning", {"texts": ["a"]}, "1 entries of 'texts' and no of 'images'"),
    ("captioning", mmc4(matched_text_index=1), "names no sentence"),
    ("captioning", mmc4(), "names no sentence"),
    ("captioning", mmc4(matched_text_index=0), "image_count_mismatch"),
    ("captioning", {"text_list": "a"}, "not a list of texts"),
    ("captioning", {"messages": [{"role": "user", "content": "a"}]}, "bad_roles"),
    ("captioning", {"messages": [{**DOCUMENT, "loss_weight": 0.5}]}, "a caption has no"),
    ("bmr", {"texts": ["a"], "images": [None]}, r"a document; set source\.task=captioning"),
    ("bmr", {"messages": [DOCUMENT]}, r"bad_roles: roles are assistant: .* set source\.task="),
]


@pytest.mark.parametrize(("task", "content", "message"), REFUSED)
def test_what_is_refused(task: str, content: dict[str, Any], message: str) -> None:
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
    placed = [turn.answer for turn in sections(document("a\n\nb", "i", "j"))]
    assert placed == ["<image><image>a\n\n", "b"]


def test_random_sections() -> None:
    """They are the text, each has text, and no medium ends one that is not the last."""
    rng = np.random.default_rng(0)
    pieces = ["<image>", "<video>", "a", " ", "\n", "\n\n", "\n \n"]
    several = 0
    for _ in range(1500):
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
    assert several > 250

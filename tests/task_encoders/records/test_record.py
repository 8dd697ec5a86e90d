"""Record forms: that each means what it says (test_bad_input.py has the refusals)."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from task_encoders.records.record import RATED, to_sample
from task_encoders.samples import SampleError, SourceSample, Turn
from tests.helpers.datasets import dialogue


def turns(*texts: str) -> tuple[Turn, ...]:
    return tuple(Turn(*pair) for pair in zip(texts[::2], texts[1::2], strict=True))


@pytest.mark.parametrize(
    ("content", "task", "expected"),
    [
        (
            {"messages": dialogue("<image>a", "b", "c", "d"), "images": ["x.jpg"]},
            "bmr",
            SourceSample("k", "bmr", turns("<image>a", "b", "c", "d"), ("x.jpg",)),
        ),
        (
            {"messages": [{"role": "system", "content": "s"}, *dialogue("a", "b")], "images": []},
            "bmr",
            SourceSample("k", "bmr", turns("a", "b"), (), "s"),
        ),
        (
            {"captions": [{"content": "a"}], "images": ["x.jpg", "y.jpg"]},
            "captioning",
            SourceSample("k", "captioning", turns("", "a"), ("x.jpg", "y.jpg")),
        ),
        (
            {"captions": ["a"], "image": "x.jpg"},
            "captioning",
            SourceSample("k", "captioning", turns("", "a"), ("x.jpg",)),
        ),
        (
            {"caption": " a\n", "image": "x.jpg", "images": None},
            "captioning",
            SourceSample("k", "captioning", turns("", " a\n"), ("x.jpg",)),
        ),
        (
            {"prompt": "q", "answers": ["a"], "captions": None, "images": []},
            "vqa",
            SourceSample("k", "vqa", turns("q", "a")),
        ),
        (
            {"context": "q", "answer": "a", "other": {"deep": 1}},
            "vqa",
            SourceSample("k", "vqa", turns("q", "a")),
        ),
        (
            {"question": ["q", "r"], "answers": ["a", {"content": "b"}], "images": []},
            "bmr",
            SourceSample("k", "bmr", turns("q", "a", "r", "b")),
        ),
        (
            {"messages": dialogue("Describe it.", "a"), "images": ["x.jpg"]},
            "captioning",
            SourceSample("k", "captioning", turns("Describe it.", "a"), ("x.jpg",)),
        ),
    ],
)
def test_forms(content: dict[str, Any], task: str, expected: SourceSample) -> None:
    assert to_sample(content, "k", task) == expected


@pytest.mark.parametrize(
    ("fields", "paired", "images"),
    [
        ({}, None, ()),  # a format that does not pair by name
        ({}, ["a.jpg"], ("a.jpg",)),
        ({"images": []}, ["a.jpg"], ()),  # names none, and says so
        ({"images": ["b.jpg"]}, ["a.jpg", "a.png"], ("b.jpg",)),
        ({"images": None}, ["a.jpg"], ("a.jpg",)),
        ({"image": "b.jpg"}, [], ("b.jpg",)),
    ],
)
def test_images(fields: dict[str, Any], paired: Any, images: tuple[str, ...]) -> None:
    content = {"caption": "a", **fields}
    assert to_sample(content, "k", "captioning", paired).images == images


@pytest.mark.parametrize(
    ("paired", "reason"), [([], "missing_image"), (["a.jpg", "a.png"], "ambiguous_image")]
)
def test_images_that_are_not_clear(paired: list[str], reason: str) -> None:
    with pytest.raises(SampleError) as error:
        to_sample({"caption": "a"}, "k", "captioning", paired)
    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("fields", "paired", "images", "videos"),
    [
        ({"video": "b.mp4"}, None, (), ("b.mp4",)),
        ({"videos": ["b.mp4", "c.webm"]}, ["a.jpg"], (), ("b.mp4", "c.webm")),
        ({"videos": ["b.mp4"], "image": "a.jpg"}, None, ("a.jpg",), ("b.mp4",)),
        ({}, ["a.mp4"], (), ("a.mp4",)),
        ({"videos": []}, ["a.jpg"], ("a.jpg",), ()),
        ({"video": None, "images": []}, ["a.mp4"], (), ()),
    ],
)
def test_videos(fields: dict[str, Any], paired: Any, images: Any, videos: Any) -> None:
    sample = to_sample({"caption": "a", **fields}, "k", "captioning", paired)
    assert (sample.images, sample.videos) == (images, videos)
    assert sample.media == images + videos


@pytest.mark.parametrize(
    ("prompts", "fields", "expected"),
    [
        (["<image>\nWhat?", "And?"], {"video": "a.mp4"}, ["<video>\nWhat?", "And?"]),
        (["<image>, <image>?"], {"videos": ["a", "b"]}, ["<video>, <video>?"]),
        (["<video>?"], {"video": "a.mp4"}, ["<video>?"]),
        (["What?"], {"video": "a.mp4"}, ["What?"]),
        (["<image>?"], {"video": "a.mp4", "image": "b.jpg"}, ["<image>?"]),
        (["What is <video>?"], {}, ["What is <video>?"]),
    ],
)
def test_marks_of_videos(prompts: list[str], fields: dict[str, Any], expected: list[str]) -> None:
    """LLaVA-Video's records mark the places of videos by <image>."""
    texts = [text for prompt in prompts for text in (prompt, "An answer with <image>.")]
    sample = to_sample({"messages": dialogue(*texts), **fields}, "k", "bmr")
    assert [turn.prompt for turn in sample.turns] == expected
    assert {turn.answer for turn in sample.turns} == {"An answer with <image>."}


@pytest.mark.parametrize(
    ("prompt", "fields", "reason"),
    [
        ("<image> <image>", {"video": "a.mp4"}, "image_count_mismatch"),
        ("<image> <video>", {"video": "a.mp4"}, "image_count_mismatch"),
        ("<video> <video>", {"video": "a.mp4"}, "video_count_mismatch"),
        ("<video>", {"videos": ["a.mp4", "b.mp4"]}, "video_count_mismatch"),
        ("What?", {"videos": [7]}, "bad_record"),
    ],
)
def test_videos_that_do_not_fit(prompt: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(SampleError) as error:
        to_sample({"messages": dialogue(prompt, "a"), **fields}, "k", "vqa")
    assert error.value.reason == reason


def test_media_that_are_not_clear() -> None:
    with pytest.raises(SampleError, match="ambiguous_image"):
        to_sample({"caption": "a"}, "k", "captioning", ["a.jpg", "a.mp4"])


@pytest.mark.parametrize(
    ("fields", "turns"),
    [
        ({"instruction": "Add.", "input": "1, 2", "output": "3"}, [("Add.\n1, 2", "3")]),
        ({"instruction": "Hi.", "input": "", "output": "Hi."}, [("Hi.", "Hi.")]),
        ({"query": "Hi.", "response": "Hi.", "input": "lost"}, [("Hi.", "Hi.")]),
        (
            {"query": "And?", "response": "No.", "history": [["Who?", "I."]]},
            [("Who?", "I."), ("And?", "No.")],
        ),
        # in doubt, what was read before
        ({"question": "q", "query": "x", "answer": "a", "response": "x"}, [("q", "a")]),
        ({"prompt": "q", "response": "a", "history": "of the west"}, [("q", "a")]),
        ({"instruction": "q", "context": "x", "response": "a"}, [("q", "a")]),
    ],
)
def test_alpaca_and_ms_swift(fields: dict[str, Any], turns: list[tuple[str, str]]) -> None:
    sample = to_sample(fields, "k", "vqa")
    assert [(turn.prompt, turn.answer) for turn in sample.turns] == turns


@pytest.mark.parametrize(
    "fields",
    [
        {"instruction": "q", "input": {"a": 1}},
        {"instruction": ["p", "q"], "output": ["a", "b"], "input": "about both?"},
        {"query": "q", "history": "x"},
        {"query": "q", "history": [["a"]]},
        {"query": "q", "history": [["a", 1]]},
    ],
)
def test_what_no_instruction_can_be_about(fields: dict[str, Any]) -> None:
    with pytest.raises(SampleError) as error:
        to_sample({"output": "a", **fields}, "k", "vqa")
    assert error.value.reason == "bad_record"


@pytest.mark.parametrize(
    ("content", "task", "expected"),
    [
        ({"question": "How many?", "answer": 3}, "vqa", turns("How many?", "3")),
        ({"question": "How much?", "answer": 2.5}, "vqa", turns("How much?", "2.5")),
        ({"question": "Is it?", "answer": True}, "vqa", turns("Is it?", "true")),
        ({"question": "Is it?", "answers": [False, True]}, "vqa", turns("Is it?", "false")),
        ({"question": "What?", "answers": ["a", "b", "c"]}, "vqa", turns("What?", "a")),
        ({"question": ["What?"], "answers": ["a", "b"]}, "vqa", turns("What?", "a")),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": 7}]},
            "bmr",
            turns("q", "7"),
        ),
    ],
)
def test_answers_that_are_not_text(content: Any, task: str, expected: tuple[Turn, ...]) -> None:
    """Numbers are their text; of several answers to one prompt the first counts."""
    assert to_sample(content, "k", task).turns == expected


def test_a_list_of_objects_names_the_field() -> None:
    answers = [{"answer": "yes", "answer_confidence": "maybe", "answer_id": 1}]
    with pytest.raises(SampleError, match=r'source\.fields={answer: "answers\[0\]\.answer"}'):
        to_sample({"question": "Is it?", "answers": answers}, "k", "vqa")
    with pytest.raises(SampleError, match=r'source\.fields={caption: "caption\.en"}'):
        to_sample({"caption": {"en": "A cat."}}, "k", "captioning")
    with pytest.raises(SampleError, match="3 prompts for 2 answers"):
        to_sample({"question": ["a", "b", "c"], "answers": ["a", "b"]}, "k", "bmr")


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

"""Several questions on one image, as numbered copies and as one dialogue."""

import json
from pathlib import Path

import pytest

from tests.helpers.accounting import account, measured_rows, open_one
from tests.helpers.datasets import dialogue, image_bytes
from tests.helpers.formats import lines, write_file
from tools.convert_questions import main

QUESTIONS = [
    ("a.jpg", "<image>\nWhat is it?", "A square."),
    ("b.jpg", "<image>\nWhere?", "Here."),
    ("a.jpg", "<image>\nWhich colour?", "Red."),
    ("a.jpg", "How many?<image>", "One."),
]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    for i, name in enumerate(("a.jpg", "b.jpg")):
        write_file(tmp_path / "images" / name, image_bytes(56 + 28 * i))
    records = [
        {"images": [f"images/{name}"], "messages": dialogue(question, answer)}
        for name, question, answer in QUESTIONS
    ]
    text_only = {"id": "text", "images": [], "messages": dialogue("Hello", "Hi")}
    broken = {"images": ["images/nowhere.jpg"], "messages": dialogue("Hello", "Hi")}
    write_file(tmp_path / "q.jsonl", lines([*records, text_only, broken]))
    return tmp_path / "q.jsonl"


def texts(path: Path) -> list[str]:
    return [message["content"] for message in json.loads(path.read_bytes())["messages"]]


def test_copies(questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pairs"
    assert main(["jsonl", str(questions), str(out), "--form", "copies"]) == 0
    stems = ["a", "a_1", "a_2", "b"]
    names = {f"{stem}{suffix}" for stem in stems for suffix in (".jpg", ".json")}
    assert {path.name for path in out.iterdir()} == names | {"text.json"}
    assert texts(out / "a_1.json") == ["<image>\nWhich colour?", "Red."]
    origin = tmp_path / "images" / "a.jpg"
    before = origin.read_bytes()
    assert (out / "a_2.jpg").read_bytes() == before
    assert "wrote 5 pairs" in (said := capsys.readouterr().out)
    assert "left out 1" in said
    found = account(open_one({"format": "pairs", "path": str(out)}, tmp_path))
    assert {key: outcome for key, outcome, _ in found} == dict.fromkeys([*stems, "text"], "ok")
    (out / "a.jpg").write_bytes(b"changed in place")
    assert origin.read_bytes() == before  # no link to it
    with pytest.raises(SystemExit):  # what is there stays
        main(["jsonl", str(questions), str(out), "--form", "copies"])


@pytest.mark.parametrize(("max_turns", "stems"), [(16, ["a", "b"]), (2, ["a", "a_1", "b"])])
def test_dialogue(questions: Path, tmp_path: Path, max_turns: int, stems: list[str]) -> None:
    out = tmp_path / "pairs"
    options = ["--form", "dialogue", "--max-turns", str(max_turns)]
    assert main(["jsonl", str(questions), str(out), *options]) == 0
    assert sorted(path.stem for path in out.glob("*.jpg")) == stems
    expected = ["<image>\nWhat is it?", "A square.", "Which colour?", "Red.", "How many?", "One."]
    assert texts(out / "a.json") == expected[: 2 * max_turns]
    rows = measured_rows(open_one({"format": "pairs", "path": str(out)}, tmp_path))
    assert sum(row["num_turns"] for row in rows) == len(QUESTIONS) + 1  # nothing lost


def test_dialogues_of_a_number_of_tokens(questions: Path, tmp_path: Path) -> None:
    """Each is as long as it will be trained, and no two of one picture would fit together."""
    out = tmp_path / "pairs"
    model = ["--model", "family=qwen2_vl", "processor=builtin"]
    most = ["--max-tokens", "50", *model]
    assert main(["jsonl", str(questions), str(out), "--form", "dialogue", *most]) == 0
    found = measured_rows(open_one({"format": "pairs", "path": str(out)}, tmp_path))
    rows = {row["key"]: row for row in found}
    assert rows.keys() == {"a", "a_1", "b", "text"}
    assert [rows[key]["num_turns"] for key in ("a", "a_1")] == [2, 1]
    assert rows["a"]["num_tokens"] <= 50
    most[1] = str(rows["a"]["num_tokens"] - 1)
    assert main(["jsonl", str(questions), str(tmp_path / "o"), "--form", "dialogue", *most]) == 0
    assert texts(tmp_path / "o" / "a.json") == ["<image>\nWhat is it?", "A square."]


def test_what_stays_apart(tmp_path: Path) -> None:
    """Other pictures of the same size, other system messages, thoughts, and what asks nothing."""
    for name in ("a.png", "same.png"):
        write_file(tmp_path / name, image_bytes(200, 200, "PNG"))
    asked = dialogue("<image>What?", "A.")
    records = [
        {"image": "a.png", "messages": asked},
        {"image": "same.png", "messages": dialogue("And?", "B.")},
        {"image": "a.png", "messages": [{"role": "system", "content": "Be kind."}, *asked]},
        {"image": "a.png", "messages": dialogue("<image>What?", "<think>Hm.</think>A.")},
        {"image": "a.png", "messages": dialogue("<image>", "A.")},
    ]
    write_file(tmp_path / "q.jsonl", lines(records))
    out = tmp_path / "pairs"
    assert main(["jsonl", str(tmp_path / "q.jsonl"), str(out), "--form", "dialogue"]) == 0
    assert sorted(len(texts(path)) for path in out.glob("*.json")) == [2, 2, 3, 4]


def test_a_list_of_questions(tmp_path: Path) -> None:
    """Each is a pair of its own; a conversation is not torn apart."""
    write_file(tmp_path / "a.jpg", image_bytes())
    records = [
        {"image": "a.jpg", "question": ["<image>\nOne?", "Two?"], "answer": ["1", "2"]},
        {"image": "a.jpg", "messages": [*dialogue("Hi", "Hello"), *dialogue("And?", "Well.")]},
        {"id": "text", "question": ["One?", "Two?"], "answer": ["1", "2"]},
    ]
    write_file(tmp_path / "q.jsonl", lines(records))
    for form in ("copies", "dialogue"):
        assert main(["jsonl", f"{tmp_path}/q.jsonl", f"{tmp_path}/{form}", "--form", form]) == 0
    assert {path.stem: texts(path) for path in (tmp_path / "copies").glob("*.json")} == {
        "a": ["<image>\nOne?", "1"],
        "a_1": ["Two?", "2"],
        "a_2": ["Hi", "Hello", "And?", "Well."],
        "text": ["One?", "1"],
        "text_1": ["Two?", "2"],
    }
    assert len(texts(tmp_path / "dialogue/a.json")) == 8

"""What a record holds beside its sample is told, with its name and how often."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offline_packing.measure.measure import measure
from offline_packing.sources import SourceRecord
from offline_packing.sources.lost_fields import lost_fields
from offline_packing.sources.options import FieldMap
from offline_packing.sources.reading.locators import Locator
from task_encoders.records.record import to_sample
from tests.helpers.command import invoke
from tests.helpers.datasets import dialogue, image_bytes, make_run
from tests.helpers.formats import lines, write_file


def told(
    content: dict[str, Any],
    *,
    task: str = "vqa",
    fields: dict[str, str] | None = None,
    paired: tuple[str, ...] | None = None,
) -> list[str]:
    """What is told of a record, after its fields were named."""
    names = FieldMap(fields or {})
    record = SourceRecord("k", Locator("bytes", "a", 0, 0), names.apply(content), paired)
    sample = to_sample(names.apply(content), "k", task, paired)
    return sorted(lost_fields(record, sample, names))


ASKED = {"question": "What?", "answer": "This."}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"image_2": "b.jpg", "image": "a.jpg"}, "image_2"),
        ({"pics": ["a.jpg", "b.png"]}, "pics"),
        ({"meta": {"path": "a.webp"}}, "meta"),
        ({"picture": {"bytes": None, "path": "a"}}, "picture"),
        ({"shot": "data:image/png;base64,iVBOR"}, "shot"),
        ({"link": "https://example.org/a.jpg?size=2"}, "link"),
        ({"images": ["a.jpg"], "image": "b.jpg"}, "image"),
    ],
)
def test_media_in_other_fields(content: dict[str, Any], expected: str) -> None:
    assert told({**ASKED, **content}) == [f"field {expected!r} holds media that no sample uses"]


@pytest.mark.parametrize(
    "content",
    [
        {"image": "x/a.jpg", "file_name": "a.jpg"},  # the same picture
        {"image": "a.jpg", "url": "https://example.org/b.jpg"},  # where it came from
        {"image_id": 7, "height": 3, "note": "see a.jpg for more\nof it", "image": "a.jpg"},
        {"images": [], "image": None},
    ],
)
def test_fields_that_hold_none(content: dict[str, Any]) -> None:
    assert told({**ASKED, **content}) == []


def test_an_answer_without_its_question_is_no_caption() -> None:
    found = told({"q": "What?", "answer": "This."}, task="captioning")
    assert found == ["field 'answer' is trained as a caption; where is its question?"]


def test_texts_that_are_not_shown() -> None:
    found = told({**ASKED, "context": "A passage.", "choices": ["a", "b"], "label": False})
    assert found == [
        "field 'choices' is not shown beside 'question'",
        "field 'context' is not shown beside 'question'",
        "records say label: false, as preferences mark bad answers",
    ]
    marked = {"messages": dialogue("<ImageHere>What?", "This."), "image": "a.jpg"}
    assert told(marked) == ["prompts hold '<ImageHere>' as text; media are marked by <image>"]
    beside = told({**ASKED, "images": []}, paired=("k.jpg",))
    assert beside == ["files beside their record are used by no sample: it says that it has none"]


@pytest.mark.parametrize(
    ("fields", "images", "lost"),
    [
        ({"question": "q"}, ("a.jpg",), []),
        ({"question": "q", "images": "pictur"}, (), ["source.fields.images=pictur is not in the "]),
        ({"question": "q", "images": "more"}, ("b.jpg",), []),
        ({"question": "q", "id": "image"}, ("a.jpg",), []),
    ],
)
def test_a_mapping_overlays_the_default_names(
    fields: dict[str, str], images: tuple[str, ...], lost: list[str]
) -> None:
    content = {"q": "What?", "answer": "This.", "image": "a.jpg"}
    if "more" in fields.values():
        content["more"] = "b.jpg"
    names = FieldMap(fields)
    sample = to_sample(names.apply(content), "k", "vqa")
    assert (sample.turns[0].prompt, sample.turns[0].answer) == ("What?", "This.")
    assert sample.images == images
    assert [
        line[: len(start)] for line, start in zip(told(content, fields=fields), lost, strict=True)
    ] == lost


def test_a_caption_that_is_named_has_no_prompt() -> None:
    content = {"caption": "A cat.", "conversations": [], "prompt": "Describe it."}
    sample = to_sample(FieldMap({"caption": "caption"}).apply(content), "k", "captioning")
    assert (sample.turns[0].prompt, sample.turns[0].answer) == ("", "A cat.")


@pytest.mark.parametrize("given", ["a house", "", None])
def test_the_input_of_an_instruction_belongs_to_its_prompt(given: str | None) -> None:
    content = {"instruction": "Translate.", "input": given, "output": "une maison"}
    fields = {"question": "instruction", "answer": "output"}
    sample = to_sample(FieldMap(fields).apply(content), "k", "bmr")
    assert sample.turns[0].prompt == ("Translate.\na house" if given else "Translate.")
    assert told(content, fields=fields) == []
    assert "input" in FieldMap(fields).columns()


def write_questions(folder: Path, count: int = 12) -> Path:
    """JSON Lines of q, answer, image and shot, a second picture."""
    for i in range(count):
        write_file(folder / f"{i}.jpg", image_bytes(112, 112))
    records = [
        {"q": "<image>What?", "answer": "This.", "image": f"{i}.jpg", "shot": f"{i}b.jpg"}
        for i in range(count)
    ]
    write_file(folder / "a.jsonl", lines(records))
    return folder / "a.jsonl"


def test_the_command_keeps_pictures_and_tells_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_questions(tmp_path / "data")
    config = tmp_path / "pack.yaml"
    config.write_text(
        f"source: {{format: jsonl, path: {path}, task: vqa, fields: {{question: q}}}}\n"
        f"output: {{path: {tmp_path / 'out'}}}\nengine: {{workers: 2, samples_per_part: 5}}\n"
    )
    invoke("measure", config)
    assert caplog.text.count("field 'shot' holds media that no sample uses (12 samples)") == 1
    named = {"question": "q"}
    source = {"format": "jsonl", "path": str(path), "task": "vqa", "fields": named}
    run = make_run(source, tmp_path / "again", engine={"samples_per_part": 5})
    info = measure(run).info
    assert info.lost_fields == {"field 'shot' holds media that no sample uses": 12}
    columns = pq.read_table(run.workspace.index, columns=["num_images"])["num_images"]
    assert columns.to_pylist() == [1] * 12
    run.workspace.index_info.unlink()  # the counts of finished parts are read back
    assert measure(run).info.lost_fields == info.lost_fields


def test_columns_with_pictures_that_are_not_read(tmp_path: Path) -> None:
    table = pa.table({"question": ["a"], "answer": ["b"], "left_view": [image_bytes()]})
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data" / "a.parquet")
    source = {"format": "parquet", "path": str(tmp_path / "data"), "task": "vqa"}
    lost = measure(make_run(source, tmp_path / "out")).info.lost_fields
    assert lost == {"field 'left_view' holds media that no sample uses": 1}

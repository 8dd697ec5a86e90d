"""A field of a record that is not part of its sample is told, with its name and how often."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from offline_packing.measure.measure import measure
from offline_packing.sources import SourceRecord
from offline_packing.sources.lost_fields import control_text, lost_fields
from offline_packing.sources.options import FieldMap
from offline_packing.sources.reading.locators import Locator
from task_encoders.media.image import decode_image
from task_encoders.records.record import to_sample
from task_encoders.samples import SourceSample, Turn
from task_encoders.text.qwen_vocabulary import BUILTIN, QWEN_SPECIAL_TOKENS
from task_encoders.text.tokenizer import TransformersTokenizer, control_pattern, load_tokenizer
from tests.helpers.datasets import dialogue, image_bytes, make_run
from tests.helpers.formats import lines, write_file
from tests.helpers.tiny_tokenizer import tiny_tokenizer


def told(
    content: dict[str, Any],
    *,
    task: str = "vqa",
    fields: dict[str, str] | None = None,
    paired: tuple[str, ...] | None = None,
) -> list[str]:
    """The notes on a record, after its fields were named."""
    names = FieldMap(fields or {})
    record = SourceRecord("k", Locator("bytes", "a", 0, 0), names.apply(content), paired)
    sample = to_sample(names.apply(content), "k", task, paired)
    return sorted(what for what, _ in lost_fields(record, sample, names))


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
    (line,) = told({**ASKED, **content})
    assert line.startswith(f"field {expected!r} holds media that no sample uses")


@pytest.mark.parametrize(
    "content",
    [
        {"image": "x/a.jpg", "file_name": "a.jpg"},  # the same picture
        {"image": "a.jpg", "url": "https://example.org/b.jpg"},  # where it came from
        {"image_id": 7, "height": 3, "image": "a.jpg", "data_source": "coco"},
        {"images": [], "image": None},
    ],
)
def test_fields_that_hold_none(content: dict[str, Any]) -> None:
    assert told({**ASKED, **content}) == []


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({**ASKED, "note": "see a.jpg for more\nof it"}, "note"),
        ({**ASKED, "colour": "blue"}, "colour"),
        ({**ASKED, "source": "Two words"}, "source"),
        ({**ASKED, "extra": [{"text": "More."}]}, "extra"),
        ({**ASKED, "caption": "A cat."}, "caption"),
        ({"messages": dialogue("What?", "This."), "answer": "That."}, "answer"),
    ],
)
def test_text_in_other_fields(content: dict[str, Any], expected: str) -> None:
    assert told(content) == [f"field {expected!r} holds text that no sample uses"]


def test_captions_without_the_system_message_and_text_beside_them() -> None:
    found = told({"caption": "A cat.", "text": "A dog.", "system": "Be brief."}, task="captioning")
    assert found == [
        f"field {name!r} holds text that no sample uses" for name in ("system", "text")
    ]


def test_an_answer_without_its_question_is_no_caption() -> None:
    found = told({"q": "What?", "answer": "This."}, task="captioning")
    assert found == [
        "field 'answer' is trained as a caption; where is its question?",
        "field 'q' holds text that no sample uses",
    ]


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


def test_a_missing_field_has_the_name_of_its_option() -> None:
    names = FieldMap({"group": "dok", "images": "pictur"})
    missing = names.missing(names.apply({"question": "What?", "doc": 1}))
    assert missing == ["source.fields.group=dok", "source.fields.images=pictur"]


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


def test_columns_with_pictures_that_are_not_read(tmp_path: Path) -> None:
    columns = {"question": ["a"], "answer": ["b"], "left_view": [image_bytes()], "notes": ["c"]}
    table = pa.table(columns | {"source": ["d"], "number": [1]})
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data" / "a.parquet")
    source = {"format": "parquet", "path": str(tmp_path / "data"), "task": "vqa"}
    lost = measure(make_run(source, tmp_path / "out")).info.lost
    assert {what: count for what, (count, _) in lost.items()} == {
        "field 'left_view' holds media that no sample uses": 1,
        "field 'notes' holds text that no sample uses": 1,
    }


TEMPLATED = "<|im_start|>user\nWhat?<|im_end|>"


def test_texts_that_already_hold_a_template(tmp_path: Path) -> None:
    """Told with a sample."""
    records = [{"question": TEMPLATED if i else "What?", "answer": "This."} for i in range(4)]
    write_file(tmp_path / "a.jsonl", lines(records))
    source = {"format": "jsonl", "path": str(tmp_path / "a.jsonl"), "task": "bmr"}
    run = make_run(source, tmp_path / "out")
    info = measure(run).info
    assert [(what.split()[2], count) for what, (count, _) in sorted(info.lost.items())] == [
        ("'<|im_end|>',", 3),
        ("'<|im_start|>',", 3),
    ]
    assert "such as a:2: '<|im_start|>user\\nWhat?<|im_end|>" in info.warnings[1]


def test_every_control_token_of_a_vocabulary_is_found() -> None:
    for tokenizer in (load_tokenizer(BUILTIN), TransformersTokenizer(tiny_tokenizer())):
        for name in QWEN_SPECIAL_TOKENS:
            turn = Turn("Say it.", f"It is {name}.")
            (found,) = control_text(SourceSample("k", "vqa", (turn,)), control_pattern(tokenizer))
            assert f" {name!r}, " in found[0]
    plain = SourceSample("k", "vqa", (Turn("<image>", "a <|b|> <tool_call>"),), ("a.jpg",))
    assert not [*control_text(plain, control_pattern(tokenizer))]


def test_images_that_are_clipped(tmp_path: Path) -> None:
    """8 bits are left of each value: above 255 it is white, and between 0 and 1 black."""
    shades = np.linspace(0.1, 1, 56 * 56, dtype=np.float32).reshape(56, 56)
    grey = Image.fromarray((shades * 65535).astype(np.uint16))
    images = {"a.png": grey, "b.tiff": Image.fromarray(shades * 0.9), "c.tiff": grey}
    images["d.png"] = grey.point(lambda value: value / 256).convert("L")
    for name, image in images.items():
        image.save(tmp_path / name)
    shown = [decode_image((tmp_path / name).read_bytes()).getextrema()[0] for name in images]
    assert shown[:3] == [(255, 255), (0, 0), (255, 255)]
    assert shown[3][1] - shown[3][0] > 200
    records = [{"question": "<image>What?", "answer": name, "image": name} for name in images]
    write_file(tmp_path / "a.jsonl", lines(records))
    source = {"format": "jsonl", "path": str(tmp_path / "a.jsonl"), "task": "vqa"}
    white, black = measure(make_run(source, tmp_path / "out")).info.warnings
    assert white.startswith(
        "images of 16-bit grey become white wherever a value is above 255, as in"
    )
    assert white.endswith("; save them with 8 bits (about 2 samples, such as a:1: 'a.png')")
    assert black.startswith(
        "images of floats are clipped to 0 … 255, as in transformers: values up"
    )
    assert black.endswith("; save them with 8 bits (about 1 samples, such as a:2: 'b.tiff')")

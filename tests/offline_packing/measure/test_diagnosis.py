"""Content of records that samples lack, told with an example; and how often it is looked for."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from offline_packing.errors import StageError
from offline_packing.measure import diagnosis
from offline_packing.measure.diagnosis import estimate
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import make_plan
from offline_packing.runs.run import Run
from offline_packing.sources import SourceRecord
from offline_packing.sources.lost_fields import control_text, lost_fields
from offline_packing.sources.options import FieldMap
from offline_packing.sources.reading.locators import Locator
from task_encoders.media.image import decode_image
from task_encoders.records.record import to_sample
from task_encoders.samples import SourceSample, Turn
from task_encoders.text.qwen_vocabulary import BUILTIN, QWEN_SPECIAL_TOKENS
from task_encoders.text.tokenizer import TransformersTokenizer, control_pattern, load_tokenizer
from tests.helpers.datasets import dialogue, image_bytes, make_run, pack_all, plan_summary
from tests.helpers.formats import lines, of_lines, write_file
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from tests.helpers.videos import make_video
from tests.world import World

#: Instead of the first 4,096.
NUM_FIRST = 60
NUM_RECORDS = 220
#: Records after the first, of which one in a hundred is looked at.
LATER = range(NUM_FIRST, NUM_RECORDS, diagnosis.ONE_IN)
CONTROL = "<|im_end|>"


@pytest.fixture(autouse=True)
def few_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (diagnosis.NUM_FIRST, diagnosis.ONE_IN) == (4096, 100)
    monkeypatch.setattr(diagnosis, "NUM_FIRST", NUM_FIRST)


def record(number: int, **fields: Any) -> dict[str, Any]:
    return {"question": f"What is {number}?", "answer": f"It is {number}."} | fields


def run_of(folder: Path, records: list[dict[str, Any]], task: str = "bmr", **sections: Any) -> Run:
    return make_run(of_lines(folder / "a.jsonl", records, task), folder / "out", **sections)


def lost_by(folder: Path, records: list[dict[str, Any]], **sections: Any) -> dict[str, int]:
    """What is told of records, each with its count; none of them is set aside."""
    info = measure(run_of(folder, records, **sections)).info
    assert info.num_set_aside == 0
    return {what: count for what, (count, _) in info.lost.items()}


def looked_at(monkeypatch: pytest.MonkeyPatch, run: Run) -> list[str]:
    """Keys of the samples that measuring looks at."""
    keys: list[str] = []

    def note(record: Any, sample: Any, fields: Any) -> Any:
        keys.append(sample.key)
        return lost_fields(record, sample, fields)

    monkeypatch.setattr(diagnosis, "lost_fields", note)
    measure(run)
    return keys


@pytest.mark.parametrize("place", [0, LATER[1]])
def test_what_is_wrong_is_found(place: int, tmp_path: Path) -> None:
    """Of the first each is found, and of the others one in a hundred."""
    records = [record(i) for i in range(NUM_RECORDS)]
    records[place] |= {"note": "More text.", "answer": f"So {CONTROL}"}
    records[LATER[1] + 1] |= {"other": "Text that is not looked at."}
    run = run_of(tmp_path, records, engine={"samples_per_part": 128})
    count = 1 if place < NUM_FIRST else (NUM_RECORDS - NUM_FIRST) // len(LATER)
    note, control = measure(run).info.warnings
    assert note == (
        f"field 'note' holds text that no sample uses (about {count} samples, such as "
        f"a:{place + 1}: 'More text.')"
    )
    assert control.startswith(f"texts hold {CONTROL!r}, trained as text")
    assert f"(about {count} samples, such as a:{place + 1}: " in control
    assert note in plan_summary(run)


def test_counts_are_estimates_that_no_index_exceeds(tmp_path: Path) -> None:
    records = [
        record(i, answer="Yes." if i % 10 else "No.", note="Text.") for i in range(NUM_RECORDS)
    ]
    info = measure(run_of(tmp_path, records)).info
    assert [count for count, _ in info.lost.values()] == [NUM_RECORDS]
    # of the first 54 of 60; after them numbers 60 and 160 are looked at, all of which answer No
    assert info.common["answers"] == (NUM_RECORDS - 54, "'No.'")


@pytest.mark.parametrize("samples_per_part", [64, 150])
def test_parts_do_not_change_which_are_looked_at(
    samples_per_part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = {"samples_per_part": samples_per_part}
    run = run_of(tmp_path, [record(i) for i in range(NUM_RECORDS)], engine=engine)
    expected = [f"a:{i + 1}" for i in [*range(NUM_FIRST), *LATER]]
    assert looked_at(monkeypatch, run) == expected


def test_skipped_records_have_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record(i) for i in range(NUM_RECORDS)]
    known = [one | {"id": str(i)} for i, one in enumerate(records)]
    pack_all(run_of(tmp_path / "old", known[:NUM_RECORDS:3]))
    source = of_lines(tmp_path / "a.jsonl", known, skip=[str(tmp_path / "old" / "out")])
    keys = looked_at(monkeypatch, make_run(source, tmp_path / "new"))
    assert keys == [str(i) for i in [*range(NUM_FIRST), *LATER] if i % 3]


def test_a_heading_is_not_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "".join(f"What is {i}?\tIt is {i}.\n" for i in range(NUM_RECORDS))
    write_file(tmp_path / "a.tsv", f"question\tanswer\n{rows}".encode())
    source = {"format": "tsv", "path": str(tmp_path / "a.tsv"), "task": "bmr"}
    for size in (70, 1000):
        run = make_run(source, tmp_path / f"out{size}", engine={"samples_per_part": size})
        assert looked_at(monkeypatch, run) == [f"a:{i + 2}" for i in [*range(NUM_FIRST), *LATER]]


def test_files_whose_records_are_not_counted_share_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = gzip.compress(lines([record(i) for i in range(250)]), mtime=0)
    for name in "ab":
        write_file(tmp_path / "data" / f"{name}.jsonl.gz", data)
    source = {"format": "jsonl", "path": str(tmp_path / "data"), "task": "bmr"}
    keys = looked_at(monkeypatch, make_run(source, tmp_path / "out"))
    expected = [*range(1, 31), 31, 131, 231]
    assert keys == [f"{name}:{i}" for name in "ab" for i in expected]


def test_sources_are_estimated_apart() -> None:
    """What is wrong in a source of two does not depend on the size of the other."""

    def notes(first: tuple[int, int], later: tuple[int, int], key: str) -> dict[str, Any]:
        lost = [{"": count, "x": lacking} for count, lacking in (first, later)]
        return {"lost": lost, "answers": [{}, {}], "examples": {"x": key}}

    parts = [
        (0, 100, notes((40, 3), (3, 1), "a")),
        (1, 10**6, notes((40, 0), (10**4, 0), "b")),
        (0, 100, notes((0, 0), (1, 0), "c")),
    ]
    assert estimate(parts) == ({"x": (3 + (200 - 40) // 4, "a")}, (0, ""))


def test_an_index_of_another_layout_is_not_taken_for_one_with_rules(tmp_path: Path) -> None:
    records = [record(0), record(1, answer=f"So {CONTROL}")]
    samples = measure(run_of(tmp_path, records, "vqa"))
    assert samples.table("unfit")["unfit"].null_count == 2
    other = run_of(tmp_path, records, "vqa", output={"layout": "loongforge"})
    with pytest.raises(StageError, match="not measured for layout loongforge; run measure again"):
        make_plan(other, samples)
    output = {"layout": "loongforge", "overwrite": True}
    again = measure(run_of(tmp_path, records, "vqa", output=output))
    tags = "text that spells control tokens, nor <image> in an answer"
    assert again.table("unfit")["unfit"].to_pylist() == [None, tags]


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
CALLED = "field {!r} holds {} that no sample uses"
PICTUR = "source.fields.images=pictur is not in the record"


@pytest.mark.parametrize(
    ("content", "kind", "names"),
    [
        ({"image_2": "b.jpg", "image": "a.jpg"}, "media", "image_2"),
        ({"pics": ["a.jpg", "b.png"]}, "media", "pics"),
        ({"meta": {"path": "a.webp"}}, "media", "meta"),
        ({"picture": {"bytes": None, "path": "a"}}, "media", "picture"),
        ({"shot": "data:image/png;base64,iVBOR"}, "media", "shot"),
        ({"link": "https://example.org/a.jpg?size=2"}, "media", "link"),
        ({"images": ["a.jpg"], "image": "b.jpg"}, "media", "image"),
        ({"image": "x/a.jpg", "file_name": "a.jpg"}, "", ""),  # the same picture
        ({"image": "a.jpg", "url": "https://example.org/b.jpg"}, "", ""),  # where it came from
        ({"image_id": 7, "height": 3, "image": "a.jpg", "data_source": "coco"}, "", ""),
        ({"images": [], "image": None}, "", ""),
        ({"note": "see a.jpg for more\nof it"}, "text", "note"),
        ({"colour": "blue"}, "text", "colour"),
        ({"source": "Two words"}, "text", "source"),
        ({"extra": [{"text": "More."}]}, "text", "extra"),
        ({"caption": "A cat."}, "text", "caption"),
        ({"question": None, "messages": dialogue("What?", "This.")}, "text", "answer"),
    ],
)
def test_content_of_other_fields(content: dict[str, Any], kind: str, names: str) -> None:
    found = told({name: value for name, value in {**ASKED, **content}.items() if value is not None})
    expected = [f"field {name!r} holds {kind} that no sample uses" for name in names.split()]
    assert [line.partition(";")[0] for line in found] == expected


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        ({"caption": "A cat.", "text": "A dog.", "system": "Be brief."}, {"task": "captioning"},
         [CALLED.format("system", "text"), CALLED.format("text", "text")]),
        ({"q": "What?", "answer": "This."}, {"task": "captioning"},
         ["field 'answer' is trained as a caption; where is its question?",
          CALLED.format("q", "text")]),
        ({**ASKED, "context": "A passage.", "choices": ["a", "b"], "label": False}, {},
         [*(f"field {name!r} is not shown beside 'question'" for name in ("choices", "context")),
          "records say label: false, as preferences mark bad answers"]),
        ({"messages": dialogue("<ImageHere><ImageHere>What?", "This."), "image": "a.jpg"}, {},
         ["prompts hold '<ImageHere>' as text; media are marked by <image>"]),
        ({"messages": dialogue("![](gone.jpg)What?", "This: ![](gone.jpg)")}, {},
         ["prompts hold pictures as text that are neither data: URIs nor files of image_root"]),
        ({**ASKED, "images": []}, {"paired": ("k.jpg",)},
         ["files beside their record are used by no sample: it says that it has none"]),
    ],
)  # fmt: skip
def test_texts_that_are_not_shown(
    content: dict[str, Any], options: dict[str, Any], expected: list[str]
) -> None:
    assert told(content, **options) == expected


@pytest.mark.parametrize(
    ("fields", "images", "lost"),
    [
        ({"question": "q"}, ("a.jpg",), []),
        ({"question": "q", "images": "pictur"}, (), [PICTUR]),
        ({"question": "q", "images": "more[0].at"}, ("b.jpg",), []),
        ({"question": "q", "id": "image"}, ("a.jpg",), []),
    ],
)
def test_a_mapping_overlays_the_default_names(
    fields: dict[str, str], images: tuple[str, ...], lost: list[str]
) -> None:
    content: dict[str, Any] = {"q": "What?", "answer": "This.", "image": "a.jpg"}
    if "more[0].at" in fields.values():
        content["more"] = [{"at": "b.jpg"}]
    names = FieldMap(fields)
    sample = to_sample(names.apply(content), "k", "vqa")
    assert (sample.turns[0].prompt, sample.turns[0].answer) == ("What?", "This.")
    assert sample.images == images
    assert told(content, fields=fields) == lost


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
    pq.write_table(table, tmp_path / "a.parquet")
    source = {"format": "parquet", "path": str(tmp_path / "a.parquet"), "task": "vqa"}
    lost = measure(make_run(source, tmp_path / "out")).info.lost
    assert {what: count for what, (count, _) in lost.items()} == {
        CALLED.format("left_view", "media"): 1,
        CALLED.format("notes", "text"): 1,
    }


def test_every_control_token_of_a_vocabulary_is_found() -> None:
    for tokenizer in (load_tokenizer(BUILTIN), TransformersTokenizer(tiny_tokenizer())):
        for name in QWEN_SPECIAL_TOKENS:
            turn = Turn("Say it.", f"It is {name}.")
            sample, written = SourceSample("k", "vqa", (turn,)), {"<|im_end|>"}
            (found,) = control_text(sample, control_pattern(tokenizer), written)
            is_written = name in written
            assert found[0].startswith(f"texts hold {name!r}, ") == is_written
            assert (found[0] == f"control token {name}") != is_written
    plain = SourceSample("k", "vqa", (Turn("<image>", "a <|b|> <tool_call>"),), ("a.jpg",))
    assert not [*control_text(plain, control_pattern(tokenizer), ())]


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
    white, black = measure(run_of(tmp_path, records, "vqa")).info.warnings
    for line, start, end in (
        (white, "images of 16-bit grey become white wherever a value is above 255, as in",
         "; save them with 8 bits (about 2 samples, such as a:1: 'a.png')"),
        (black, "images of floats are clipped to 0 … 255, as in transformers: values up",
         "; save them with 8 bits (about 1 samples, such as a:2: 'b.tiff')"),
    ):  # fmt: skip
        assert line.startswith(start)
        assert line.endswith(end)


def test_odd_answers_and_weights(tmp_path: Path) -> None:
    """Each with its count; none of them for answers that are plain text."""
    asked = {"question": "What?"}
    records: list[dict[str, Any]] = [
        *({**asked, "answer": i} for i in range(2)),
        *({**asked, "answers": [f"a{i}", "b"]} for i in range(3)),
        {**asked, "answers": ["only"]},
        *({**asked, "answer": text} for text in ("null", " NaN", "\u200b")),
        {**asked, "answer": "nullable", "weight": 0},
        {**asked, "answer": "Plain.", "weight": 1},
        {"messages": [*dialogue("q", "r"), *dialogue("s", "t")]},
    ]
    records[-1]["messages"][1]["mask"] = 1
    assert lost_by(tmp_path, records) == {
        "answers that are numbers, true or false are trained as their text": 2,
        "of several 'answers' the first is trained; source.fields names another": 3,
        "answers are 'null', 'nan' or characters that show nothing": 3,
        "field 'weight' of the record is not read; loss weights belong in messages": 1,
        "messages have a 'mask', which is not read; loss_weight: 0 trains none of a message": 1,
    }


def test_calls_need_no_text(tmp_path: Path) -> None:
    records = [
        {"messages": [*dialogue("q"), {"role": "assistant", "content": text, "tool_calls": [call]}]}
        for number, text in enumerate((None, "", "", "\n", " ", "null"))
        for call in [{"function": {"name": "f", "arguments": {"a": number}}}]
    ]
    model = {"family": "qwen3_vl", "processor": "builtin", "max_pixels": 10**6}
    assert lost_by(tmp_path, records, model=model) == {
        "answers are 'null', 'nan' or characters that show nothing": 1
    }


@pytest.mark.parametrize("family", ["qwen3_5", "glm4v"])
def test_thoughts_that_the_template_leaves_out(family: str, world: World, tmp_path: Path) -> None:
    """Each sample once: thoughts of earlier turns, in an answer and in a field of its own."""

    def turns(*thoughts: str | None) -> list[dict[str, Any]]:
        said = [dialogue(f"q{i}", f"<think>{one}</think>a") for i, one in enumerate(thoughts)]
        return [message for pair in said for message in pair]

    field = dialogue("q", "a") + dialogue("r", "b")
    field[1]["reasoning_content"] = field[3]["reasoning_content"] = "f"
    records = [
        {"id": "both", "messages": turns("t1", "t2", "t3")},
        {"id": "field", "messages": field},
        {"id": "none", "messages": dialogue("q", "a") + dialogue("r", "b")},
        {"id": "last", "messages": turns("t")},
    ]
    model = {"family": family, "processor": str(world.tokenizer(family)), "max_pixels": 10**6}
    info = measure(run_of(tmp_path, records, model=model)).info
    assert info.num_set_aside == 0
    assert info.warnings == [
        "thoughts (reasoning_content, <think>) of earlier turns are cut by the chat template "
        "(about 2 samples, such as both: 't1')"
    ]


@pytest.mark.parametrize(
    ("family", "given"), [("qwen3_vl", None), ("qwen3_vl", False), ("qwen2_5_vl", None)]
)
def test_tags_around_videos_depend_on_transformers(
    family: str, given: bool | None, tmp_path: Path
) -> None:
    """Told once, unless packs have none."""
    model: dict[str, Any] = {"family": family, "processor": "builtin", "max_pixels": 10**6}
    if given is not None:
        model["outer_video_tags"] = given
    (tmp_path / "a.mp4").write_bytes(make_video(12))
    asked = {"messages": dialogue("<video>What?", "That.")}
    records = [asked | {"videos": ["a.mp4"]}] * 2 + [{"messages": dialogue("q", "a")}]
    warnings = measure(run_of(tmp_path, records, model=model)).info.warnings
    told = [line for line in warnings if "tags" in line]
    assert told == [
        "videos have outer vision tags, as transformers writes them since 5.10; for trainers with "
        "4.57 to 5.9 set model.outer_video_tags: false (about 2 samples, such as a:1)"
    ] * (given is not False and family != "qwen2_5_vl")

"""pack.on_overlong: split_turns: conversations longer than a pack become several samples, the same
as those of a slow reference that tries every choice. Documents: pictures stay in their places, and
long ones are cut so that each token, and each picture, is trained once."""

import itertools
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from offline_packing.cli.starter import render_config
from offline_packing.config.packing import parse_config
from offline_packing.engines.local import LocalEngine
from offline_packing.errors import ConfigError, StageError
from offline_packing.export.export import export
from offline_packing.measure.measure import measure, preview_measure
from offline_packing.report.preview import preview
from offline_packing.report.preview_text import render_pack
from offline_packing.report.report import report
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run, open_encoder
from offline_packing.runs.set_aside import list_set_aside
from offline_packing.sources.base import ConversationPart
from offline_packing.sources.recognise import recognise
from offline_packing.storage.files import read_json
from offline_packing.verify.verify import render_result, verify
from task_encoders.records.record import to_sample
from task_encoders.samples import SampleError, SourceSample
from tests.helpers.datasets import (
    WORDS,
    dialogue,
    image_bytes,
    index_rows,
    make_config,
    make_run,
    outcomes,
    pack_all,
    packed_run,
    plan_index,
    plan_summary,
    write_planned,
)
from tests.helpers.formats import lines, write_file
from tests.helpers.long_conversations import (
    SIZES,
    Record,
    check_packed,
    conversations,
    numbers,
    run_of,
    spoken,
    whole_samples,
)
from tests.helpers.outputs import samples_of, set_aside_in_plan
from tests.helpers.tiny_families import save_tokenizer


def test_what_is_said_of_it(tmp_path: Path) -> None:
    records = conversations(11, seed=3, most=40)
    records[7]["messages"][-1]["content"] = " ".join(WORDS * 40)
    records.append({"id": "alone", "messages": dialogue("All?", " ".join(WORDS * 40))})
    packed = run_of(tmp_path, records, output={"packs_per_shard": 4})
    pack_all(packed)
    check_packed(packed, records)
    info = open_index(packed).info
    rows = [row for row in index_rows(packed) if row["part"]]
    cut = len({row["part"]["key"] for row in rows})
    assert info.split == {"conversations": cut, "samples": len(rows)}
    line = f"{cut} were cut into {len(rows)} samples"
    assert f"too long              {line}\n" in plan_summary(packed)
    report(packed)
    assert (
        read_json(packed.workspace.report / "report.json")["figures"]["samples"]["too long"] == line
    )
    assert line in (packed.workspace.report / "report.html").read_text()
    counts = read_json(packed.workspace.manifest)["counts"]
    lost = [row["key"] for row in set_aside_in_plan(packed)]
    whole = [key for key in lost if "[" not in key]
    assert whole == ["alone"] != lost
    assert counts["records"] == {"read": 12, "packed": 11, "set_aside": 1}
    assert counts["samples"] == counts["packed"] + len(lost) == info.num_samples
    assert "12 = 11 in packs + 1 set aside" in render_result(verify(packed), deep=False)
    told = ", and cut conversations and documents that fit no pack\n"
    assert preview_measure(run_of(tmp_path, records, "new")).endswith(told)


def test_a_turn_that_is_too_long_by_itself(tmp_path: Path) -> None:
    """It is set aside, or its answer cut where a token ends; a conversation of such turns only, or
    of one, stays whole."""
    records = [
        spoken(20, 900, 30, key="a"),
        spoken(900, 800, key="b"),
        spoken(900, key="c"),
        spoken(20, key="d"),
    ]
    records[0]["messages"][3]["content"] = "Überlänge, 長い " * 300
    run = run_of(tmp_path, records)
    manifest = pack_all(run)
    assert [row["key"] for row in index_rows(run)] == ["a[0:1]", "a[1:2]", "a[2:3]", "b", "c", "d"]
    lost = {row["key"]: row["detail"] for row in set_aside_in_plan(run)}
    assert lost.keys() == {"a[1:2]", "b", "c"}
    assert manifest.counts.records == {"read": 4, "packed": 2, "set_aside": 2}
    check_packed(run, records)


def answered(text: str, thought: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "reasoning_content": thought * 30}


LOOK = {"function": {"name": "look", "arguments": {"at": "it"}}}
CALLED = {
    "id": "tools",
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
    "messages": [
        *dialogue("Hm?", "red " * 60, "What is there?"),
        {"role": "assistant", "content": "", "tool_calls": [LOOK]},
        {"role": "tool", "content": "a circle"},
        answered("A circle " * 40, "Hm. "),
        *dialogue("And now?"),
        answered("blue " * 90, "So. "),
        *dialogue("Well?"),
        answered("So it is.", "Yes. "),
    ],
}


@pytest.mark.parametrize("context_turns", [0, 1])
def test_tools_and_thoughts(context_turns: int, tmp_path: Path) -> None:
    """A result stays with its call. Of a part the last thoughts are shown, as its template does."""
    save_tokenizer("qwen3_5", checkpoint := tmp_path / "checkpoint")
    pack = {"seq_length": 1200, "split_turns": {"context_turns": context_turns}}
    model = {"family": "qwen3_5", "processor": str(checkpoint), "min_pixels": 3136}
    run = run_of(tmp_path, [CALLED], pack=pack, model=model)
    pack_all(run)
    assert verify(run, deep=True).problems == []
    samples = {sample.key: sample for _, sample, _ in samples_of(run)}
    taken = sorted(numbers(key) for key in samples)
    assert [turn for one in taken for turn in range(*one)] == list(range(5))
    assert len(taken) > 1
    assert not any(first == 2 for first, _ in taken)
    whole = to_sample(CALLED, "tools", "bmr")
    for key, sample in samples.items():
        first, end = numbers(key)
        own = [turn for turn in sample.turns if turn.weight]
        assert tuple(own) == whole.turns[first:end]
        assert sample.tools == whole.tools
        shown = sample.turns[: -len(own)]
        earlier = whole.turns[first - len(shown) : first]
        assert shown == tuple(replace(turn, weight=0.0) for turn in earlier)
        assert len(shown) in (0, 2 * context_turns)


CUT = {"on_overlong": "split_turns"}


@pytest.mark.parametrize(
    ("pack", "others", "message"),
    [
        ({"split_turns": {"context_turns": 2}}, {}, "split_turns has no effect with"),
        (CUT, {"model": {"loss_on": "last"}}, "loss_on=last"),
        (
            {**CUT, "split_turns": {"context_turns": 2}},
            {"output": {"layout": "loongforge"}},
            "context_turns=2 shows turns without loss, and output.layout='loongforge' would train",
        ),
        (
            {**CUT, "split_turns": {"context_turns": 1}},
            {"task": "captioning"},
            "all text of a document is trained",
        ),
    ],
)
def test_what_is_refused(
    pack: dict[str, Any], others: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = {"format": "jsonl", "path": "a.jsonl", "task": others.get("task", "bmr")}
    sections = {name: one for name, one in others.items() if name != "task"}
    with pytest.raises(ConfigError, match=message):
        make_config(source, tmp_path, pack=pack, **sections)


def record(key: str, num_turns: int) -> Record:
    """A conversation of some 40 tokens per turn."""
    texts = [text for i in range(num_turns) for text in (f"{i} of {key}?", "red " * 25)]
    return {"id": key, "messages": dialogue(*texts)}


def test_conversations_whose_parts_no_template_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are set aside whole, and why is said."""
    take = ConversationPart.take

    def refuse(part: ConversationPart, sample: SourceSample) -> SourceSample:
        if part.key == "no":
            raise SampleError("not_in_template", "no such turns")
        return take(part, sample)

    monkeypatch.setattr(ConversationPart, "take", refuse)
    records = [record("no", 9), record("yes", 9), record("short", 1)]
    run = run_of(tmp_path, records)
    manifest = pack_all(run)
    (line,) = list_set_aside(run)
    why = "it fits no pack, and the chat template writes no part of it"
    assert line.split("\t")[::2] == ["no", "not_in_template"]
    assert line.endswith(f"\t{why}\n")
    assert manifest.counts.records == {"read": 3, "packed": 2, "set_aside": 1}
    assert "not_in_template       1\n" in plan_summary(run)


def test_new_conversations(tmp_path: Path) -> None:
    """source.skip knows a record by any of its parts."""
    records = [record(f"c{i}", 9) for i in range(4)]
    old = run_of(tmp_path, records[:3], "old")
    pack_all(old)
    new = run_of(tmp_path, records, "new", source={"skip": [str(old.workspace.root)]})
    info = measure(new).info
    assert info.num_skipped == 3
    assert {row["part"]["key"] for row in index_rows(new)} == {"c3"}


def test_room_for_what_a_layout_adds(tmp_path: Path) -> None:
    """LoongForge's templates keep the newline after the last answer."""
    records = [record(f"c{i}", 9 + i) for i in range(6)]
    run = run_of(tmp_path, records, output={"layout": "loongforge"})
    pack_all(run)
    assert not set_aside_in_plan(run)
    assert verify(run, deep=True).problems == []
    assert open_index(run).array("num_tokens").max() <= 255


def test_records_that_share_an_id(tmp_path: Path) -> None:
    """Their parts have keys of their own; those of a copy are duplicates."""
    records = [record("c", 9), record("d", 9), {**record("x", 9), "id": "c"}]
    run = run_of(tmp_path, [*records, records[0]])
    counts = pack_all(run).counts
    assert verify(run, deep=True).problems == []
    assert counts.records == {"read": 4, "packed": 3, "set_aside": 1}
    keys = [row["key"] for row in index_rows(run)]
    starts = list(dict.fromkeys(key.partition("[")[0] for key in keys))
    assert re.fullmatch(r"c d c@[0-9a-f]{16}", " ".join(starts))
    assert {row["reason"] for row in set_aside_in_plan(run)} == {"duplicate_key"}
    assert {row["part"]["key"] for row in index_rows(run)} == set(starts)


def ids_of(encoder: Any, sample: SourceSample) -> list[int]:
    """Return the tokens of a document whose pictures have one size."""
    return list(encoder.tokenize(sample, [(56, 56)] * len(sample.images)).tokens)


def sizes_of(sample: SourceSample) -> list[tuple[int, int]]:
    return [SIZES[int(name[0])] for name in sample.images]


def slow_part(whole: SourceSample, begin: int, first: int, end: int, image: int) -> SourceSample:
    """Turns of a conversation whose pictures are marked, and those from `image` on in front."""
    marks = [turn.prompt.count("<image>") for turn in whole.turns]
    shown = whole.images[image : sum(marks[:end])]
    turns = [
        replace(turn, weight=0.0) if i < first else turn for i, turn in enumerate(whole.turns)
    ][begin:end]
    return replace(whole, turns=tuple(turns), images=shown)


def slow_parts(
    run: Run, whole: SourceSample
) -> list[tuple[tuple[int, int, int], tuple[str, ...], int]] | None:
    """(begin, first, end), pictures and tokens of each part; every choice is tried one by one."""
    encoder, pack = open_encoder(run.config.model), run.config.pack
    options, marks = pack.split_turns, [turn.prompt.count("<image>") for turn in whole.turns]

    def measured(begin: int, first: int, end: int, image: int) -> tuple[SourceSample, int]:
        part = slow_part(whole, begin, first, end, image)
        return part, encoder.measure(part, sizes_of(part)).num_tokens

    def fits(*cut: int) -> bool:
        part, num_tokens = measured(*cut)
        return num_tokens <= pack.seq_length and len(part.images) <= pack.budgets.get("images", 99)

    if fits(0, 0, len(whole.turns), 0):
        return None
    found, first, any_fits = [], 0, False
    while first < len(whole.turns):
        if not whole.turns[first].weight:
            first += 1
            continue
        begin = max(0, first - options.context_turns)
        image = sum(marks[:begin])
        while not fits(begin, first, first + 1, image):
            if begin < first:
                begin += 1
                image = sum(marks[:begin])
            else:
                break
        end = first + 1
        while end < len(whole.turns) and fits(begin, first, end + 1, image):
            end += 1
        while not whole.turns[end - 1].weight:
            end -= 1
        part, num_tokens = measured(begin, first, end, image)
        any_fits |= fits(begin, first, end, image)
        found.append(((begin, first, end), part.images, num_tokens))
        first = end
    return found if any_fits else None


def check_against_reference(run: Run, records: list[Record]) -> int:
    """Compare the index with the slow reference; returns the number of parts."""
    measure(run)
    rows = index_rows(run)
    by_record: dict[str, list[Any]] = {}
    for row in rows:
        if part := row["part"]:
            turns = tuple(part[name] for name in ("begin", "first", "end"))
            assert row["key"] == f"{part['key']}[{turns[1]}:{turns[2]}]"
            names = tuple(medium["container"] for medium in row["media"])
            by_record.setdefault(part["key"], []).append((turns, names, row["num_tokens"]))
    keys = [(row["part"] or row)["key"] for row in rows]
    assert list(dict.fromkeys(keys)) == [one["id"] for one in records]
    for key, whole in whole_samples(records).items():
        assert by_record.get(key) == slow_parts(run, whole), key
    return sum(map(len, by_record.values()))


#: conversations of the exhaustive cases; FUZZED_SAMPLES=2000 takes five CPU minutes
MANY = int(os.environ.get("FUZZED_SAMPLES", "100"))
LENGTHS: list[tuple[dict[str, Any], str, int]] = [
    ({"seq_length": 256, "split_turns": {"context_turns": 1}}, "vqa", 8),
    ({"seq_length": 512, "budgets": {"images": 2}}, "bmr", 6),
    ({"seq_length": 1024, "split_turns": {"context_turns": 2}}, "bmr", 4),
]


@pytest.mark.parametrize(
    ("pack", "task", "count"),
    LENGTHS + [pytest.param(*own[:2], MANY, marks=pytest.mark.exhaustive) for own in LENGTHS],
)
def test_parts_are_those_of_a_slow_reference(
    pack: dict[str, Any], task: str, count: int, tmp_path: Path
) -> None:
    records = conversations(count, pack["seq_length"])
    run = run_of(tmp_path, records, source={"task": task}, pack=pack)
    assert check_against_reference(run, records) > count
    plan_index(run)
    write_planned(run)
    check_packed(run, records)


NUM_PICTURES = 6
PICTURES = [image_bytes(56 + 28 * i, 84) for i in range(NUM_PICTURES)]


def pictures(folder: Path) -> None:
    for i, data in enumerate(PICTURES):
        write_file(folder / f"{i}.jpg", data)


def documents(count: int, most: int = 30) -> list[dict[str, Any]]:
    """Documents of at most `most` paragraphs, every third with a picture in front."""
    rng = np.random.default_rng(0)
    found = []
    for i in range(count):
        text, names = "", list[str]()
        for k in range(int(rng.integers(1, most + 1))):
            if k % 3 == 0:
                text += "<image>"
                names.append(f"{rng.integers(NUM_PICTURES)}.jpg")
            words = " ".join(rng.choice(WORDS, rng.integers(3, 40)))
            text += f"{words} {k} of {i}.{('', chr(10) * 2)[int(rng.integers(2))]}"
        found.append({"id": f"d{i}", "text": text, "images": names})
    return found


def run_over(folder: Path, records: list[dict[str, Any]], **sections: Any) -> Run:
    write_file(folder / "data" / "a.jsonl", lines(records))
    pictures(folder / "data")
    source = {"format": "jsonl", "path": str(folder / "data"), "task": "captioning"}
    pack = {"seq_length": 256, "max_set_aside": 1, **sections.pop("pack", {})}
    return make_run(source, folder / "out", pack=pack, **sections)


def test_long_documents_are_cut(tmp_path: Path) -> None:
    """Every token that carries loss is trained once, but the end tokens of parts that go on; every
    picture stands in front of its own paragraph."""
    records = documents(30)
    run = run_over(tmp_path, records, pack={"on_overlong": "split_turns"})
    manifest = pack_all(run)
    assert verify(run, deep=True).problems == []
    assert not set_aside_in_plan(run)
    encoder = open_encoder(run.config.model)
    parts: dict[str, list[tuple[int, SourceSample, list[bytes]]]] = {}
    for _, sample, media in samples_of(run):
        key, _, cut = sample.key.partition("[")
        parts.setdefault(key, []).append((int(cut.partition(":")[0] or 0), sample, media))
    assert parts.keys() == {one["id"] for one in records}
    num_cut = 0
    for record in records:
        own = [one[1:] for one in sorted(parts[record["id"]], key=lambda one: one[0])]
        num_cut += len(own) > 1
        assert "".join(one.turns[0].answer for one, _ in own) == record["text"]
        assert [data for _, media in own for data in media] == [
            PICTURES[int(name[0])] for name in record["images"]
        ]
        assert [one.turns[0].truncated for one, _ in own] == [True] * (len(own) - 1) + [False]
        whole = to_sample(record, "k", "captioning")
        ids = [ids_of(encoder, one) for one in (*(part for part, _ in own), whole)]
        assert [*itertools.chain(*ids[:-1])] == ids[-1]
    assert num_cut > 10
    assert manifest.counts.records["packed"] == len(records)


def test_what_takes_no_documents(tmp_path: Path) -> None:
    """Two layouts take texts alone, and an export nothing; packs are read again as they are."""
    records = [
        {"id": "a", "text": "One <image> two", "images": ["0.jpg"]},
        {"id": "b", "text": "Alone", "images": ["2.jpg"]},
    ]
    for layout in ("loongforge", "llava_onevision"):
        run = run_over(tmp_path / layout, records, output={"layout": layout})
        assert pack_all(run).counts.records == {}
        (lost,) = set_aside_in_plan(run)
        assert lost["key"] == "a"
        assert "<image> in an answer or document" in lost["detail"]
    run = run_over(tmp_path, documents(8), pack={"on_overlong": "split_turns"})
    pack_all(run)
    with pytest.raises(StageError, match="holds a document, or a part of one, 'd"):
        export(run.workspace.root, tmp_path / "files", progress=False)
    source = {"format": "packs", "path": str(run.workspace.root), "task": "captioning"}
    again = packed_run(source, tmp_path / "again", pack={"seq_length": 256})
    first, second = (
        sorted((sample.key, sample.turns, media) for _, sample, media in samples_of(one))
        for one in (run, again)
    )
    assert first == second
    assert any(turns[0].truncated for _, turns, _ in first)


def obelics(folder: Path) -> None:
    """Rows with bytes in the place of addresses."""
    image = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])
    names = [[None, 0, None], [1, None, 2]]
    images = [
        [None if i is None else {"bytes": PICTURES[i], "path": None} for i in row] for row in names
    ]
    texts = [["Intro.", None, "End."], [None, "Two.", None]]
    table = pa.table({"images": pa.array(images, pa.list_(image)), "texts": texts})
    write_file(folder / "README.md", b"")
    pq.write_table(table, folder / "train.parquet")


def mmc4(folder: Path) -> None:
    rows = [
        {
            "text_list": ["Intro.", "End."],
            "image_info": [{"image_name": "0.jpg", "matched_text_index": 1, "raw_url": "http://a"}],
            "url": "http://b",
        },
        {
            "text_list": ["Two.", "Three."],
            "image_info": [
                {"image_name": "2.jpg", "matched_text_index": 1},
                {"image_name": "1.jpg", "matched_text_index": 0},
            ],
        },
    ]
    write_file(folder / "a.jsonl", lines(rows))
    pictures(folder)


@pytest.mark.parametrize(
    ("write", "texts"),
    [
        (obelics, ["Intro.<image>End.", "<image>Two.<image>"]),
        (mmc4, ["Intro. <image>End.", "<image>Two. <image>Three."]),
    ],
)
def test_data_sets_as_they_are(write: Any, texts: list[str], tmp_path: Path) -> None:
    """`init` picks the task, and the configuration that it writes packs all."""
    write(tmp_path / "data")
    found = recognise(str(tmp_path / "data"))
    assert found.options["task"] == "captioning"
    assert [line for example in found.examples for line in example.lost] == []
    config = parse_config(yaml.safe_load(render_config(found, str(tmp_path / "out"))))
    run = Run(config, LocalEngine(0))
    pack_all(run)
    assert verify(run, deep=True).problems == []
    samples = sorted(samples_of(run), key=lambda one: texts.index(one[1].turns[0].answer))
    assert [sample.turns[0].answer for _, sample, _ in samples] == texts
    assert [media for *_, media in samples] == [PICTURES[:1], PICTURES[1:3]]
    text = "".join(render_pack(pack) for pack in preview(run))
    assert re.search(r"Intro\..*\[image 6x4.*End\.", text, re.DOTALL), text
    assert "[text: <image>]" not in text


def test_addresses_are_refused(tmp_path: Path) -> None:
    run = run_over(tmp_path, [{"id": "a", "texts": ["One."], "images": ["https://a.b/c.jpg"]}])
    assert outcomes(run) == {"a": "missing_image"}
    assert "for example with img2dataset, and name the file" in "".join(list_set_aside(run))

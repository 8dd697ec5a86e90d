"""pack.on_overlong: split_turns: conversations longer than a pack become several samples, the same
as those of a slow reference that tries every choice."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offline_packing.errors import ConfigError, StageError
from offline_packing.measure.measure import measure, preview_measure
from offline_packing.report.preview import preview
from offline_packing.report.preview_text import render_pack
from offline_packing.report.report import report
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run, open_encoder
from offline_packing.runs.set_aside import list_set_aside
from offline_packing.sources.base import ConversationPart
from offline_packing.storage.files import read_json
from offline_packing.verify.verify import render_result, verify
from task_encoders.records.record import to_sample
from task_encoders.samples import SampleError, SourceSample
from tests.helpers.datasets import (
    WORDS,
    dialogue,
    index_rows,
    make_config,
    pack_all,
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
from tests.helpers.outputs import packs_of, samples_of, set_aside_in_plan
from tests.helpers.tiny_families import save_tokenizer
from tests.helpers.videos import make_video


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
    assert f"too long                {line}\n" in plan_summary(packed)
    report(packed)
    assert read_json(packed.workspace.report / "report.json")["split_turns"] == line
    assert line in (packed.workspace.report / "report.html").read_text()
    counts = read_json(packed.workspace.manifest)["counts"]
    lost = [row["key"] for row in set_aside_in_plan(packed)]
    whole = [key for key in lost if "[" not in key]
    assert whole == ["alone"] != lost
    details = [row["detail"] for row in set_aside_in_plan(packed)]
    assert all(re.fullmatch(r"\d+ tokens > seq_length 256", one) for one in details)
    assert counts["records"] == {
        "read": len(records),
        "packed": len(records) - len(whole),
        "set_aside": len(whole),
    }
    assert counts["samples"] == counts["packed"] + len(lost) == info.num_samples
    texts = [render_pack(pack) for pack in preview(packed, num_packs=3)]
    assert re.search(r"c\d+\[\d+:\d+\]", "".join(texts))
    shown, kept = render_result(verify(packed), deep=False), len(records) - len(whole)
    assert f"{len(records)} = {kept} in packs + {len(whole)} set aside" in shown
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
        ({"split_turns": {"context_turns": 2}}, {}, "split_turns changes nothing under"),
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


def record(key: str, num_turns: int, *pictures: str, **more: Any) -> Record:
    """A conversation of some 40 tokens per turn; a picture in front of each of the first turns."""
    marks = ["<image>"] * len(pictures) + [""] * num_turns
    texts = [text for i in range(num_turns) for text in (f"{marks[i]}{i} of {key}?", "red " * 25)]
    return {"id": key, "messages": dialogue(*texts), "images": list(pictures), **more}


def packed_well(run: Run) -> list[tuple[str, list[str]]]:
    """Pack, and check that all is right; (split, keys) of each pack."""
    pack_all(run)
    assert verify(run, deep=True).problems == []
    assert not set_aside_in_plan(run)
    return packs_of(run) if run.config.output.layout == "energon" else []


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
    """source.skip knows a record by any of its parts; these belong to packs of one length."""
    records = [record(f"c{i}", 9) for i in range(4)]
    old = run_of(tmp_path, records[:3], "old")
    packed_well(old)
    write_file(tmp_path / "a.jsonl", lines(records))
    new = run_of(tmp_path, records, "new", source={"skip": [str(old.workspace.root)]})
    info = measure(new).info
    assert info.num_skipped == 3
    assert {row["part"]["key"] for row in index_rows(new)} == {"c3"}
    with pytest.raises(StageError, match=r"pack\.seq_length was 256, is 300"):
        measure(run_of(tmp_path, records, "old", pack={"seq_length": 300}))


def test_parts_keep_the_budgets_of_packs(tmp_path: Path) -> None:
    """A conversation with more images than a pack may hold is cut; others are not."""
    records = [record("many", 5, *(f"{i % 4}.jpg" for i in range(5))), record("few", 2, "0.jpg")]
    pack = {"budgets": {"images": 2}, "seq_length": 512}
    run = run_of(tmp_path, records, pack=pack)
    packed_well(run)
    found = {row["key"]: row["num_images"] for row in index_rows(run)}
    assert found == {"many[0:2]": 2, "many[2:4]": 2, "many[4:5]": 1, "few": 1}
    whole = run_of(tmp_path, records[1:], "whole", pack=pack)
    assert packed_well(whole) == [("train", ["few"])]
    assert (open_index(whole).info.split, pack_all(whole).counts.records) == ({}, {})


def test_room_for_what_a_layout_adds(tmp_path: Path) -> None:
    """LoongForge's templates keep the newline after the last answer."""
    records = [record(f"c{i}", 9 + i) for i in range(6)]
    run = run_of(tmp_path, records, output={"layout": "loongforge"})
    packed_well(run)
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


def test_conversations_with_videos(tmp_path: Path) -> None:
    """Each part has the images and videos of its turns."""
    write_file(tmp_path / "v.mp4", make_video(6, 56, 56))
    marks = ["<video>\n<image>", "", "<image>", "<video>", "", ""]
    texts = [text for i, mark in enumerate(marks) for text in (f"{mark}{i}?", "red " * 120)]
    media = {"images": ["0.jpg", "1.jpg"], "videos": ["v.mp4", "v.mp4"]}
    one = {"id": "c", "messages": dialogue(*texts), **media}
    run = run_of(tmp_path, [one], pack={"seq_length": 512})
    packed_well(run)
    turns = {row["key"]: range(*numbers(row["key"])) for row in index_rows(run)}
    for row in index_rows(run):
        own = [marks[turn] for turn in turns[row["key"]]]
        shown = [sum(mark.count(f"<{kind}>") for mark in own) for kind in ("image", "video")]
        assert [row["num_images"], row["num_videos"]] == shown
    assert sorted(turn for own in turns.values() for turn in own) == [*range(6)]
    assert len(turns) > 1


def test_several_questions_of_a_record(tmp_path: Path) -> None:
    """Task vqa is cut in the same way."""
    asked = [f"{i} of it?" for i in range(9)]
    one = {"id": "c", "image": "1.jpg", "question": asked, "answer": ["red " * 25] * 9}
    run = run_of(tmp_path, [one], source={"task": "vqa"})
    packed_well(run)
    found = [
        turn.prompt.replace("<image>", "")
        for _, sample, _ in samples_of(run)
        for turn in sample.turns
    ]
    assert sorted(found) == asked
    assert sum(len(media) for _, _, media in samples_of(run)) == 1


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
LENGTHS: list[tuple[int, dict[str, Any], int]] = [
    (256, {"context_turns": 1}, 8),
    (512, {}, 6),
    (1024, {"context_turns": 2}, 4),
]


@pytest.mark.parametrize(
    ("seq_length", "options", "count"),
    LENGTHS + [pytest.param(*own[:2], MANY, marks=pytest.mark.exhaustive) for own in LENGTHS],
)
def test_parts_are_those_of_a_slow_reference(
    seq_length: int, options: dict[str, Any], count: int, tmp_path: Path
) -> None:
    records = conversations(count, seq_length)
    run = run_of(tmp_path, records, pack={"seq_length": seq_length, "split_turns": options})
    assert check_against_reference(run, records) > count
    plan_index(run)
    write_planned(run)
    check_packed(run, records)

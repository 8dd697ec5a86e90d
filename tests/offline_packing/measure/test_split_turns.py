"""pack.on_overlong: split_turns: conversations longer than a pack become several samples, the same
as those of a slow reference that tries every choice."""

import itertools
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offline_packing.config.sections import PackConfig
from offline_packing.errors import ConfigError, StageError
from offline_packing.index.records import record_numbers
from offline_packing.index.table import part_name
from offline_packing.measure import measure as measure_module
from offline_packing.measure.measure import measure, preview_measure
from offline_packing.measure.measure_part import measure_part
from offline_packing.report.preview import preview
from offline_packing.report.preview_text import render_pack
from offline_packing.report.report import report
from offline_packing.runs.artifacts import open_index, open_plan
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
    image_bytes,
    index_rows,
    make_config,
    make_run,
    pack_all,
    packed_run,
    plan_index,
    plan_summary,
    write_planned,
)
from tests.helpers.faults import KilledError, killing
from tests.helpers.formats import WRITERS, lines, write_file
from tests.helpers.long_conversations import (
    SIZES,
    Record,
    check_packed,
    conversation,
    conversations,
    numbers,
    spoken,
    whole_samples,
)
from tests.helpers.long_conversations import run_of as run_over
from tests.helpers.outputs import packs_of, samples_of, set_aside_in_plan, shard_files
from tests.helpers.tiny_families import save_tokenizer
from tests.helpers.videos import make_video


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Packed conversations of three parts of the index, most of them cut."""
    pack = {"seq_length": 256, "split_turns": {"context_turns": 1}}
    folder = tmp_path_factory.mktemp("cut")
    run = run_over(folder, RECORDS, pack=pack, output={"packs_per_shard": 4})
    pack_all(run)
    return run


def elsewhere(run: Run, name: str) -> Run:
    """The same run over the same files, into another folder."""
    output = run.config.output.model_copy(update={"path": f"{run.workspace.root}_{name}"})
    return replace(run, config=run.config.model_copy(update={"output": output}))


RECORDS = [*conversations(35, seed=3, most=40), conversation("c35", np.random.default_rng(3), 2, 1)]
RECORDS[20]["messages"][-1]["content"] = " ".join(WORDS * 40)


def test_every_trained_token_is_trained_once(packed: Run) -> None:
    check_packed(packed, RECORDS)
    result = verify(packed, deep=True)
    assert result.ok, result.problems
    assert all(len(set(names(keys))) == len(keys) for _, keys in packs_of(packed))
    lost = {row["key"]: row for row in set_aside_in_plan(packed)}
    assert re.fullmatch(r"\d+ tokens > seq_length 256", lost[max(lost)]["detail"])


def measured(run: Run) -> dict[str, bytes]:
    """All files of `measure`."""
    packing = run.workspace.packing
    patterns = ("index.json", "index/*", "set_aside/*", "files/*")
    paths = [path for pattern in patterns for path in packing.glob(pattern)]
    return {str(path.relative_to(packing)): path.read_bytes() for path in paths}


def test_the_same_bytes_after_a_kill(packed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill after the first part, half-way into another, changes neither index nor shards."""
    stopped = elsewhere(packed, "stopped")
    monkeypatch.setattr(measure_module, "measure_part", killing(measure_part, 1))
    with pytest.raises(KilledError):
        measure(stopped)
    monkeypatch.undo()
    index = stopped.workspace.index
    assert [path.name for path in index.glob("part-*")] == [part_name(0)]
    (index / part_name(2)).write_bytes(b"cut")
    pack_all(stopped)
    assert open_index(packed).info.part_rows[2] > 0
    assert measured(stopped) == measured(packed)
    assert shard_files(stopped) == shard_files(packed)


def test_what_is_said_of_it(packed: Run) -> None:
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
    assert counts["records"] == {
        "read": len(RECORDS),
        "packed": len(RECORDS) - len(whole),
        "set_aside": len(whole),
    }
    assert counts["samples"] == counts["packed"] + len(lost) == info.num_samples
    texts = [render_pack(pack) for pack in preview(packed, num_packs=3)]
    assert re.search(r"c\d+\[\d+:\d+\]", "".join(texts))
    shown, kept = render_result(verify(packed), deep=False), len(RECORDS) - len(whole)
    assert f"{len(RECORDS)} = {kept} in packs + {len(whole)} set aside" in shown
    told = ", and cut conversations and documents that fit no pack\n"
    assert preview_measure(elsewhere(packed, "new")).endswith(told)


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
    run = run_over(tmp_path, records, pack={"seq_length": 256})
    manifest = pack_all(run)
    assert [row["key"] for row in index_rows(run)] == ["a[0:1]", "a[1:2]", "a[2:3]", "b", "c", "d"]
    lost = {row["key"]: row["detail"] for row in set_aside_in_plan(run)}
    assert lost.keys() == {"a[1:2]", "b", "c"}
    assert manifest.counts.records == {"read": 4, "packed": 2, "set_aside": 2}
    check_packed(run, records)


CALLED = {
    "id": "tools",
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
    "messages": [
        *dialogue("Hm?", "red " * 60),
        {"role": "user", "content": "What is there?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "look", "arguments": {"at": "it"}}}],
        },
        {"role": "tool", "content": "a circle"},
        {"role": "assistant", "content": "A circle " * 40, "reasoning_content": "Hm. " * 30},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "blue " * 90, "reasoning_content": "So. " * 30},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "So it is.", "reasoning_content": "Yes. " * 30},
    ],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_tokenizer("qwen3_5", folder)
    return str(folder)


@pytest.mark.parametrize("context_turns", [0, 1])
def test_tools_and_thoughts(context_turns: int, checkpoint: str, tmp_path: Path) -> None:
    """A result stays with its call. Of a part the last thoughts are shown, as its template does."""
    pack = {"seq_length": 1200, "split_turns": {"context_turns": context_turns}}
    model = {"family": "qwen3_5", "processor": checkpoint, "min_pixels": 3136}
    run = run_over(tmp_path, [CALLED], pack=pack, model=model)
    pack_all(run)
    assert verify(run, deep=True).problems == []
    samples = {sample.key: sample for _, sample, _ in samples_of(run)}
    taken = sorted(numbers(key) for key in samples)
    assert [turn for one in taken for turn in range(*one)] == list(range(5))
    assert len(taken) > 1
    assert not any(first == 2 for first, _ in taken)
    (whole,) = [to_sample(CALLED, "tools", "bmr")]
    for key, sample in samples.items():
        first, end = numbers(key)
        own = [turn for turn in sample.turns if turn.weight]
        assert tuple(own) == whole.turns[first:end]
        assert sample.tools == whole.tools
        shown = sample.turns[: -len(own)]
        earlier = whole.turns[first - len(shown) : first]
        assert shown == tuple(replace(turn, weight=0.0) for turn in earlier)
        assert len(shown) in (0, 2 * context_turns)


#: They hold the files or members of other formats.
DERIVED = ("jsonl_gz", "jsonl_zst", "tsv_gz", "webdataset_gz", "raw_packing_data")


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[pytest.mark.exhaustive] * (one in DERIVED)) for one in WRITERS],
)
def test_every_format(name: str, tmp_path: Path) -> None:
    """Each turn once, with its picture."""
    pictures = [image_bytes(56, 56 + 28 * i, ("JPEG", "PNG")[i % 2]) for i in range(3)]
    num_turns = 1 if name == "csv_rows" else 6
    samples = [
        (
            f"s{i}",
            dialogue(*[t for k in range(num_turns) for t in (f"Q{k} of {i}?", "red " * 60)]),
            [pictures[i % 3]],
        )
        for i in range(4)
    ]
    for _, messages, _ in samples:
        messages[0]["content"] = "<image>\n" + messages[0]["content"]
    source = {**WRITERS[name](tmp_path / "data", samples), "task": "bmr"}
    if name == "csv_rows":
        source["task"] = "vqa"
    pack = {"on_overlong": "split_turns"}
    run = packed_run(source, tmp_path / "out", pack={"seq_length": 256, **pack})
    assert verify(run, deep=True).problems == []
    asked = Counter(
        turn.prompt.replace("<image>", "").strip()
        for _, one, _ in samples_of(run)
        for turn in one.turns
    )
    assert asked == {f"Q{k} of {i}?": 1 for i in range(4) for k in range(num_turns)}
    for _, one, media in samples_of(run):
        turn, number = map(int, re.findall(r"\d+", one.turns[0].prompt))
        assert media == ([pictures[number % 3]] if turn == 0 else [])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"pack": {"split_turns": {"context_turns": 2}}}, "split_turns changes nothing under"),
        ({"model": {"loss_on": "last"}, "pack": {"on_overlong": "split_turns"}}, "loss_on=last"),
        (
            {
                "output": {"layout": "loongforge"},
                "pack": {"on_overlong": "split_turns", "split_turns": {"context_turns": 2}},
            },
            "context_turns=2 shows turns without loss, and output.layout='loongforge' would train",
        ),
    ],
)
def test_what_is_refused(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = {"format": "jsonl", "path": "a.jsonl", "task": "bmr"}
    with pytest.raises(ConfigError, match=message):
        make_config(source, tmp_path, **sections)
    shown = {"on_overlong": "split_turns", "split_turns": {"context_turns": 1}}
    with pytest.raises(ConfigError, match="all text of a document is trained"):
        make_config({**source, "task": "captioning"}, tmp_path, pack=shown)


def record(key: str, num_turns: int, *pictures: str, **more: Any) -> Record:
    """A conversation of some 40 tokens per turn; a picture in front of each of the first turns."""
    marks = ["<image>"] * len(pictures) + [""] * num_turns
    texts = [text for i in range(num_turns) for text in (f"{marks[i]}{i} of {key}?", "red " * 25)]
    return {"id": key, "messages": dialogue(*texts), "images": list(pictures), **more}


def run_of(
    folder: Path, records: list[Record], name: str = "out", *, source: Any = None, **more: Any
) -> Run:
    most = PackConfig.model_fields["max_set_aside"].default
    pack = {"seq_length": 256, "max_set_aside": most, **more.pop("pack", {})}
    return run_over(folder, records, name, source=source, pack=pack, **more)


def packed_well(run: Run) -> list[tuple[str, list[str]]]:
    """Pack, and check that all is right; (split, keys) of each pack."""
    pack_all(run)
    assert verify(run, deep=True).problems == []
    assert not set_aside_in_plan(run)
    return packs_of(run) if run.config.output.layout == "energon" else []


def names(keys: list[str]) -> list[str]:
    return [key.partition("[")[0].partition("#")[0] for key in keys]


@pytest.mark.parametrize(("group", "more"), [(None, {}), ("doc", {"strategy": "mixed"})])
def test_parts_stand_in_one_split(group: str | None, more: dict[str, Any], tmp_path: Path) -> None:
    records = [record(f"c{i}", 12) for i in range(10)]
    records += [record(f"p{i}", 9, f"{i}.jpg", doc="d") for i in range(2)]
    output: dict[str, Any] = {"split": {"train": 0.7, "val": 0.3}}
    if more:
        output["layout"] = "references"
    source = {"fields": {"group": group}} if group else {}
    run = run_of(tmp_path, records, source=source, output=output, pack=more)
    packed_well(run)
    samples, plan = open_index(run), open_plan(run).packs
    hashes = record_numbers(samples)
    start, of_split = 0, []
    for count in plan.info.splits.values():
        some = plan.sample_ids[plan.pack_offsets[start] : plan.pack_offsets[start + count]]
        of_split.append(set(hashes[some].tolist()))
        start += count
    assert len(of_split) == 2
    assert all(of_split)
    assert not of_split[0] & of_split[1]
    for begin, end in itertools.pairwise(plan.pack_offsets.tolist()):
        own = hashes[plan.sample_ids[begin:end]]
        assert len(np.unique(own)) == len(own)


def test_other_layouts(tmp_path: Path) -> None:
    """They hold the same parts as tar shards, each as long as it was measured."""
    records = [record(f"c{i}", 9 + i, "1.jpg", "2.jpg") for i in range(6)]
    pack = {"split_turns": {"context_turns": 1}}
    keys = [key for _, own in packed_well(run_of(tmp_path, records, pack=pack)) for key in own]
    assert min(Counter(names(keys)).values()) > 1
    for layout in ("references", "indexed"):
        run = run_of(tmp_path, records, layout, output={"layout": layout}, pack=pack)
        packed_well(run)
        assert sorted(row["key"] for row in index_rows(run)) == sorted(keys)


@pytest.mark.parametrize("repeat", [pytest.param(0.5, marks=pytest.mark.exhaustive), 1.5])
def test_drawn_conversations(repeat: float, tmp_path: Path) -> None:
    """All parts of a conversation are used equally often, and no two of them share a pack."""
    records = [record(f"c{i}", 9) for i in range(8)]
    run = run_of(tmp_path, records, source={"repeat": repeat}, pack={"max_set_aside": 1})
    pack_all(run)
    assert verify(run, deep=True).ok
    packs = packs_of(run)
    assert all(len(set(names(own))) == len(own) for _, own in packs)
    uses = Counter(key.partition("#")[0] for _, own in packs for key in own)
    parts: dict[str, set[int]] = {}
    for row in index_rows(run):
        parts.setdefault(row["key"].partition("[")[0], set()).add(uses[row["key"]])
    assert all(len(counts) == 1 for counts in parts.values())
    assert {min(counts) for counts in parts.values()} == {int(repeat), int(repeat) + 1}


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
    run = run_of(tmp_path, records, pack={"max_set_aside": 1})
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
    packed_well(old)
    write_file(tmp_path / "a.jsonl", lines(records))
    new = run_of(tmp_path, records, "new", source={"skip": [str(old.workspace.root)]})
    info = measure(new).info
    assert info.num_skipped == 3
    assert {name for row in index_rows(new) for name in names([row["key"]])} == {"c3"}


def test_parts_keep_the_budgets_of_packs(tmp_path: Path) -> None:
    """A conversation with more images than a pack may hold is cut as well."""
    records = [record("many", 5, *(f"{i % 4}.jpg" for i in range(5))), record("few", 2, "0.jpg")]
    pack = {"budgets": {"images": 2}, "seq_length": 512}
    run = run_of(tmp_path, records, pack=pack)
    packed_well(run)
    found = {row["key"]: row["num_images"] for row in index_rows(run)}
    assert found == {
        "many[0:2]": 2,
        "many[2:4]": 2,
        "many[4:5]": 1,
        "few": 1,
    }


@pytest.mark.parametrize(
    "pack",
    [
        {"pad_multiple": 48, "assignment": "locality"},
        {"context_parallel": 2},
        {"order": {"num_ranks": 2}},
    ],
)
def test_other_plans(pack: dict[str, Any], tmp_path: Path) -> None:
    records = [record(f"c{i}", 2 + i) for i in range(10)]
    packs = packed_well(run_of(tmp_path, records, pack=pack))
    for _, own in packs:
        assert len(set(names(own))) == len(own)


def test_room_for_what_a_layout_adds(tmp_path: Path) -> None:
    """LoongForge's templates keep the newline after the last answer."""
    records = [record(f"c{i}", 9 + i) for i in range(6)]
    run = run_of(tmp_path, records, output={"layout": "loongforge"})
    packed_well(run)
    assert open_index(run).array("num_tokens").max() <= 255


def test_an_index_of_another_length_is_refused(tmp_path: Path) -> None:
    """Its parts are those of another pack."""
    records = [record("c", 12)]
    run = run_of(tmp_path, records)
    measure(run)
    longer = run_of(tmp_path, records, pack={"seq_length": 300})
    with pytest.raises(StageError, match=r"pack\.seq_length was 256, is 300"):
        measure(longer)


def test_records_that_share_an_id(tmp_path: Path) -> None:
    """Their parts have keys of their own; those of a copy are duplicates."""
    records = [record("c", 9), record("d", 9), {**record("x", 9), "id": "c"}]
    run = run_of(tmp_path, [*records, records[0]], pack={"max_set_aside": 1})
    counts = pack_all(run).counts
    assert verify(run, deep=True).problems == []
    assert counts.records == {"read": 4, "packed": 3, "set_aside": 1}
    keys = [row["key"] for row in index_rows(run)]
    starts = list(dict.fromkeys(key.partition("[")[0] for key in keys))
    assert re.fullmatch(r"c d c@[0-9a-f]{16}", " ".join(starts))
    assert {row["reason"] for row in set_aside_in_plan(run)} == {"duplicate_key"}
    assert {row["part"]["key"] for row in index_rows(run)} == set(starts)


def test_several_sources(tmp_path: Path) -> None:
    """Conversations of two sources with the same keys are others."""
    records = [record(f"c{i}", 9) for i in range(3)]
    write_file(tmp_path / "b.jsonl", lines(records))
    run_of(tmp_path, records)
    sources = [
        {"format": "jsonl", "path": str(tmp_path / name), "task": "bmr"}
        for name in ("a.jsonl", "b.jsonl")
    ]
    pack = {"seq_length": 256, "on_overlong": "split_turns"}
    run = make_run(sources, tmp_path / "out", pack=pack)
    packed_well(run)
    assert open_index(run).info.split["conversations"] == 6


def test_without_long_conversations_nothing_changes(tmp_path: Path) -> None:
    records = [record(f"c{i}", 2, "0.jpg") for i in range(4)]
    run = run_of(tmp_path, records)
    plain = run_of(tmp_path, records, "plain", pack={"on_overlong": "set_aside"})
    packs = packed_well(run)
    assert [keys for _, keys in packs] == [keys for _, keys in packed_well(plain)]
    assert open_index(run).info.split == {}
    assert not pack_all(run).counts.records


def test_conversations_with_videos(tmp_path: Path) -> None:
    """Each part has the images and videos of its turns."""
    write_file(tmp_path / "v.mp4", make_video(6, 56, 56))
    marks = ["<video>\n<image>", "", "<image>", "<video>", "", ""]
    texts = [text for i, mark in enumerate(marks) for text in (f"{mark}{i}?", "red " * 120)]
    media = {"images": ["0.jpg", "1.jpg"], "videos": ["v.mp4", "v.mp4"]}
    pack = {"seq_length": 512}
    run = run_of(tmp_path, [{"id": "c", "messages": dialogue(*texts), **media}], pack=pack)
    packed_well(run)
    rows = [(row["key"], row["num_images"], row["num_videos"]) for row in index_rows(run)]
    shown = {i: (images, videos) for key, images, videos in rows for i in turns_of(key)}
    assert [sum(row[i] for row in rows) for i in (1, 2)] == [2, 2]
    assert shown[0][1] == shown[3][1] == 1
    assert shown[0][0] == shown[2][0]


def turns_of(key: str) -> range:
    """'c[2:4]' -> range(2, 4)"""
    first, end = key.rpartition("[")[2].rstrip("]").split(":")
    return range(int(first), int(end))


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
    run = run_over(tmp_path, records, pack={"seq_length": seq_length, "split_turns": options})
    assert check_against_reference(run, records) > count
    plan_index(run)
    write_planned(run)
    check_packed(run, records)

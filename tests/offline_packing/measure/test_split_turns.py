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
import pytest

from offline_packing.errors import StageError
from offline_packing.export.export import export
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
    image_bytes,
    index_rows,
    pack_all,
    packed_run,
    plan_index,
    plan_summary,
    write_planned,
)
from tests.helpers.long_conversations import (
    SIZES,
    Record,
    conversations,
    numbers,
    run_of,
    spoken,
    whole_samples,
)
from tests.helpers.outputs import samples_of, set_aside_in_plan
from tests.world import World


def test_what_is_said_of_it(tmp_path: Path) -> None:
    """A turn that is too long by itself is set aside; a conversation of such turns only, or of one,
    stays whole."""
    records = conversations(11, seed=3, most=40)
    records[7]["messages"][-1]["content"] = " ".join(WORDS * 40)
    records += [spoken(900, key="alone"), spoken(900, 800, key="none fits")]
    packed = run_of(tmp_path, records, output={"packs_per_shard": 4})
    pack_all(packed)
    info = open_index(packed).info
    rows = [row for row in index_rows(packed) if row["part"]]
    cut = len({row["part"]["key"] for row in rows})
    assert info.split == {"conversations": cut, "samples": len(rows)}
    line = f"{cut} were cut into {len(rows)} samples"
    assert f"too long              {line}\n" in plan_summary(packed)
    report(packed)
    found = read_json(packed.workspace.report / "report.json")
    assert found["figures"]["samples"]["too long"] == line
    counts = read_json(packed.workspace.manifest)["counts"]
    lost = [row["key"] for row in set_aside_in_plan(packed)]
    whole = [key for key in lost if "[" not in key]
    assert whole == ["alone", "none fits"] != lost
    assert counts["records"] == {"read": 13, "packed": 11, "set_aside": 2}
    assert counts["samples"] == counts["packed"] + len(lost) == info.num_samples
    assert "13 = 11 in packs + 2 set aside" in render_result(verify(packed), deep=False)
    told = ", and cut conversations and documents that fit no pack\n"
    assert preview_measure(run_of(tmp_path, records, "new")).endswith(told)


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
def test_tools_and_thoughts(context_turns: int, world: World, tmp_path: Path) -> None:
    """A result stays with its call. Of a part the last thoughts are shown, as its template does."""
    pack = {"seq_length": 1200, "split_turns": {"context_turns": context_turns}}
    processor = str(world.tokenizer("qwen3_5"))
    model = {"family": "qwen3_5", "processor": processor, "min_pixels": 3136}
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


NINE = [25] * 9


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
    run = run_of(tmp_path, [spoken(*NINE, key="no"), spoken(*NINE, key="yes"), spoken(1)])
    assert pack_all(run).counts.records == {"read": 3, "packed": 2, "set_aside": 1}
    (line,) = list_set_aside(run)
    assert line.split("\t")[::2] == ["no", "not_in_template"]
    assert line.endswith("\tit fits no pack, and the chat template writes no part of it\n")


def test_room_for_what_a_layout_adds(tmp_path: Path) -> None:
    """LoongForge's templates keep the newline after the last answer."""
    records = [spoken(*NINE, *[25] * i, key=f"c{i}") for i in range(6)]
    run = run_of(tmp_path, records, output={"layout": "loongforge"})
    pack_all(run)
    assert not set_aside_in_plan(run)
    assert verify(run, deep=True).problems == []
    assert open_index(run).array("num_tokens").max() <= 255


def test_records_that_share_an_id(tmp_path: Path) -> None:
    """Their parts have keys of their own; those of a copy are duplicates."""
    records = [spoken(*NINE), spoken(*NINE, key="d"), spoken(*NINE, 3)]
    run = run_of(tmp_path, [*records, records[0]])
    counts = pack_all(run).counts
    assert verify(run, deep=True).problems == []
    assert counts.records == {"read": 4, "packed": 3, "set_aside": 1}
    keys = [row["key"] for row in index_rows(run)]
    starts = list(dict.fromkeys(key.partition("[")[0] for key in keys))
    assert re.fullmatch(r"c d c@[0-9a-f]{16}", " ".join(starts))
    assert {row["reason"] for row in set_aside_in_plan(run)} == {"duplicate_key"}
    assert {row["part"]["key"] for row in index_rows(run)} == set(starts)


def slow_parts(
    run: Run, whole: SourceSample
) -> list[tuple[tuple[int, int, int], SourceSample, int]]:
    """(begin, first, end), sample and tokens of each part; every choice is tried one by one."""
    encoder, pack, turns = open_encoder(run.config.model), run.config.pack, whole.turns
    marks = [turn.prompt.count("<image>") for turn in turns]

    def part(begin: int, first: int, end: int) -> tuple[bool, SourceSample, int]:
        """Tell whether a part fits; and its sample and tokens."""
        images = whole.images[sum(marks[:begin]) : sum(marks[:end])]
        shown = [replace(turn, weight=0.0) for turn in turns[begin:first]]
        own = {"key": f"{whole.key}[{first}:{end}]", "turns": (*shown, *turns[first:end])}
        sample = replace(whole, **own, images=images)
        num_tokens = encoder.measure(sample, [SIZES[int(name[0])] for name in images]).num_tokens
        fits = num_tokens <= pack.seq_length and len(images) <= pack.budgets.get("images", 99)
        return fits, sample, num_tokens

    if part(0, 0, len(turns))[0]:
        return []
    found, first, any_fits = [], 0, False
    while first < len(turns):
        if not turns[first].weight:
            first += 1
            continue
        begins = range(max(0, first - pack.split_turns.context_turns), first)
        begin = next((one for one in begins if part(one, first, first + 1)[0]), first)
        end = first + 1
        while end < len(turns) and part(begin, first, end + 1)[0]:
            end += 1
        while not turns[end - 1].weight:
            end -= 1
        fits, *own = part(begin, first, end)
        any_fits |= fits
        found.append(((begin, first, end), *own))
        first = end
    return found if any_fits else []


PICTURES = [image_bytes(width, height) for height, width in SIZES]
#: conversations of the exhaustive cases; FUZZED_SAMPLES=2000 takes five CPU minutes
MANY = int(os.environ.get("FUZZED_SAMPLES", "60"))
LENGTHS: list[tuple[dict[str, Any], str, int]] = [
    ({"seq_length": 256, "split_turns": {"context_turns": 1}}, "vqa", 6),
    ({"seq_length": 512, "budgets": {"images": 2}}, "bmr", 5),
    ({"seq_length": 1024, "split_turns": {"context_turns": 2}}, "bmr", 4),
]


@pytest.mark.parametrize(
    ("pack", "task", "count"),
    LENGTHS + [pytest.param(*own[:2], MANY, marks=pytest.mark.exhaustive) for own in LENGTHS],
)
def test_parts_are_those_of_a_slow_reference(
    pack: dict[str, Any], task: str, count: int, tmp_path: Path
) -> None:
    """In the index, and in the packs, which hold all of them that fit."""
    records = conversations(count, pack["seq_length"])
    run = run_of(tmp_path, records, source={"task": task}, pack=pack)
    measure(run)
    by_record: dict[str, list[Any]] = {}
    for row in index_rows(run):
        own = by_record.setdefault((row["part"] or row)["key"], [])
        if part := row["part"]:
            cut = tuple(part[name] for name in ("begin", "first", "end"))
            assert row["key"] == f"{part['key']}[{cut[1]}:{cut[2]}]"
            names = tuple(medium["container"] for medium in row["media"])
            own.append((cut, names, row["num_tokens"]))
    assert list(by_record) == [one["id"] for one in records]
    expected = {}
    for key, whole in whole_samples(records).items():
        parts = slow_parts(run, whole)
        assert by_record[key] == [(cut, one.images, tokens) for cut, one, tokens in parts], key
        for one in [one for _, one, _ in parts] or [whole]:
            pictures = [PICTURES[int(name[0])] for name in one.images]
            expected[one.key] = (one.turns, one.system, pictures)
    assert sum(map(len, by_record.values())) > count
    plan_index(run)
    write_planned(run)
    packed = {one.key: (one.turns, one.system, media) for _, one, media in samples_of(run)}
    for row in set_aside_in_plan(run):
        del expected[row["key"]]
    assert packed == expected


OF_TEXTS = {"task": "captioning"}


def documents(count: int) -> list[Record]:
    """Documents of up to 30 paragraphs, every third with a picture in front."""
    rng = np.random.default_rng(0)
    found = []
    for i in range(count):
        names = [f"{rng.integers(len(SIZES))}.jpg" for _ in range(0, int(rng.integers(1, 31)), 3)]
        text = ""
        for k in range(3 * len(names)):
            words = " ".join(rng.choice(WORDS, rng.integers(3, 40)))
            text += f"{'<image>' * (k % 3 == 0)}{words} {k} of {i}.{rng.choice(['', chr(10) * 2])}"
        found.append({"id": f"d{i}", "text": text, "images": names})
    return found


def test_long_documents_are_cut(tmp_path: Path) -> None:
    """Every token that carries loss is trained once, but the end tokens of parts that go on; every
    picture stands in front of its own paragraph. An export takes no documents; packs are read again
    as they are."""
    records = documents(12)
    run = run_of(tmp_path, records, source=OF_TEXTS)
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
        ids = [
            encoder.tokenize(one, SIZES[:1] * len(one.images)).tokens.tolist()
            for one in (*(part for part, _ in own), whole)
        ]
        assert [*itertools.chain(*ids[:-1])] == ids[-1]
    assert num_cut > 4
    text = "".join(render_pack(pack) for pack in preview(run))
    assert re.search(r"\[image \dx\d", text)
    assert "[text: <image>]" not in text
    assert manifest.counts.records["packed"] == len(records)
    with pytest.raises(StageError, match="holds a document, or a part of one, 'd"):
        export(run.workspace.root, tmp_path / "files", progress=False)
    source = {"format": "packs", "path": str(run.workspace.root), "task": "captioning"}
    again = packed_run(source, tmp_path / "again", pack={"seq_length": 256})
    first, second = (
        sorted((sample.key, sample.turns, media) for _, sample, media in samples_of(one))
        for one in (run, again)
    )
    assert first == second

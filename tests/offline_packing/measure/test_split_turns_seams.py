"""pack.on_overlong: split_turns together with other options."""

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offline_packing.config.sections import PackConfig
from offline_packing.errors import StageError
from offline_packing.index.records import record_numbers
from offline_packing.measure.measure import measure
from offline_packing.runs.artifacts import open_index, open_plan
from offline_packing.runs.run import Run
from offline_packing.runs.set_aside import list_set_aside
from offline_packing.sources.base import ConversationPart
from offline_packing.verify.verify import verify
from task_encoders.samples import SampleError, SourceSample
from tests.helpers.datasets import (
    dialogue,
    index_rows,
    make_run,
    pack_all,
    plan_summary,
)
from tests.helpers.formats import lines, write_file
from tests.helpers.long_conversations import run_of as run_over
from tests.helpers.outputs import packs_of, samples_of, set_aside_in_plan
from tests.helpers.videos import make_video

Record = dict[str, Any]


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
    result = verify(run, deep=True)
    assert result.ok, result.problems
    assert not set_aside_in_plan(run)
    return packs_of(run) if run.config.output.layout == "energon" else []


def names(keys: list[str]) -> list[str]:
    return [key.partition("[")[0].partition("#")[0] for key in keys]


@pytest.mark.parametrize("group", [None, "doc"])
@pytest.mark.parametrize("more", [{}, {"epochs": 2}])
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


@pytest.mark.parametrize("layout", ["references", "indexed"])
def test_other_layouts(layout: str, tmp_path: Path) -> None:
    """They hold the same parts as tar shards, each as long as it was measured."""
    records = [record(f"c{i}", 9 + i, "1.jpg", "2.jpg") for i in range(6)]
    options = {"context_turns": 1}
    run = run_of(tmp_path, records, output={"layout": layout}, pack={"split_turns": options})
    packed_well(run)
    tars = run_of(tmp_path, records, "tars", pack={"split_turns": options})
    keys = [key for _, own in packed_well(tars) for key in own]
    assert sorted(row["key"] for row in index_rows(run)) == sorted(keys)
    assert min(Counter(names(keys)).values()) > 1


@pytest.mark.parametrize("repeat", [0.5, 1.5])
def test_drawn_conversations(repeat: float, tmp_path: Path) -> None:
    """All parts of a conversation are used equally often, and no two of them share a pack."""
    records = [record(f"c{i}", 9) for i in range(16)]
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
        {"pad_multiple": 48},
        {"seq_length": 256, "context_parallel": {"ranks": 4, "tokens_per_rank": 64}},
        {"assignment": ["locality"]},
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
    result = verify(run, deep=True)
    assert result.ok, result.problems
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

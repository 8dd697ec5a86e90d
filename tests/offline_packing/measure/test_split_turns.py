"""pack.on_overlong: split_turns: conversations longer than a pack become several samples."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offline_packing.errors import ConfigError
from offline_packing.measure.measure import measure, preview_measure
from offline_packing.report.preview import preview
from offline_packing.report.preview_text import render_pack
from offline_packing.report.report import report
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run
from offline_packing.storage.files import read_json
from offline_packing.verify.verify import render_result, verify
from task_encoders.records.record import to_sample
from tests.helpers.datasets import (
    WORDS,
    dialogue,
    image_bytes,
    index_rows,
    make_config,
    make_run,
    pack_all,
    plan_summary,
)
from tests.helpers.formats import WRITERS
from tests.helpers.long_conversations import (
    check_packed,
    conversation,
    conversations,
    numbers,
    run_of,
    spoken,
)
from tests.helpers.outputs import packs_of, samples_of, set_aside_in_plan
from tests.helpers.tiny_families import save_tokenizer


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Packed conversations of three parts of the index, most of them cut."""
    run = packed_again(tmp_path_factory.mktemp("cut"), "out")
    pack_all(run)
    return run


RECORDS = [*conversations(35, seed=3, most=40), conversation("c35", np.random.default_rng(3), 2, 1)]
RECORDS[20]["messages"][-1]["content"] = " ".join(WORDS * 40)


def packed_again(folder: Path, name: str, **more: Any) -> Run:
    pack = {"seq_length": 256, "split_turns": {"context_turns": 1}}
    output = {"packs_per_shard": 4}
    return run_of(folder, RECORDS, name, pack=pack, output=output, **more)


def test_every_trained_token_is_trained_once(packed: Run) -> None:
    check_packed(packed, RECORDS)
    result = verify(packed, deep=True)
    assert result.ok, result.problems
    lost = {row["key"]: row for row in set_aside_in_plan(packed)}
    assert re.fullmatch(r"\d+ tokens > seq_length 256", lost[max(lost)]["detail"])


def test_parts_share_no_pack(packed: Run) -> None:
    for _, keys in packs_of(packed):
        names = [key.partition("[")[0] for key in keys]
        assert len(set(names)) == len(names)


def test_what_is_said_of_it(packed: Run) -> None:
    info = open_index(packed).info
    rows = [row for row in index_rows(packed) if row["part"]]
    cut = len({row["part"]["key"] for row in rows})
    assert info.split == {"conversations": cut, "samples": len(rows)}
    line = f"{cut} were cut between turns into {len(rows)} samples"
    assert f"conversations           {line}\n" in plan_summary(packed)
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
    fresh = packed_again(packed.workspace.root.parent, "other")
    told = ", and cut conversations that fit no pack between turns\n"
    assert preview_measure(fresh).endswith(told)


def parts_of(run: Run) -> list[tuple[str, int]]:
    """Key and tokens of each row of the index."""
    measure(run)
    return [(row["key"], row["num_tokens"]) for row in index_rows(run)]


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
    run = run_of(tmp_path, records, pack={"seq_length": 256})
    manifest = pack_all(run)
    assert [key for key, _ in parts_of(run)] == ["a[0:1]", "a[1:2]", "a[2:3]", "b", "c", "d"]
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


@pytest.mark.parametrize("context_turns", [0, 1])
def test_tools_and_thoughts(context_turns: int, tmp_path: Path) -> None:
    """A result stays with its call. Of a part the last thoughts are shown, as its template does."""
    pack = {"seq_length": 1200, "split_turns": {"context_turns": context_turns}}
    save_tokenizer("qwen3_5", tmp_path / "checkpoint")
    model = {"family": "qwen3_5", "processor": str(tmp_path / "checkpoint"), "min_pixels": 3136}
    run = run_of(tmp_path, [CALLED], pack=pack, model=model)
    pack_all(run)
    result = verify(run, deep=True)
    assert result.ok, result.problems
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


@pytest.mark.parametrize("name", WRITERS)
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
    run = make_run(source, tmp_path / "out", pack={"seq_length": 256, **pack})
    pack_all(run)
    result = verify(run, deep=True)
    assert result.ok, result.problems
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
    with pytest.raises(ConfigError, match="captioning has none"):
        make_config({**source, "task": "captioning"}, tmp_path, pack={"on_overlong": "split_turns"})

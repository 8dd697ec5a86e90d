"""source.merge_same_image: the records of one picture become dialogues."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offline_packing.errors import ConfigError
from offline_packing.measure.measure import measure, preview_measure
from offline_packing.report.pages import render_packs
from offline_packing.report.preview import preview
from offline_packing.report.preview_text import render_pack
from offline_packing.report.report import report
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run
from offline_packing.storage.files import read_json
from offline_packing.verify.render import render_result
from offline_packing.verify.verify import verify
from task_encoders.samples import SourceSample
from tests.helpers.datasets import (
    WORDS,
    dialogue,
    image_bytes,
    index_rows,
    make_config,
    make_run,
    pack_all,
    plan_summary,
    twin_pictures,
)
from tests.helpers.formats import WRITERS, lines, write_file
from tests.helpers.outputs import samples_of, set_aside_in_plan

NUM_PICTURES = 5


def questions(count: int = 24, seed: int = 0) -> list[dict[str, Any]]:
    """Records that ask about a few pictures in any order; some name another file of equal bytes."""
    rng = np.random.default_rng(seed)
    names = [*(f"{i}.jpg" for i in range(NUM_PICTURES)), "copy.jpg"]
    return [
        {
            "id": f"q{i}",
            "image": names[int(rng.integers(len(names)))],
            "question": "<image>\n" * (i % 3 > 0)
            + f"{' '.join(rng.choice(WORDS, 1 + i % 9))} {i}?",
            "answer": f"{' '.join(rng.choice(WORDS, 1 + i % 7))}.",
        }
        for i in range(count)
    ]


def run_of(folder: Path, records: list[dict[str, Any]], name: str = "out", **more: Any) -> Run:
    """A run over records of the pictures, two of which have the same bytes."""
    for i in range(NUM_PICTURES):
        write_file(folder / f"{i}.jpg", image_bytes(56, 56 + 28 * i))
    write_file(folder / "copy.jpg", image_bytes(56, 56))
    write_file(folder / "a.jsonl", lines(records))
    options = {"merge_same_image": {"max_tokens": 300}, **more.pop("source", {})}
    source = {"format": "jsonl", "path": str(folder / "a.jsonl"), "task": "bmr", **options}
    return make_run(source, folder / name, **more)


def packed(run: Run) -> list[tuple[SourceSample, list[bytes]]]:
    """The samples of an output, with the bytes of their pictures."""
    return [(sample, pictures) for _, sample, pictures in samples_of(run)]


def asked(samples: list[tuple[SourceSample, list[bytes]]]) -> Counter[tuple[str, str, bytes]]:
    """Question, answer and the pictures that their dialogue shows, of every turn."""
    return Counter(
        (turn.prompt.replace("<image>", "").strip(), turn.answer, b"".join(pictures))
        for sample, pictures in samples
        for turn in sample.turns
    )


@pytest.mark.parametrize("name", WRITERS)
def test_every_format(name: str, tmp_path: Path) -> None:
    """Each question and answer once, in a dialogue with its picture, which is stored once."""
    pictures = [image_bytes(56, 56 + 28 * i, ("JPEG", "PNG")[i % 2]) for i in range(3)]
    samples = [
        (f"s{i:03d}", dialogue(f"<image>\nWhat {i}?", f"It is {i}."), [pictures[i * i % 3]])
        for i in range(9)
    ]
    task = "vqa" if name == "csv_rows" else "bmr"
    source = {**WRITERS[name](tmp_path / "data", samples), "task": task}
    plain = make_run(source, tmp_path / "plain")
    before = measure(plain).info
    run = make_run({**source, "merge_same_image": {"max_tokens": 500}}, tmp_path / "merged")
    manifest = pack_all(run)
    result = verify(run, deep=True)
    assert result.ok, result.problems
    found = packed(run)
    assert len(found) == 2 == manifest.counts.samples  # squares leave 0 and 1 modulo 3
    assert asked(found) == {(f"What {i}?", f"It is {i}.", pictures[i * i % 3]): 1 for i in range(9)}
    for sample, _ in found:
        numbers = [int(re.sub(r"\D", "", turn.answer)) for turn in sample.turns]
        assert numbers == sorted(numbers)
        assert [turn.prompt.count("<image>") for turn in sample.turns][1:] == [0] * (
            len(numbers) - 1
        )
    info = open_index(run).info
    assert info.num_tokens == before.num_tokens - info.saved["num_tokens"] < before.num_tokens
    assert info.saved["num_images"] == 7
    assert info.saved["bytes"] == sum(len(pictures[i * i % 3]) for i in range(9)) - sum(
        map(len, pictures[:2])
    )
    assert manifest.counts.records == {"read": 9, "packed": 9, "set_aside": 0}


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Packed questions of three parts of the index."""
    run = run_of(tmp_path_factory.mktemp("merged"), questions(40), output={"packs_per_shard": 1})
    pack_all(run)
    return run


def test_all_records_are_in_dialogues_that_fit(merged: Run) -> None:
    """A slow reference: who shows the same bytes belongs together, in order."""
    pictures = {f"{i}.jpg": image_bytes(56, 56 + 28 * i) for i in range(NUM_PICTURES)}
    pictures["copy.jpg"] = pictures["0.jpg"]
    records = questions(40)
    expected = Counter(
        (one["question"].replace("<image>", "").strip(), one["answer"], pictures[one["image"]])
        for one in records
    )
    assert asked(packed(merged)) == expected
    rows = index_rows(merged)
    assert max(row["num_tokens"] for row in rows) <= 300
    assert [row["num_turns"] for row in rows] == [len(row["parts"] or "1") for row in rows]
    keys = [[part["key"] for part in row["parts"] or [row]] for row in rows]
    assert sorted(key for own in keys for key in own) == sorted(one["id"] for one in records)
    numbers = [[int(key[1:]) for key in own] for own in keys]
    assert all(own == sorted(own) for own in numbers)
    assert [own[0] for own in numbers] == sorted(own[0] for own in numbers)
    by_picture = Counter(pictures[one["image"]] for one in records)
    assert len(rows) < 2 * len(by_picture) + 2


def test_dialogues_are_filled(tmp_path: Path) -> None:
    """No dialogue has room for another record, except the last one of a picture."""
    rows = measured_rows(run_of(tmp_path, questions(160)))
    plain = measured_rows(
        run_of(tmp_path, questions(160), "plain", source={"merge_same_image": None})
    )
    longest = max(row["num_tokens"] - row["num_vision_patches"] // 4 for row in plain)
    by_picture: dict[int, list[int]] = {}
    for row in rows:
        by_picture.setdefault(row["media_hash"][0], []).append(row["num_tokens"])
    filled = [length for lengths in by_picture.values() for length in lengths[:-1]]
    assert len(filled) > 5
    assert min(filled) > 300 - longest
    assert np.mean(filled) > 280


def measured_rows(run: Run) -> list[dict[str, Any]]:
    """Rows of the index, measured here."""
    measure(run)
    return index_rows(run)


def test_what_is_said_of_it(merged: Run) -> None:
    info = open_index(merged).info
    line = (
        f"40 records became {info.num_samples} samples: {info.saved['num_tokens']:,} tokens, "
        f"{40 - info.num_samples} images and {info.saved['bytes']:,} bytes saved"
    )
    assert f"records                 {line}\n" in plan_summary(merged)
    report(merged)
    assert read_json(merged.workspace.report / "report.json")["merged"] == line
    assert line in (merged.workspace.report / "report.html").read_text()
    shown = render_result(verify(merged, deep=True), deep=True)
    assert "records         40 = 40 in packs + 0 set aside\n" in shown
    rows = {row["key"]: [part["key"] for part in row["parts"] or []] for row in index_rows(merged)}
    packs = list(preview(merged, num_packs=1000))
    shown_records = {sub.sample.key: [*sub.records] for pack in packs for sub in pack.sub_samples}
    assert shown_records == rows
    assert any(f"\nrecords {', '.join(rows['q0'])}\n" in render_pack(pack) for pack in packs)
    assert b"<code>q0</code>" in render_packs(packs, "bmr")
    fresh = run_of(merged.workspace.root.parent, questions(40), "other")
    assert preview_measure(fresh).endswith(
        ", and merge those of one picture to dialogues of 300 tokens\n"
    )


def keys_of(run: Run) -> list[list[str]]:
    """Keys of the records of each sample."""
    measure(run)
    return [[part["key"] for part in row["parts"] or [row]] for row in index_rows(run)]


def record(key: str, image: str | None = "0.jpg", **more: Any) -> dict[str, Any]:
    named = {} if image is None else {"image": image}
    return {"id": key, **named, "question": f"What is {key}?", "answer": f"It is {key}.", **more}


def test_what_stays_apart(tmp_path: Path) -> None:
    """Other system messages and tools; thoughts, which templates show in the last answer only; no
    picture, several, or one twice; nothing asked; a key that an earlier record has."""
    records = [
        record("a"),
        record("b", system="Be brief."),
        record("c"),
        record("d", system="Be brief."),
        {**record("e"), "answer": "<think>Hm.</think>A."},
        record("f", None),
        record("g", None),
        {**record("h"), "image": ["0.jpg", "1.jpg"]},
        {**record("i"), "image": ["0.jpg", "0.jpg"]},
        {**record("j"), "question": "<image>"},
        record("k", "copy.jpg"),
        record("a"),
    ]
    run = run_of(tmp_path, records)
    others = [[one] for one in "efghij"]
    assert keys_of(run) == [["a", "c", "k"], ["b", "d"], *others, ["a"]]
    pack_all(run)
    assert verify(run, deep=True).ok
    assert [row["reason"] for row in set_aside_in_plan(run)] == ["duplicate_key"]
    counts = open_index(run).info
    assert counts.num_records == 12


def test_a_key_that_a_dialogue_hides(tmp_path: Path) -> None:
    """The dialogue has the key of its first record; the others' are still known."""
    run = run_of(tmp_path, [record("b"), record("a"), record("a")])
    assert keys_of(run) == [["b", "a"], ["a"]]
    pack_all(run)
    assert [row["reason"] for row in set_aside_in_plan(run)] == ["duplicate_key"]


def test_a_field_names_the_records(tmp_path: Path) -> None:
    """Pages of a document: each is shown where it is first asked about."""
    records = [
        record("a", "0.jpg", doc="x"),
        record("b", "1.jpg", doc="x"),
        record("c", "0.jpg", doc="y"),
        record("d", "1.jpg", doc="x"),
        record("e", None, doc="x"),
        record("f", "2.jpg"),
        {**record("g", None, doc="x"), "image": ["1.jpg", "3.jpg"]},
    ]
    run = run_of(tmp_path, records, source={"merge_same_image": {"by": "doc", "max_tokens": 500}})
    assert keys_of(run) == [["a", "b", "d", "e", "g"], ["c"], ["f"]]
    pack_all(run)
    assert verify(run, deep=True).ok
    (sample, pictures) = next(found for found in packed(run) if len(found[0].turns) == 5)
    shown = [image_bytes(56, 56 + 28 * i) for i in (0, 1, 3)]
    assert pictures == shown
    assert [turn.prompt for turn in sample.turns] == [
        "<image>What is a?",
        "<image>What is b?",
        "What is d?",
        "What is e?",
        "<image>What is g?",
    ]


def test_pictures_of_which_only_some_bytes_are_equal(tmp_path: Path) -> None:
    """They have one hash, since it covers their beginning, middle and end."""
    one, other = twin_pictures()
    run = run_of(tmp_path, [record(key, f"{key}.bmp") for key in "abc"])
    for key, data in (("a", one), ("b", other), ("c", one)):
        write_file(tmp_path / f"{key}.bmp", data)
    assert keys_of(run) == [["a", "c"], ["b"]]
    hashes = {row["media_hash"][0] for row in index_rows(run)}
    assert len(hashes) == 1


def test_the_order_of_the_records(tmp_path: Path) -> None:
    records = [record(f"{i}") for i in range(12)]
    orders = []
    for seed in (0, 1, 0):
        merge = {"max_tokens": 500, "order": "drawn", "seed": seed}
        run = run_of(tmp_path / f"{len(orders)}", records, source={"merge_same_image": merge})
        (order,) = keys_of(run)
        orders.append(order)
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(one["id"] for one in records)


def test_new_records_of_a_packed_picture(tmp_path: Path) -> None:
    """source.skip knows every record of a dialogue."""
    records = questions(10)
    old = run_of(tmp_path, records[:6], "old")
    pack_all(old)
    write_file(tmp_path / "a.jsonl", lines(records))
    skip = {"skip": [str(old.workspace.root)]}
    new = run_of(tmp_path, records, "new", source=skip)
    assert sorted(key for own in keys_of(new) for key in own) == [f"q{i}" for i in range(6, 10)]
    assert open_index(new).info.num_skipped == 6


def test_a_dialogue_that_is_set_aside_names_its_records(tmp_path: Path) -> None:
    records = [*(record(key, "1.jpg") for key in "abc"), record("d"), record("e", None)]
    pack = {"budgets": {"vision_patches": 20}, "max_set_aside": 1}
    run = run_of(tmp_path, records, pack={"seq_length": 512, **pack})
    manifest = pack_all(run)
    details = {row["key"]: row["detail"] for row in set_aside_in_plan(run)}
    assert details["a"] == "it alone exceeds the limit of vision_patches 20; records: a, b, c"
    assert manifest.counts.records == {"read": 5, "packed": 2, "set_aside": 3}


@pytest.mark.parametrize(
    ("source", "sections", "message"),
    [
        ({"task": "captioning"}, {}, "merge_same_image makes dialogues, and captioning has none"),
        ({"merge_same_image": True}, {}, r"max_tokens=4096 > pack.seq_length=512"),
        ({"merge_same_image": "a..b"}, {}, "merge_same_image.by"),
        ({}, {"model": {"loss_on": "last"}}, "loss_on=last trains one answer of each dialogue"),
    ],
)
def test_what_is_refused(
    source: dict[str, Any], sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    options = {"merge_same_image": {"max_tokens": 300}, "task": "bmr", **source}
    with pytest.raises(ConfigError, match=message):
        make_config({"format": "jsonl", "path": "a.jsonl", **options}, tmp_path, **sections)

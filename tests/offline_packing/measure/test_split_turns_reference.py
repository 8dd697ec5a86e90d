"""pack.on_overlong: split_turns, against a slow reference that tries every choice."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offline_packing.measure.measure import measure
from offline_packing.runs.run import Run, open_encoder
from task_encoders.samples import SourceSample
from tests.helpers.datasets import index_rows, plan_index, write_planned
from tests.helpers.long_conversations import (
    SIZES,
    Record,
    check_packed,
    conversations,
    run_of,
    whole_samples,
)


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
MANY = int(os.environ.get("FUZZED_SAMPLES", "50"))
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

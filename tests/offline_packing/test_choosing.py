"""Samples chosen by fields of their records, and turns by their ratings, on records of FineVision's
schema (https://huggingface.co/datasets/HuggingFaceM4/FineVision)."""

import csv
import io
import json
import math
import operator
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offline_packing.errors import StageError
from offline_packing.index.chosen import left_out
from offline_packing.layouts.shards import splits_of_plan
from offline_packing.measure import measure as stage
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import make_plan
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run
from offline_packing.runs.set_aside import check_set_aside, list_set_aside
from offline_packing.sources.options import kept_value
from offline_packing.verify.verify import verify
from task_encoders.samples import place_media
from tests.helpers.datasets import (
    dialogue,
    image_bytes,
    index_rows,
    make_run,
    outcomes,
    pack_all,
    packed_run,
    plan_summary,
)
from tests.helpers.formats import of_lines, tar_bytes, write_file
from tests.helpers.long_conversations import spoken
from tests.helpers.outputs import samples_of

RATINGS = ("relevance", "image_correspondence", "visual_dependency", "formatting")
SOURCES = ("ai2d", "web", "chart qa")
KEEP = ["relevance_min", "visual_dependency_min", "source"]
Row = dict[str, Any]


def finevision_rows(count: int = 60, seed: int = 0) -> list[Row]:
    """Dialogues over up to two pictures, each turn rated from 1 to 5 or not at all."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        num_turns, num_images = int(rng.integers(1, 5)), i % 3
        images = [{"bytes": image_bytes(56, 84, shade=3 * i + j)} for j in range(num_images)]
        texts = [{"user": f"{i}.{t}?", "assistant": f"It is {t}."} for t in range(num_turns)]
        row: Row = {"images": [{**one, "path": None} for one in images], "texts": texts}
        row["source"] = SOURCES[i % 3] if i % 10 else None
        for name in RATINGS:
            draws = [int(rng.integers(1, 6)) if rng.random() < 0.9 else None for _ in texts]
            given = [one for one in draws if one is not None]
            row |= {f"{name}_ratings": draws, f"{name}_min": min(given, default=None)}
            if rng.random() < 0.1:
                row[f"{name}_ratings"] = row[f"{name}_min"] = None
        rows.append(row)
    return rows


def finevision(root: Path, rows: list[Row], **options: Any) -> dict[str, Any]:
    root.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), root / "a.parquet", row_group_size=16)
    return {"format": "parquet", "path": str(root / "a.parquet"), "task": "bmr", **options}


FILTERS = [
    [["relevance_min", ">=", 3]],
    [["visual_dependency_min", ">", 2], ["source", "in", ["ai2d", "chart qa"]]],
    [[["source", "==", "web"], ["relevance_min", "<", 3]], [["relevance_min", "=", 5]]],
    [["source", "!=", "web"], ["relevance_min", ">=", 2]],
]


def test_filters_choose_as_many_as_pyarrow(tmp_path: Path, monkeypatch: Any) -> None:
    """From one index, and in the splits that the samples had without a filter. The others have a
    reason: a null, or the filter."""
    rows = finevision_rows()
    rows[0]["relevance_min"] = None
    source = finevision(tmp_path / "data", rows, keep=KEEP)
    output = {"split": {"train": 0.5, "val": 0.5}}

    def run_of(where: Any) -> Run:
        pack = {"max_set_aside": 0, "where": where}  # left out on purpose
        return make_run(source, tmp_path / "out", output=output, pack=pack)

    samples = measure(run_of(None))
    monkeypatch.setattr(stage.Measure, "make", lambda *_: pytest.fail("measured again"))
    of_split: list[dict[str, set[int]]] = []
    for where in (None, *FILTERS):
        run = run_of(where)
        packs = make_plan(run, measure(run)).packs
        expected = len(pq.read_table(source["path"], filters=where))
        assert len(packs.sample_ids) == expected
        assert 0 < expected < 60 or where is None
        own = splits_of_plan(packs, run.config.output.split)
        ends = packs.pack_offsets
        ids = {n: {*packs.sample_ids[ends[s.start] : ends[s.stop]]} for n, s in own.items()}
        of_split.append(ids)
        assert all(ids[name] and ids[name] <= of_split[0][name] for name in ids)
    shown = [line.split() for line in plan_summary(run).splitlines()]
    assert ["not_chosen", f"{60 - expected}"] in shown
    manifest = pack_all(run)
    assert manifest.counts.set_aside == {"not_chosen": 60 - expected}
    assert manifest.config["pack"]["where"] == where
    check_set_aside(run)
    assert samples.info == open_index(run).info
    found: dict[str, str] = {}
    for line in "".join(list_set_aside(run)).splitlines():
        key, _, reason, detail = line.split("\t")
        assert reason == "not_chosen"
        found[key] = detail
    for i, row in enumerate(rows):
        place, least = row["source"], row["relevance_min"]
        why = None if place != "web" and (least or 0) >= 2 else "pack.where"
        why = "no relevance_min" if least is None else why
        assert found.get(f"a:{i}") == ("no source" if place is None else why), row
    assert set(found.values()) == {"no source", "no relevance_min", "pack.where"}


SCALARS: list[Any] = [3, 2.5, "web", "4", True, None, [1], "x" * 257, 2**53 + 1, {"a": 1}]


def test_values_that_are_kept() -> None:
    assert [kept_value(value) and tuple(kept_value(value).values()) for value in SCALARS] == [  # type: ignore[union-attr]
        *((3.0, None), (2.5, None), (None, "web"), (4.0, "4"), (1.0, None)),
        *(None, None, None, (None, "9007199254740993"), None),
    ]
    for text in ("nan", "1_0", "1e999", "٣", " 3", ""):
        assert kept_value(text) == {"number": None, "text": text}


def records(values: list[Any]) -> list[Row]:
    return [
        {"id": f"{i}", "texts": [{"user": "Is it?", "assistant": f"{i}."}], "meta": {"score": one}}
        for i, one in enumerate(values)
    ]


#: Values of a field, by its type in Parquet; of "mixed", in JSON.
VALUES: dict[str, list[Any]] = {
    "float64": [0.1, 0.5, -0.0, math.nan, math.inf, -math.inf, 2.0**53, 1e300, None],
    "float32": [0.1, 0.7, 16777216.0, 3.4e38, math.nan, math.inf, None],
    "float16": [0.1, 2.5, math.nan, None],
    "int64": [0, 1, -3, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), None],
    "uint64": [0, 5, 2**53 - 1, 2**53 + 3, 2**64 - 1, None],
    "string": ["", "web", "Web", "ä", "z" * 256, None],
    "bool": [True, False, None],
    "mixed": [3, 2.5, "web", "4", True, 2**53 + 1, 2**64 - 1, 1e300, "a9", None, [1], {"a": 1}],
}
NUMBERS = [one for own in VALUES.values() for one in own if isinstance(one, int | float)]
GIVEN = [[*NUMBERS, 2**53 - 1, 2**53 + 2, 2**70, 4, 2.0**63], ["web", "", "a", "ä", "3", "4"]]
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "in": lambda value, given: any(value == one for one in given),
    "not in": lambda value, given: all(value != one for one in given),
}


def holds(value: Any, op: str, given: Any) -> bool:
    """Compare as Python does; values that are none, or of another type, fail. A text that spells a
    number is both."""
    first = given[0] if isinstance(given, list) else given
    kind = str if isinstance(first, str) else (int, float)
    value = 4.0 if value == "4" and kind is not str else value
    return isinstance(value, kind) and COMPARE[op](value, given)


def test_filters_compare_as_python_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    count = max(map(len, VALUES.values()))
    cells = {name: [*own, *[None] * (count - len(own))] for name, own in VALUES.items()}
    text = [f"{i}?" for i in range(count)]
    columns = {name: pa.array(own, name) for name, own in cells.items() if name != "mixed"}
    columns["float16"] = pa.array([None if x is None else np.float16(x) for x in cells["float16"]])
    columns["inner"] = pa.StructArray.from_arrays([columns["float32"]], ["float32"])
    pq.write_table(pa.table({"question": text, "answer": text, **columns}), tmp_path / "a.parquet")
    rows = [
        {"question": t, "answer": t, "mixed": v} for t, v in zip(text, cells["mixed"], strict=True)
    ]
    keep = [*(VALUES.keys() - {"mixed"}), "inner.float32"]
    options = {"task": "vqa", "text_only": True}
    table = {"format": "parquet", "path": str(tmp_path / "a.parquet"), "keep": keep, **options}
    other = of_lines(tmp_path / "b.jsonl", rows, keep=["mixed"], **options)
    indexes = [measure(make_run(one, tmp_path / one["format"])) for one in (table, other)]
    (warned,) = (line for line in indexes[1].info.warnings if "source.keep" in line)
    assert warned.startswith("source.keep=mixed (a number or a short text) is not in the record (")
    cells["float32"] = [float(str(np.float32(x))) if x is not None else x for x in cells["float32"]]
    cells["inner.float32"] = cells["float32"]
    numbers = Counter[bool]()
    for _ in range(250):
        clauses, expected = [], np.full(count, True)
        names = rng.choice(["mixed"] if rng.random() < 0.3 else keep, int(rng.integers(1, 3)))
        for name in names.tolist():
            op, given = str(rng.choice([*COMPARE])), GIVEN[int(rng.random() < 0.3)]
            drawn = [given[i] for i in rng.integers(len(given), size=rng.integers(1, 4))]
            value = drawn if "in" in op else drawn[0]
            clauses.append([name, op, value])
            expected &= [holds(one, op, value) for one in cells[name]]
        samples = indexes["mixed" in names]
        chosen = np.full(count, True)
        chosen[left_out(samples, clauses).ids] = False
        assert chosen.tolist() == expected.tolist(), clauses
        numbers.update(expected.tolist())
    assert min(numbers.values()) > 250


def test_kept_fields_of_renamed_records(tmp_path: Path) -> None:
    """They are taken from the record as it is, and are no text that was forgotten."""
    rows = [{**row, "note": "a few words here"} for row in records([1, 2, 3])]
    rows = [{"meta": {**row, "score": 7}} for row in rows]
    options = {"fields": {"messages": "meta.texts"}, "keep": ["meta.score", "meta.note"]}
    run = make_run(of_lines(tmp_path / "a.jsonl", rows, **options), tmp_path / "out")
    assert measure(run).info.warnings == []
    kept = {name: tuple(value.values()) for name, value in index_rows(run)[0]["kept"]}
    assert kept == {"meta.score": (7.0, None), "meta.note": (None, "a few words here")}


def test_a_table_with_nothing_but_kept_columns_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"jpg": [b"1"], "score": [1]}), tmp_path / "a.parquet")
    source = {"format": "parquet", "path": str(tmp_path / "a.parquet"), "task": "captioning"}
    with pytest.raises(StageError, match="it has the columns jpg, score; name those to be used"):
        measure(make_run({**source, "keep": "score"}, tmp_path / "out"))


def test_parts_of_a_conversation_are_chosen_together(tmp_path: Path) -> None:
    rows = [spoken(*[30] * 12, key=f"{i}", score=i) for i in range(2)]
    source = of_lines(tmp_path / "a.jsonl", rows, keep="score")
    pack = {"on_overlong": "split_turns", "seq_length": 128, "where": [["score", ">=", 1]]}
    run = packed_run(source, tmp_path / "out", pack=pack)
    keys = {sample.key.partition("[")[0] for _, sample, _ in samples_of(run)}
    assert keys == {"1"}
    assert len(open_index(run).table("key")) > 6


def test_cells_and_members_of_tars_are_kept(tmp_path: Path) -> None:
    """Ratings in cells of a table of texts, and in the JSON that describes an image beside its
    caption, as img2dataset writes it."""
    rows = [["id", "question", "answer", "score", "stars"]]
    rows += [[f"{i}", "Is it?\nSo?", "Yes.", f"{i}", f"[{i}]"] for i in range(4)]
    table = io.StringIO()
    csv.writer(table).writerows(rows)
    write_file(tmp_path / "csv/a.csv", table.getvalue().encode())
    members = []
    for i in range(4):
        described = json.dumps({"similarity": i / 4, "url": "http://a.b/c.jpg", "stars": [i]})
        parts = {"jpg": image_bytes(shade=i), "txt": b"a circle", "json": described.encode()}
        members += [(f"{i}.{name}", data) for name, data in parts.items()]
    write_file(tmp_path / "tar/0.tar", tar_bytes(members))
    table_source = {"format": "csv", "path": str(tmp_path / "csv"), "task": "vqa"}
    for source, place, least in (
        ({**table_source, "text_only": True}, "score", 2),
        ({"format": "webdataset", "path": str(tmp_path / "tar"), "task": "captioning"},
         "similarity", 0.5),
    ):  # fmt: skip
        pack = {"where": [[place, ">=", least]]}
        run = packed_run(
            {**source, "keep": [place]}, tmp_path / f"out {source['format']}", pack=pack
        )
        packed = sorted(sample.key.rpartition("/")[2] for _, sample, _ in samples_of(run))
        assert packed == ["2", "3"]
        assert not any(place in line for line in open_index(run).info.warnings)
        run = make_run({**source, "min_rating": {"stars": 3}}, tmp_path / f"low {run.config.task}")
        found = {key.rpartition("/")[2]: reason for key, reason in outcomes(run).items()}
        assert found == {**dict.fromkeys("012", "not_chosen"), "3": "ok"}


def test_turns_by_their_ratings(tmp_path: Path) -> None:
    """The rule of nanoVLM's data/datasets.py: a turn is left out where any of its ratings is there
    and lower; pictures stay in front of what is left; without a turn there is no sample."""
    rows = finevision_rows()
    source = finevision(tmp_path / "data", rows)
    for least in ({"relevance": 3}, dict.fromkeys(RATINGS, 2)):
        options = {f"{name}_ratings": value for name, value in least.items()}
        expected = {}
        for i, row in enumerate(rows):
            kept = []
            for number, text in enumerate(row["texts"]):
                lists = [(row[f"{name}_ratings"], value) for name, value in least.items()]
                given = [(own[number], value) for own, value in lists if own is not None]
                if all(rating is None or rating >= value for rating, value in given):
                    kept += [text["user"], text["assistant"]]
            if kept:
                kept[0] = "<image>" * len(row["images"]) + kept[0]
                expected[f"a:{i}"] = (kept, [one["bytes"] for one in row["images"]])
        assert 5 < len(expected) < 60
        out = tmp_path / f"out{len(options)}"
        run = packed_run({**source, "min_rating": options}, out)
        found = {
            sample.key: (
                [t for turn in place_media(sample) for t in (turn.prompt, turn.answer)],
                media,
            )
            for _, sample, media in samples_of(run)
        }
        assert found == expected
        assert open_index(run).info.set_aside == {"not_chosen": 60 - len(expected)}
        check_set_aside(run)
    assert verify(run, deep=True).ok
    other = make_run({**source, "min_rating": {"relevance_ratings": 5}}, out)
    with pytest.raises(StageError, match=r"source\.0\.min_rating was"):
        measure(other)


def test_lists_that_are_no_ratings(tmp_path: Path) -> None:
    turns = dialogue("a?", "b", "c?", "d")
    rows = [{"id": f"{one}", "messages": turns, "stars": one} for one in ([3], ["good", 3], 4)]
    rows += [{"id": "none", "messages": turns}]
    rows += [{"id": "empty", "messages": turns[:2], "stars": ""}]  # as tables write null
    call = {"role": "function_call", "content": '{"name": "f", "arguments": {}}'}
    result = {"role": "tool", "content": "1"}  # goes with its call
    called = [turns[0], call, result, turns[1], result, turns[1]]
    rows += [{"id": "call", "messages": called, "stars": [1, 3, 3]}]
    rows += [{"id": "later", "messages": [*called[:4], *turns[2:]], "stars": [1, 3, 3]}]
    source = {**of_lines(tmp_path / "a.jsonl", rows), "min_rating": {"stars": 3}}
    run = make_run(source, tmp_path / "out")
    bad = dict.fromkeys(("[3]", "['good', 3]", "4"), "bad_record")
    ok = dict.fromkeys(("none", "empty", "later"), "ok")
    assert outcomes(run) == {**bad, **ok, "call": "not_chosen"}
    detail = "bad_record\t'stars' is not a list of 2 numbers or nulls\n"
    assert "".join(list_set_aside(run)).count(detail) == 3
    (line,) = measure(run).info.warnings
    assert line.startswith("source.min_rating=stars is not in the record (about 1 samples")


def skipping(source: dict[str, Any], tmp_path: Path, skipped: Run, name: str, **pack: Any) -> Run:
    skip = [skipped.config.output.path]
    return make_run({**source, "skip": skip}, tmp_path / name, pack=pack)


def keys_of(run: Run) -> list[str]:
    return sorted(open_index(run).table("key")["key"].to_pylist())


def test_samples_that_were_not_chosen_are_new(tmp_path: Path) -> None:
    """Also those of an id that several records share, or that are in the source twice."""
    rows = records([i % 4 for i in range(24)])
    rows += [{**rows[3], "texts": rows[4]["texts"]}, rows[3], rows[5], {"id": "broken"}]
    rows += [{**rows[7], "meta": {"score": 0}}]  # chosen, but a duplicate
    source = of_lines(tmp_path / "a.jsonl", rows, keep=["meta.score"])
    where = [["meta.score", "<", 3]]
    first = packed_run(source, tmp_path / "first", pack={"where": where, "max_set_aside": 1})
    reasons = {"bad_record": 1, "not_chosen": 7, "duplicate_key": 3}
    assert pack_all(first).counts.set_aside == reasons
    second = skipping(source, tmp_path, first, "second")
    samples = measure(second)
    assert samples.info.num_skipped == 20
    assert samples.info.set_aside == {}
    (other,) = (key for key in keys_of(second) if "@" in key)
    assert len(keys_of(second)) == 9
    assert sorted({*keys_of(second)}) == sorted([other, *(f"{i}" for i in range(3, 24, 4))])
    # Both together hold all, and nothing twice but what the source has twice.
    pack_all(second)
    third = make_run(
        {**source, "skip": [str(tmp_path / "first"), str(tmp_path / "second")]}, tmp_path / "third"
    )
    assert outcomes(third) == {}
    # Another choice of the first leaves out others.
    pack = {"where": [["meta.score", "<", 2]], "max_set_aside": 1}
    pack_all(make_run(source, tmp_path / "first", pack=pack, output={"overwrite": True}))
    with pytest.raises(StageError, match=r"source\.0\.skip\.listing"):
        measure(second)


def test_samples_below_a_rating_are_new(tmp_path: Path) -> None:
    rows = [{**row, "stars": [i % 3]} for i, row in enumerate(records([0] * 9))]
    rows[8] |= {"texts": rows[8]["texts"] + rows[7]["texts"], "stars": [2, 1]}
    source = of_lines(tmp_path / "a.jsonl", rows)
    first = packed_run({**source, "min_rating": {"stars": 2}}, tmp_path / "first")
    assert keys_of(first) == ["2", "5", "8"]
    found = outcomes(skipping({**source, "min_rating": {"stars": 1}}, tmp_path, first, "second"))
    # A record with other turns than before is another sample.
    assert {key.partition("@")[0]: reason for key, reason in found.items()} == {
        **dict.fromkeys("036", "not_chosen"),
        **dict.fromkeys("1478", "ok"),
    }
    again = outcomes(skipping({**source, "min_rating": {"stars": 2}}, tmp_path, first, "again"))
    assert again == dict.fromkeys("013467", "not_chosen")


def test_overlong_samples_are_new_to_longer_packs(tmp_path: Path) -> None:
    rows = [spoken(n, key=f"{n}", n=n) for n in (5, 200, 9)]
    source = of_lines(tmp_path / "a.jsonl", rows, keep="n")
    pack = {"seq_length": 128, "max_set_aside": 1, "where": [["n", "!=", 5]]}
    first = packed_run(source, tmp_path / "first", pack=pack)
    same = skipping(source, tmp_path, first, "same", seq_length=128)
    assert outcomes(same) == {"5": "ok"}
    longer = skipping(source, tmp_path, first, "longer", seq_length=512)
    assert outcomes(longer) == {"5": "ok", "200": "ok"}
    # What is new depends on the length: the index of one length is not taken for another.
    with pytest.raises(StageError, match=r"source\.0\.skip\.listing"):
        measure(skipping(source, tmp_path, first, "longer", seq_length=128))


def test_skipping_heeds_what_was_drawn(tmp_path: Path) -> None:
    rows = [{**row, "id": None} for row in records([0] * 40)]
    source = of_lines(tmp_path / "a.jsonl", rows)
    half = packed_run({**source, "repeat": 0.5}, tmp_path / "half")
    packed = {sample.key for _, sample, _ in samples_of(half)}
    assert 0 < len(packed) < 40
    rest = outcomes(skipping(source, tmp_path, half, "rest"))
    assert rest == dict.fromkeys({f"a:{i + 1}" for i in range(40)} - packed, "ok")
    (half.workspace.plan / "set_aside.parquet").unlink()
    with pytest.raises(StageError, match="has lost the table of its plan"):
        measure(skipping(source, tmp_path, half, "other"))


def test_a_filter_on_a_field_that_no_record_has(tmp_path: Path) -> None:
    """It stops; not where a source's only ratings are of turns that they leave out."""
    keep = ["meta.score", "meta.skore"]
    source = of_lines(tmp_path / "a.jsonl", records([1, None, 3]), keep=keep, text_only=True)
    run = make_run(source, tmp_path / "out", pack={"where": [["meta.skore", "!=", 3]]})
    with pytest.raises(StageError, match=r"no record has 'meta\.skore', which pack\.where names"):
        make_plan(run, measure(run))
    rows = [
        {**row, "stars": stars} for row, stars in zip(records([1, 2]), [[1], None], strict=True)
    ]
    source = of_lines(tmp_path / "b.jsonl", rows)
    found = outcomes(make_run({**source, "min_rating": {"stars": 2}}, tmp_path / "low"))
    assert found == {"0": "not_chosen", "1": "ok"}
    for number, names in enumerate((["starz"], ["stars", "starz"])):
        rating = dict.fromkeys(names, 2)
        run = make_run({**source, "min_rating": rating}, tmp_path / f"{number}")
        with pytest.raises(
            StageError, match=r"b\.jsonl has 'starz', which source\.min_rating names"
        ):
            measure(run)

"""Lengths measured elsewhere are planned like those of an index, and the index alone is read."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from offline_packing.errors import StageError
from offline_packing.measure.measure import measure
from offline_packing.plan.lengths import plan_lengths, write_assignment
from offline_packing.plan.make_plan import make_plan
from offline_packing.plan.plan import preview_plan
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run
from tests.helpers.command import invoke
from tests.helpers.datasets import captioning_pairs, make_run


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("measured")
    run = make_run(captioning_pairs(folder / "data"), folder / "out", pack={"seq_length": 256})
    measure(run)
    return run


def save_lines(separator: str) -> Callable[[pa.Table, Path], None]:
    def save(table: pa.Table, path: Path) -> None:
        rows = zip(table["key"].to_pylist(), table["num_tokens"].to_pylist(), strict=True)
        path.write_text("".join(f"{key}{separator}{length}\n" for key, length in rows))

    return save


FILES: dict[str, Callable[[pa.Table, Path], Any]] = {
    "a.tsv": save_lines("\t"),
    "token_info.txt": save_lines(":"),
    # The writer of pyarrow 21 repeats the heading where the first chunk is empty.
    "a.csv": lambda table, path: pa.csv.write_csv(table.combine_chunks(), path),
    "a.parquet": pq.write_table,
    "renamed.parquet": lambda table, path: pq.write_table(
        table.rename_columns(["name", "length"]), path
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_the_plan_is_that_of_the_index(measured: Run, tmp_path: Path, name: str) -> None:
    samples = open_index(measured)
    FILES[name](samples.table("key", "num_tokens"), tmp_path / name)
    summary = plan_lengths(measured, tmp_path / name, tmp_path / "out.parquet")
    planned = make_plan(measured, samples).packs
    write_assignment(samples, planned, tmp_path / "expected.parquet")
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.equals(pq.read_table(tmp_path / "expected.parquet"))
    assert f"packs                   {planned.num_packs} of 256 tokens" in summary
    keys = samples.table("key")["key"].to_pylist()
    packs: dict[int, list[str]] = {}
    for row in found.to_pylist():
        assert row["position"] == len(packs.setdefault(row["pack"], []))
        packs[row["pack"]].append(row["key"])
    assert list(packs.values()) == [[keys[i] for i in pack] for pack in planned]


def test_copies_budgets_and_set_asides(tmp_path: Path) -> None:
    lines = ["id,tokens,source,num_images", "long,999,a,1", "twice,20,a,1", "twice,30,a,1"]
    lines += [f"s{i},{20 + i},{'ab'[i % 2]},1" for i in range(20)]
    (tmp_path / "l.csv").write_text("\n".join(lines))
    sources = [
        {"format": "jsonl", "path": f"{name}.jsonl", "task": "bmr", "name": name, "repeat": repeat}
        for name, repeat in (("a", 1), ("b", 2))
    ]
    pack = {"seq_length": 128, "budgets": {"images": 3}}
    run = make_run(sources, tmp_path / "out", pack=pack)
    summary = plan_lengths(run, tmp_path / "l.csv", tmp_path / "out.parquet")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    packed = [row["key"] for row in rows if row["pack"] is not None]
    copies = [f"s{i}#2" for i in range(1, 20, 2)]
    assert sorted(packed) == sorted(["twice", *(f"s{i}" for i in range(20)), *copies])
    assert [(row["key"], row["num_tokens"]) for row in rows if row["pack"] is None] == [
        ("long", 999),
        ("twice", 30),
    ]
    assert max(row["position"] or 0 for row in rows) in (1, 2)
    assert "overlong              1" in summary
    assert "duplicate_key         1" in summary
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "file,tokens\na,1\n", "has the columns file, tokens; name one of them key"),
        ("a.csv", "key,tokens\na,-1\n", "sample 'a' has -1 tokens"),
        ("a.csv", "key,tokens\na,1.5\n", "num_tokens are whole numbers"),
        ("a.csv", "key,tokens,source\na,1,z\n", "source 'z' is none of the configuration's: x, y"),
        ("a.txt", "name\ttokens\na\t1\nb\n", "'b' is not name<TAB>tokens nor name:tokens"),
        ("a.parquet", "no Parquet", "cannot be read"),
        ("a.csv", "key,tokens\na,1000\n", "nothing to pack .* overlong 1"),
        # the first line is no heading where it has a number
        ("a.txt", "a\t10.0\nb\t20\n", "10.0' is not name<TAB>tokens nor name:tokens"),
        ("a.csv", "key,tokens\na,1\n,2\n", "a sample has no key"),
        ("a.csv", "key,tokens,num_images\na,1,2\nb,1,\n", "num_images is empty; write 0"),
    ],
)
def test_bad_lengths(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(StageError, match=message):
        plan_lengths(make_run(two_sources(), tmp_path / "out"), tmp_path / name, None)


def two_sources(**options: Any) -> list[dict[str, Any]]:
    paths = [f"{one}.jsonl" for one in "xy"]
    return [{"format": "jsonl", "path": path, "task": "bmr", **options} for path in paths]


@pytest.mark.parametrize(
    ("pack", "source", "column"),
    [
        ({"budgets": {"images": 3}}, {}, "num_images"),
        ({"homogeneous": True}, {}, "num_images"),
        ({"assignment": "balance"}, {}, "num_vision_patches"),
        ({"assignment": "mix"}, {}, "source"),
        ({}, {"repeat": 2}, "source"),
    ],
)
def test_what_packs_depend_on_must_be_known(
    tmp_path: Path, pack: dict[str, Any], source: dict[str, Any], column: str
) -> None:
    (tmp_path / "l.tsv").write_text("a\t10\nb\t20\n")
    run = make_run(two_sources(**source), tmp_path / "out", pack=pack)
    with pytest.raises(StageError, match=f"column {column}"):
        plan_lengths(run, tmp_path / "l.tsv", None)


def test_keys_that_look_like_numbers_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("key,tokens\n001,10\n1,10\n1.0,10\nNA,10\n")
    run = make_run(two_sources()[0], tmp_path / "out")
    plan_lengths(run, tmp_path / "l.csv", tmp_path / "new/out.parquet")
    rows = pq.read_table(tmp_path / "new/out.parquet").to_pylist()
    assert {row["key"] for row in rows if row["pack"] == 0} == {"001", "1", "1.0", "NA"}


def test_command(tmp_path: Path) -> None:
    """Neither source nor output is needed; a dry run writes nothing."""
    config, lengths, output = (tmp_path / name for name in ("p.yaml", "l.tsv", "o.parquet"))
    config.write_text("pack: {seq_length: 64}")
    save_lines("\t")(pa.table({"key": ["a", "b"], "num_tokens": [30, 30]}), lengths)
    arguments: list[str | Path] = ["plan", config, "--lengths", lengths, "--output", output]
    invoke(*arguments, "--dry-run")
    assert sorted(tmp_path.iterdir()) == [lengths, config]
    assert "packs                   1 of 64 tokens" in invoke(*arguments, "pack.seed=1").stdout
    assert sorted(tmp_path.iterdir()) == [lengths, output, config]


def test_planning_again_opens_no_source_file(measured: Run) -> None:
    root, opened = measured.config.source[0].path, list[str]()
    sys.addaudithook(
        lambda event, values: (
            opened.append(str(values[0]))
            if event == "open" and str(values[0]).startswith(root)
            else None
        )
    )
    again = make_run(
        measured.config.source[0].model_dump(),
        measured.workspace.root,
        pack={"seq_length": 512, "seed": 1, "budgets": {"images": 9}},
    )
    assert "of 512 tokens" in preview_plan(again, open_index(again))
    assert opened == []
    next(Path(root).rglob("*.jpg")).read_bytes()
    assert len(opened) == 1  # or nothing was watched

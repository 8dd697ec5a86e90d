"""Lengths measured elsewhere are planned like those of an index, and the index alone is read; the
figures of a plan, against numbers worked out by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from offline_packing.config.sections import ReportConfig
from offline_packing.errors import StageError
from offline_packing.measure.measure import measure
from offline_packing.plan.lengths import plan_lengths, write_assignment
from offline_packing.plan.plan import make_plan
from offline_packing.plan.summary import render_summary
from offline_packing.planner.plan_packs import plan_packs
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.figures import padded_tokens, plan_figures, sample_figures
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


def write_config(folder: Path, **pack: Any) -> Path:
    path = folder / "pack.yaml"
    path.write_bytes(orjson.dumps({"pack": pack}))
    return path


@pytest.mark.parametrize("name", FILES)
def test_the_plan_is_that_of_the_index(measured: Run, tmp_path: Path, name: str) -> None:
    samples = open_index(measured)
    FILES[name](samples.table("key", "num_tokens"), tmp_path / name)
    config, output = write_config(tmp_path, seq_length=256), tmp_path / "out.parquet"
    summary = plan_lengths(config, (), tmp_path / name, output)
    planned = make_plan(measured, samples).packs
    columns = samples.table("key", "source_id", "num_tokens")
    write_assignment(columns, planned, tmp_path / "expected.parquet")
    found, expected = pq.read_table(output), pq.read_table(tmp_path / "expected.parquet")
    assert found.equals(expected.drop_columns("source_id"))
    assert f"packs                   {planned.num_packs} of 256 tokens" in summary
    keys = samples.table("key")["key"].to_pylist()
    packs: dict[int, list[str]] = {}
    for row in found.to_pylist():
        assert row["position"] == len(packs.setdefault(row["pack"], []))
        packs[row["pack"]].append(row["key"])
    assert list(packs.values()) == [[keys[i] for i in pack] for pack in planned]


def test_an_assignment_names_the_uses_of_repeated_samples(tmp_path: Path) -> None:
    path = captioning_pairs(tmp_path / "data", count=8)
    source = {"format": "pairs", "path": str(path), "task": "captioning", "repeat": 2}
    run = make_run(source, tmp_path / "out", pack={"seq_length": 256})
    measure(run)
    samples = open_index(run)
    columns = samples.table("key", "source_id", "num_tokens")
    write_assignment(columns, make_plan(run, samples).packs, tmp_path / "out.parquet")
    keys = samples.table("key")["key"].to_pylist()
    found = pq.read_table(tmp_path / "out.parquet")
    assert found["key"].to_pylist() != keys
    assert sorted(found["key"].to_pylist()) == sorted([*keys, *(f"{key}#2" for key in keys)])
    assert set(found["source_id"].to_pylist()) == {0}


def test_budgets_and_set_asides(tmp_path: Path) -> None:
    lines = ["id,tokens,num_images", "long,999,1", "twice,20,1", "twice,30,1"]
    lines += [f"s{i},{20 + i},1" for i in range(20)]
    (tmp_path / "l.csv").write_text("\n".join(lines))
    config = write_config(tmp_path, seq_length=128, budgets={"images": 3})
    summary = plan_lengths(config, (), tmp_path / "l.csv", tmp_path / "out.parquet")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    packed = [row["key"] for row in rows if row["pack"] is not None]
    assert sorted(packed) == sorted(["twice", *(f"s{i}" for i in range(20))])
    assert [(row["key"], row["num_tokens"]) for row in rows if row["pack"] is None] == [
        ("long", 999),
        ("twice", 30),
    ]
    assert max(row["position"] or 0 for row in rows) in (1, 2)
    assert "overlong              1" in summary
    assert "duplicate_key         1" in summary
    with pytest.raises(StageError, match="'long' has 999 tokens > seq_length 128"):
        plan_lengths(config, ("pack.on_overlong=error",), tmp_path / "l.csv", None)


def test_packs_of_one_kind_and_a_limit_of_samples(tmp_path: Path) -> None:
    rows = "".join(f"s{i},20,{i % 2}\n" for i in range(40))
    (tmp_path / "l.csv").write_text(f"key,tokens,num_images\n{rows}")
    config = write_config(tmp_path, seq_length=128, homogeneous=True, max_samples=4)
    plan_lengths(config, (), tmp_path / "l.csv", tmp_path / "out.parquet")
    kinds: dict[int, list[int]] = {}
    for row in pq.read_table(tmp_path / "out.parquet").to_pylist():
        kinds.setdefault(row["pack"], []).append(int(row["key"][1:]) % 2)
    assert sorted(kinds.values()) == [[0] * 4] * 5 + [[1] * 4] * 5


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "file,tokens\na,1\n", "has the columns file, tokens; name one of them key"),
        ("a.csv", "key,tokens\na,-1\n", "sample 'a' has -1 tokens"),
        ("a.csv", "key,tokens\na,1.5\n", "num_tokens are whole numbers"),
        ("a.txt", "name\ttokens\na\t1\nb\n", "'b' is not name<TAB>tokens nor name:tokens"),
        ("a.parquet", "no Parquet", "cannot be read"),
        ("a.csv", "key,tokens\na,10000\n", "nothing to pack .* overlong 1"),
        ("a.csv", "key,tokens\n", "nothing to pack"),
        # the first line is not a heading where it has a number
        ("a.txt", "a\t10.0\nb\t20\n", "10.0' is not name<TAB>tokens nor name:tokens"),
        ("a.csv", "key,tokens\na,1\n,2\n", "a sample has no key"),
        ("a.csv", "key,tokens,num_images\na,1,2\nb,1,\n", "num_images is empty; write 0"),
    ],
)
def test_bad_lengths(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(StageError, match=message):
        plan_lengths(write_config(tmp_path), (), tmp_path / name, None)


@pytest.mark.parametrize(
    ("pack", "column"),
    [
        ({"budgets": {"images": 3}}, "num_images"),
        ({"homogeneous": True}, "num_images"),
        ({"assignment": "balance"}, "num_vision_patches"),
    ],
)
def test_what_packs_depend_on_must_be_known(
    tmp_path: Path, pack: dict[str, Any], column: str
) -> None:
    (tmp_path / "l.tsv").write_text("a\t10\nb\t20\n")
    with pytest.raises(StageError, match=f"column {column}"):
        plan_lengths(write_config(tmp_path, **pack), (), tmp_path / "l.tsv", None)


@pytest.mark.parametrize(
    "pack",
    [
        {"share_prefixes": True},
        {"where": [["score", ">=", 1]]},
        {"mixture": {"start": {"a": 1}, "end": {"a": 1}}},
    ],
)
def test_options_of_measured_samples_are_refused(tmp_path: Path, pack: dict[str, Any]) -> None:
    (tmp_path / "l.tsv").write_text("a\t10\nb\t20\n")
    with pytest.raises(StageError, match=f"pack.{next(iter(pack))} needs samples that were"):
        plan_lengths(write_config(tmp_path, **pack), (), tmp_path / "l.tsv", None)


def test_keys_that_look_like_numbers_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("key,tokens\n001,10\n1,10\n1.0,10\nNA,10\n")
    plan_lengths(write_config(tmp_path), (), tmp_path / "l.csv", tmp_path / "new/out.parquet")
    rows = pq.read_table(tmp_path / "new/out.parquet").to_pylist()
    assert {row["key"] for row in rows if row["pack"] == 0} == {"001", "1", "1.0", "NA"}


def test_command(tmp_path: Path) -> None:
    """Neither source nor output is needed, and other sections are left alone."""
    config, lengths, output = (tmp_path / name for name in ("p.yaml", "l.tsv", "o.parquet"))
    config.write_text("{source: {path: none}, pack: {seq_length: 64}}")
    save_lines("\t")(pa.table({"key": ["a", "b"], "num_tokens": [30, 30]}), lengths)
    assert (
        "packs                   1 of 64 tokens"
        in invoke("plan-lengths", config, lengths, "pack.seed=1", "--output", output).stdout
    )
    assert sorted(tmp_path.iterdir()) == [lengths, output, config]


def test_padded_tokens_are_the_mean_over_orders() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 400, 1003)
    drawn = []
    for _ in range(300):
        batches = np.split(rng.permutation(lengths), range(8, 1003, 8))
        drawn.append(sum(len(batch) * batch.max() for batch in batches))
    assert padded_tokens(np.bincount(lengths), 8) == pytest.approx(np.mean(drawn), rel=2e-3)


def test_figures() -> None:
    lengths = np.array([60, 40, 70, 30, 100, 50], np.int32)
    packs = plan_packs(lengths, 100)
    assert (packs.num_packs, packs.info.lower_bound, packs.packing_factor) == (4, 4, 1.5)
    compared = ReportConfig(global_batch_size=2, padded_batch_size=6)
    figures = sample_figures(8, {"bad_json": 2}) | plan_figures(compared, lengths, packs)
    found = figures["saving"]
    assert found["padding_before"] == pytest.approx(250 / 600)  # six padded to 100
    assert found["padding_after"] == 0
    assert (found["iterations_before"], found["iterations_after"]) == (3, 2)
    assert found["equal_batch_size"] == 1
    text = render_summary(figures)
    shown = {line[:24].strip(): line[24:] for line in text.splitlines()}
    assert (shown["samples"], shown["fill"]) == ("8", "87.50%")
    bars = text.partition("samples by tokens\n")[2].splitlines()
    assert sum(int(line.split()[-1]) for line in bars) == 6
    assert "41.7% -> 0.0%" in text
    assert "3 -> 2 per epoch at global batch size 2" in text
    assert "bad_json" in text


def test_padding_to_a_multiple_is_counted() -> None:
    lengths = np.array([1, 7], np.int32)
    packs = plan_packs(lengths, 16, pad_multiple=8)
    figures = sample_figures(2, {}) | plan_figures(ReportConfig(), lengths, packs)
    assert figures["saving"]["padding_after"] == pytest.approx(0.5)
    assert "50.00%" in render_summary(figures)

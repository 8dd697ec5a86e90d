"""The benchmarks, and tools that guard a claim, run on small input."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.accounting import account, open_one
from tests.helpers.command import BENCHMARKS, benchmark, run_benchmark
from tools import ideas, mutate
from tools.attack import GOOD, WRITERS, damaged_records

ONLINE = (
    ("loaders --samples 200 --buffer 50", "captions | auto, carry", "sft | dynamic, buffer 200"),
    ("planning --samples 200", "captions | auto |  |", "captions | knapsack | 18 |"),
    ("buffers --samples 300", "1 | 300 | 50 |", "128 | 2 | 5000 |"),
    ("binpack --samples 300", "captions | 22 / 22;", "narrow | 25 / 26;"),
)
OTHERS = (
    ("benchmark_ranks", "idle --samples 2000 --many 500", "8192 x 32 |", "8192 x 128 |"),
    ("benchmark_ranks", "uniform --samples 800", "30% | 8 |", "95% | 128 |"),
    ("benchmark_planner", "budgets --samples 300 --patches 22000", "22000 |"),
    ("benchmark_planner", "prefixes --samples 600 --data-set gqa", "gqa | 5."),
    ("narrow_gaps", "--samples 600", "729 + gamma(2, 20) | 600 |"),
    ("narrow_gaps", "--random 1", "1 | "),
)


@pytest.mark.parametrize("case", [*(("benchmark_online", *case) for case in ONLINE), *OTHERS])
def test_it_prints_a_table(case: tuple[str, ...]) -> None:
    name, arguments, *rows = case
    result = run_benchmark(name, *arguments.split())
    assert result.exit_code == 0, result.output
    for row in rows:
        assert f"| {row}" in result.stdout


def test_it_is_a_script() -> None:
    """In a process of its own, by its path."""
    script = BENCHMARKS / "benchmark_planner.py"
    command = [sys.executable, str(script), "order", "--samples", "300"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "| for 8 x 2 | 8 x 2 |" in result.stdout


def test_a_measured_index_is_a_distribution(tmp_path: Path) -> None:
    index = tmp_path / "out" / "_packing" / "index"
    index.mkdir(parents=True)
    for number, num_tokens in enumerate((np.arange(100, 4000), np.array([9000]))):
        table = pa.table({"num_tokens": num_tokens.astype(np.int32)})  # 9000: in no pack
        pq.write_table(table, index / f"part-{number:05d}.parquet")
    distributions = ("--distribution", index, "--distribution", tmp_path / "out")
    result = run_benchmark("benchmark_planner", "streaming", "--samples", "2000", *distributions)
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if line.startswith(f"| {tmp_path}")]
    assert len(rows) == 2
    assert rows[0].split("|")[2:7] == rows[1].split("|")[2:7]


def test_ms_swift_carries_its_last_pack_over() -> None:
    """Three samples fill a pack: 1,000 leave one over, which the next window takes in."""
    pytest.importorskip("binpacking")
    peer = benchmark("planner_peers").PEERS["ms-swift (windows of 1,000, last pack carried)"]
    packs = peer.function([300] * 2000, 1000)
    assert sorted(index for pack in packs for index in pack) == list(range(2000))
    assert len(packs) == 667  # windows by themselves make 668


ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_killed_uploads_are_made_again() -> None:
    """Half of the kills are of a worker, the others of the whole run."""
    command = [sys.executable, "-m", "tools.kill_uploads", "--kills", "2", "--workers", "2"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    assert "rerun made the local run's objects and left none" in done.stdout


@pytest.mark.parametrize("name", WRITERS)
def test_damaged_records_are_counted(tmp_path: Path, name: str) -> None:
    root = tmp_path / "data"
    root.mkdir()
    options = WRITERS[name](root, damaged_records(name, 20, seed=1))
    found = [outcome for _, outcome, _ in account(open_one(options, tmp_path))]
    assert len(found) == GOOD + 20
    assert GOOD <= found.count("ok") < len(found)


@pytest.mark.exhaustive
def test_a_case_keeps_its_bounds() -> None:
    """In a process of its own: that of a test holds gigabytes, which a child of it would report."""
    command = [sys.executable, "-m", "tools.attack", "--records", "5", "--only", "jsonl"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    header, line, end = done.stdout.splitlines()
    assert (header.split()[0], line.split()[2]) == ("case", "9")
    assert end == "1 cases, 0 broke a bound"


def test_mutants_are_programs_with_one_line_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a seed, and an operator is not taken from a text beside it."""
    monkeypatch.setattr(mutate, "PRODUCT", ("launch/loop",))
    mutants = mutate.draw_mutants(40, seed=1)
    assert mutants == mutate.draw_mutants(40, seed=1)
    for mutant in mutants:
        source = (mutate.ROOT / mutant.file).read_text()
        changed = mutant.apply(source)
        ast.parse(changed)
        lines = zip(source.splitlines(), changed.splitlines(), strict=True)
        assert [i for i, (a, b) in enumerate(lines, 1) if a != b] == [mutant.line]
    text = "'a < b'; c < d\n"
    assert {m.apply(text) for m in mutate.mutants_of("f.py", text)} == {"'a < b'; c <= d\n"}


def test_files_know_an_idea_by_names_and_texts_but_not_docstrings() -> None:
    words = set(ideas.words_in(ast.parse("'''traits'''\ndef f(a, *, b): return a.c['d']\n")))
    assert {"f", "a", "b", "c", "d"} <= words
    assert "traits" not in words
    gone = ("slots of ranks", "traits")
    assert ideas.files_that_know(gone) == {name: [] for name in gone}

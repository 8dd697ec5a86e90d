"""The benchmark runs on small input, prints tables."""

import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.tools import BENCHMARKS, run_benchmark

run_tool = functools.partial(run_benchmark, "benchmark_planner")


def write_index(folder: Path, *parts: np.ndarray) -> None:
    """Index parts, as far as the benchmark reads them."""
    folder.mkdir(parents=True)
    for number, num_tokens in enumerate(parts):
        table = pa.table({"num_tokens": num_tokens.astype(np.int32)})
        pq.write_table(table, folder / f"part-{number:05d}.parquet")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["order", "--samples", "3000"], "| for 8 x 2 | 8 x 2 |"),
        (["budgets", "--samples", "3000", "--patches", "22000"], "| 22000 |"),
    ],
)
def test_command_prints_a_table(arguments, expected) -> None:
    result = run_tool(*arguments)
    assert result.exit_code == 0, result.output
    assert expected in result.stdout


def test_narrow_distributions() -> None:
    result = run_benchmark("narrow_gaps", "--samples", "2000")
    assert result.exit_code == 0, result.output
    assert "| 729 + gamma(2, 20) | 2,000 |" in result.stdout


def test_it_is_a_script() -> None:
    """In a process of its own, by its path."""
    script = BENCHMARKS / "benchmark_planner.py"
    command = [sys.executable, str(script), "order", "--samples", "300"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "| for 8 x 2 | 8 x 2 |" in result.stdout


def test_methods_are_timed() -> None:
    options = ("--distribution", "narrow", "--method", "best_fit_decreasing", "--repeat", "1")
    table = run_tool("speed", "--samples", "3000", *options)
    assert "| narrow | best_fit_decreasing |" in table.stdout, table.stderr


def test_a_measured_index_is_a_distribution(tmp_path) -> None:
    index = tmp_path / "out" / "_packing" / "index"
    write_index(index, np.arange(100, 4000), np.array([9000]))  # 9000: in no pack
    distributions = ("--distribution", index, "--distribution", tmp_path / "out")
    result = run_tool("streaming", "--samples", "2000", *distributions)
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if line.startswith(f"| {tmp_path}")]
    assert len(rows) == 2
    assert rows[0].split("|")[2:7] == rows[1].split("|")[2:7]


def test_an_unknown_distribution_is_refused() -> None:
    with pytest.raises(Exception, match="distribution 'nowhere' is unknown; choose one of captio"):
        run_tool("streaming", "--samples", "2000", "--distribution", "nowhere")

"""The benchmark of packing while training runs on small input."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "benchmarks" / "benchmark_online.py"


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (
            ["loaders", "--samples", "200", "--buffer", "50"],
            ["captions | binpack, carry", "captions | auto, carry", "sft | dynamic, buffer 200"],
        ),
        (["planning", "--samples", "200"], ["captions | auto |  |", "captions | knapsack | 18 |"]),
        (["ranks", "--samples", "500"], ["Σ l² | 8 |", "operations | 64 |"]),
        (["buffers", "--samples", "300"], ["1 | 300 | 50 |", "128 | 2 | 5000 |"]),
        (
            "modes --samples 60 --ranks 2 --buffer 20 --only balanced".split(),
            ["offline, balanced |"],
        ),
    ],
)
def test_it_prints_a_table(arguments: list[str], rows: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, str(TOOL), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    for row in rows:
        assert f"| {row}" in result.stdout

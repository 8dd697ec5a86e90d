"""The benchmark of packing while training runs on small input."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "benchmark_online.py"


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (
            ["loaders", "--samples", "200", "--buffer", "50"],
            ["binpack, carry", "auto, carry", "dynamic, buffer 200"],
        ),
        (["planning", "--samples", "200"], ["auto |  |", "knapsack | 18 |"]),
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
        assert f"| captions | {row}" in result.stdout

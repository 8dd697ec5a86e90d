"""The benchmark runs on small input and prints a table."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "benchmark_planner.py"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["speed", "--samples", "3000", "--law", "narrow", "--method", "best_fit_decreasing"],
            "| narrow | best_fit_decreasing |",
        ),
        (["order", "--samples", "3000"], "| for 8 x 2 | 8 x 2 |"),
        (["budgets", "--samples", "3000", "--patches", "22000"], "| 22000 |"),
    ],
)
def test_command_prints_a_table(arguments, expected) -> None:
    result = subprocess.run(
        [sys.executable, str(TOOL), *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert expected in result.stdout

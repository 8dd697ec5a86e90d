"""The benchmark of packing while training runs on small input."""

import pytest

from tests.helpers.tools import run_benchmark


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (
            ["loaders", "--samples", "200", "--buffer", "50"],
            ["captions | binpack, carry", "captions | auto, carry", "sft | dynamic, buffer 200"],
        ),
        (["planning", "--samples", "200"], ["captions | auto |  |", "captions | knapsack | 18 |"]),
        (["buffers", "--samples", "300"], ["1 | 300 | 50 |", "128 | 2 | 5000 |"]),
    ],
)
def test_it_prints_a_table(arguments: list[str], rows: list[str]) -> None:
    result = run_benchmark("benchmark_online", *arguments)
    assert result.exit_code == 0, result.output
    for row in rows:
        assert f"| {row}" in result.stdout

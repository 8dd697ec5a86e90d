"""The benchmark of ranks, on a few samples."""

import pytest

from tests.helpers.tools import run_benchmark


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (["idle", "--samples", "2000", "--many", "500"], ["8192 x 32 |", "8192 x 128 |"]),
        (["uniform", "--samples", "3000"], ["30% | 8 |", "95% | 128 |"]),
    ],
)
def test_it_prints_a_table(arguments: list[str], rows: list[str]) -> None:
    result = run_benchmark("benchmark_ranks", *arguments)
    assert result.exit_code == 0, result.output
    for row in rows:
        assert f"| {row}" in result.stdout

"""Windows that carry over, and the memory of a buffer, as the benchmark of packing while training
measures them."""

import subprocess
import sys

import pytest

from tests.helpers.tools import BENCHMARKS, benchmark

#: Packs of 20,000 samples at 8,192 tokens by first-fit-decreasing on each buffer alone.
FIRST_FIT = {
    ("captions", 128): 1411,
    ("captions", 200): 1384,
    ("captions", 1000): 1347,
    ("sft", 128): 3708,
    ("sft", 200): 3678,
    ("sft", 1000): 3638,
}


@pytest.mark.parametrize(("distribution", "buffer"), FIRST_FIT)
def test_windows_reach_the_bound(distribution: str, buffer: int) -> None:
    row = benchmark("benchmark_online").count_packs(distribution, 20_000, buffer)
    assert row["first-fit-decreasing per buffer"] == FIRST_FIT[distribution, buffer]
    assert row["lower bound"] == {"captions": 1336, "sft": 3628}[distribution]
    assert row["packs"] <= {"captions": 1337, "sft": 3628}[distribution]


@pytest.mark.exhaustive
def test_a_waiting_sample_takes_no_pixels() -> None:
    """300 small images, and what any process takes; with 1,000 of 448 pixels a side the peaks are
    25 to 1."""
    small = ["--buffer", "300", "--side", "224", "--seq-length", "512"]
    command = [sys.executable, str(BENCHMARKS / "benchmark_online.py"), "energon", *small]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    header, _, *rows = (line.split(" | ") for line in done.stdout.splitlines())
    plain, ours = (dict(zip(header, row, strict=True)) for row in rows)
    assert int(plain["peak MiB"]) > 3 * int(ours["peak MiB"])
    assert int(ours["packs"]) <= int(plain["packs"])

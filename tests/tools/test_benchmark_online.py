"""The benchmark of packing while training runs on small input."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "benchmark_online.py"


def test_loaders_prints_a_table() -> None:
    arguments = ["loaders", "--samples", "200", "--buffer", "50"]
    result = subprocess.run(
        [sys.executable, str(TOOL), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    for road in ("binpack, carry", "auto, carry", "dynamic, buffer 200"):
        assert f"| captions | {road} |" in result.stdout

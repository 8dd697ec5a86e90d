"""The parts of tools/gpu_suite.sh, as far as a machine without a GPU goes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SUITE = Path(__file__).parents[2] / "tools" / "gpu_suite.sh"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="would use the GPU")


def run_suite(output: Path, *parts: str, deadline: int) -> str:
    """Run parts, and return what they print."""
    variables = {"PYTHON": sys.executable, "OUT": str(output), "DEADLINE": str(deadline)}
    return subprocess.run(
        ["bash", str(SUITE), *parts],
        env={**os.environ, **variables, "WHEELS": str(output / "none")},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_parts_without_time_are_skipped(tmp_path: Path) -> None:
    said = run_suite(tmp_path / "out", "unknown", "smoke", "bench", deadline=0)
    assert "unknown part; choose from: smoke tests fla train bench vqa" in said
    assert all(line in said for line in ("smoke skipped", "demo data skipped"))
    assert said.rstrip().endswith("end")


RUNS = ("own", "own_unfused", "transformers")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("part", "lines", "files"),
    [
        ("smoke", ["imports: ok", "stopped before torch's varlen attention", "smoke done"], set()),
        ("fla", ["stopped before flash-linear-attention's kernels", "fla done"], set()),
        ("tests", ["tests of parallel done"], {"tests.txt"}),
        ("train", [*(f"{run} done" for run in RUNS), "step 12/12"], {f"{r}.jsonl" for r in RUNS}),
    ],
)
def test_a_part_runs_at_sizes_for_a_cpu(
    part: str, lines: list[str], files: set[str], tmp_path: Path
) -> None:
    said = run_suite(tmp_path / "out", part, deadline=560)
    assert all(line in said for line in lines), said
    assert {path.name for path in (tmp_path / "out").iterdir()} == files | {"log.txt"}

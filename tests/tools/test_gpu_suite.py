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


def test_parts_end_where_they_need_a_gpu(tmp_path: Path) -> None:
    said = run_suite(tmp_path / "out", "unknown", "smoke", "fla", deadline=560)
    assert "unknown part; choose from: smoke tests fla train bench vqa" in said
    assert "imports: ok" in said
    assert "no CUDA device: stopped before torch's varlen attention" in said
    assert "no CUDA device: stopped before flash-linear-attention's kernels" in said
    assert "smoke done" in said
    assert "fla done" in said


def test_what_time_is_not_left_for_is_said(tmp_path: Path) -> None:
    said = run_suite(tmp_path / "out", "smoke", "bench", deadline=0)
    assert "smoke skipped" in said
    assert "demo data skipped" in said
    assert said.rstrip().endswith("end")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("part", "lines", "files"),
    [
        ("tests", ["tests of parallel done"], {"tests.txt"}),
        (
            "train",
            ["own done", "own_unfused done", "transformers done", "step 12/12"],
            {"own.jsonl", "own_unfused.jsonl", "transformers.jsonl"},
        ),
    ],
)
def test_a_part_runs_at_sizes_for_a_cpu(
    part: str, lines: list[str], files: set[str], tmp_path: Path
) -> None:
    said = run_suite(tmp_path / "out", part, deadline=560)
    for line in lines:
        assert line in said
    assert {path.name for path in (tmp_path / "out").iterdir()} == files | {"log.txt"}

"""The benchmark that trains packed and padded: its tables by hand, and all of it once."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tools import benchmark, run_benchmark


def run_of(mode: str, seed: int, losses: list[float]) -> dict[str, Any]:
    """A run of two steps, with held-out answers of 2, 2 and 10 labels, the last two of a sample."""
    answers = [
        {"sample": sample, "labels": labels, "loss": loss}
        for sample, labels, loss in zip("abb", (2, 2, 10), losses, strict=True)
    ]
    steps = [
        {"iteration": 1, "loss": 3.0, "sub_samples": 3, "loss_tokens": 10},
        {"iteration": 1, "validation_loss": 3.5},
        {"iteration": 2, "loss": 2.0, "sub_samples": 5, "loss_tokens": 30},
        {"iteration": 2, "validation_loss": 2.5},
    ]
    return {
        "mode": mode,
        "seed": seed,
        "normalization": "token",
        "rows_per_step": 2,
        "positions": 4096,
        "cpu_seconds": 7.0,
        "steps": steps,
        "answers": answers,
    }


def test_tables_and_curves(tmp_path: Path) -> None:
    report = benchmark("learning_report")
    packed = run_of("packed", 0, [4.0, 2.0, 8.0])
    assert report.held_out(packed) == pytest.approx(
        {"by token": 1.0, "by sample": (2 + 10 / 12) / 2, "short": 1.5, "long": 0.8}
    )
    runs = [packed, run_of("packed", 1, [4.0, 2.0, 22.0])]
    runs.append(run_of("padded, equal samples", 1, [4.0, 2.0, 15.0]))
    assert "| packed | 2 | 2 | 3 to 5 (4.0) | 10 to 30 (20.0) | 4,096 | 7 |" in report.render_runs(
        runs
    )
    *_, first, second = report.render_answers(runs).splitlines()
    assert first.startswith("| token | packed | 1.50 ± 0.50 |")
    assert second.endswith("| -0.50 |")  # from the packed run of that seed
    report.draw(runs, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 10_000


@pytest.mark.exhaustive
def test_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mode trains on the same samples, and a second call trains nothing."""
    for name in ("OFFLINE_PACKED_DATA", "OFFLINE_PACKING_BMR"):
        monkeypatch.setenv(name, "1")  # the program sets them; gone after the test
    options = [tmp_path, "--samples", "60", "--seeds", "1", "--epochs", "1"]
    first = run_benchmark("packing_learning", *options, "--normalization", "token")
    assert first.exit_code == 0
    assert first.output.count("CPU seconds") == 5
    assert "| token | padded, equal tokens |" in first.output
    again = run_benchmark("packing_learning", *options, "--normalization", "token")
    assert "CPU seconds" not in again.output
    assert again.output.strip() in first.output

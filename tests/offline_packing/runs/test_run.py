"""Progress of a stage where there is no terminal."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from offline_packing.runs import run as run_module
from offline_packing.runs.run import Run
from tests.helpers.datasets import make_run


def make(tmp_path: Path, shown: bool = True) -> Run:
    return replace(make_run(tmp_path / "data", tmp_path / "out"), progress=shown)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute takes no time."""
    monkeypatch.setattr(run_module, "_SECONDS_BETWEEN_LINES", 0)


@pytest.mark.usefixtures("impatient")
def test_without_a_terminal_there_are_lines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with make(tmp_path).bar("measure", 600_000, "record") as bar:
        for _ in range(3):
            bar.update(100_000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3
    for line in lines:
        assert re.fullmatch(
            r"measure: [\d,]+ of 600,000 records, \d+%, (\d\d:\d\d|\?) left", line
        ), line
    assert lines[-1].startswith("measure: 300,000 of 600,000 records, 50%, ")

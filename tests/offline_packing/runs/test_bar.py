"""How far a stage is, where there is no terminal."""

import re

import pytest

from offline_packing.runs import bar as bar_module
from offline_packing.runs.bar import progress_bar


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute takes no time."""
    monkeypatch.setattr(bar_module, "_SECONDS_BETWEEN_LINES", 0)


@pytest.mark.usefixtures("impatient")
def test_without_a_terminal_there_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("measure", 600_000, "record", shown=True) as bar:
        for _ in range(3):
            bar.update(100_000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3
    for line in lines:
        assert re.fullmatch(
            r"measure: [\d,]+ of 600,000 records, \d+%, (\d\d:\d\d|\?) left", line
        ), line
    assert lines[-1].startswith("measure: 300,000 of 600,000 records, 50%, ")


@pytest.mark.usefixtures("impatient")
def test_an_unknown_total_is_no_total(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("measure", None, "record", shown=True) as bar:
        bar.update(5000)
    assert "measure: 5,000 records in 00:00" in capsys.readouterr().err


def test_a_short_stage_and_a_quiet_one_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (True, False):
        with progress_bar("verify", 10, "pack", shown=shown) as bar:
            bar.update(10)
    assert capsys.readouterr().err == ""

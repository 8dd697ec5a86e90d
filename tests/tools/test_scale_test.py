"""The scale test runs on few rows."""

import sys
from pathlib import Path

import pytest

from tests.helpers.tools import benchmark


def test_it_goes_through_all_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["scale_test.py", "--rows", "9000", "--limit-gib", "64", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        benchmark("scale_test").main()
    assert "files of the source opened: 0" in capsys.readouterr().out
    assert not ended.value.code


def test_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["scale_test.py", "--lengths", "3000", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    benchmark("scale_test").main()
    assert "plan-lengths" in capsys.readouterr().out

"""The scale test runs on few lengths."""

from pathlib import Path

import pytest

from tests.helpers.tools import benchmark


def test_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["scale_test.py", "--lengths", "3000", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    benchmark("scale_test").main()
    assert "plan-lengths" in capsys.readouterr().out

"""Fixtures of the tests of packing."""

import sys
from pathlib import Path

import pytest

from offline_packing.cli import main as cli_module
from tests.helpers.command import Command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The real entry point: its exit status, stdout and stderr."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["offline-packing", *map(str, arguments)])
        status = 0
        try:
            cli_module.main()
        except SystemExit as end:
            status = int(end.code or 0)
        found = capsys.readouterr()
        return status, found.out, found.err

    return call

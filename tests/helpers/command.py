"""The command line, called in this process."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from offline_packing.cli import main as cli_module
from offline_packing.cli.commands import cli


def invoke(*arguments: str | Path) -> Result:
    """Run the command in this process; it must succeed."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[int, str]:
    """Exit status and stderr of the real entry point."""
    monkeypatch.setattr(sys, "argv", ["offline-packing", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli_module.main()
    return int(end.value.code or 0), capsys.readouterr().err

"""The command line, called in this process."""

from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner, Result

from offline_packing.cli.commands import cli

#: The fixture `command`: arguments to exit status, stdout and stderr.
Command = Callable[..., tuple[int, str, str]]


def invoke(*arguments: str | Path) -> Result:
    """Run the command in this process; it must succeed."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result

"""The command line and the benchmarks in tools/, called in this process."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from offline_packing.cli.commands import cli

#: The fixture `command`: arguments to exit status, stdout and stderr.
Command = Callable[..., tuple[int, str, str]]


def invoke(*arguments: str | Path) -> Result:
    """Run the command in this process; it must succeed."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


BENCHMARKS = Path(__file__).parents[2] / "tools" / "benchmarks"


def benchmark(name: str) -> Any:
    """Import a benchmark, as Python does for one that is started as a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return importlib.import_module(name)


def run_benchmark(name: str, *arguments: str | Path) -> Result:
    """Run a benchmark's command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)  # some import others when they are called
        main = importlib.import_module(name).main
        return CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)

"""Benchmarks in tools/, which are scripts beside each other: imported, or run in this process."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

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

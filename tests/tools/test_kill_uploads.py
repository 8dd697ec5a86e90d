"""The tool that kills uploads: its trials, in a process that has no threads before it forks."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_killed_uploads_are_made_again() -> None:
    """Half of the kills are of a worker, the others of the whole run."""
    pytest.importorskip("moto")
    options = ["--kills", "2", "--workers", "2"]
    command = [sys.executable, "-m", "tools.kill_uploads", *options]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    assert "rerun made the local run's objects and left none" in done.stdout

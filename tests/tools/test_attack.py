"""A small part of tools/attack.py: each damaged record is measured or set aside."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.accounting import account, open_one
from tools.attack import GOOD, WRITERS, damaged_records

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", WRITERS)
def test_damaged_records_are_counted(tmp_path: Path, name: str) -> None:
    root = tmp_path / "data"
    root.mkdir()
    options = WRITERS[name](root, damaged_records(name, 20, seed=1))
    found = [outcome for _, outcome, _ in account(open_one(options, tmp_path))]
    assert len(found) == GOOD + 20
    assert GOOD <= found.count("ok") < len(found)


@pytest.mark.exhaustive
def test_a_case_keeps_its_bounds() -> None:
    """In a process of its own: that of a test holds gigabytes, which a child of it would report."""
    command = [sys.executable, "-m", "tools.attack", "--records", "5", "--only", "jsonl"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    header, line, end = done.stdout.splitlines()
    assert (header.split()[0], line.split()[2]) == ("case", "9")
    assert end == "1 cases, 0 broke a bound"

"""`make peers`: environments that checkouts share, and what it says at the end."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).parent / "peers"


@pytest.fixture
def checkouts(tmp_path: Path) -> list[Path]:
    """Two, each with a .venv, and with one trainer that needs no package more."""
    found = [tmp_path / name for name in ("first", "second")]
    for checkout in found:
        tests = checkout / "tests/peers"
        tests.mkdir(parents=True)
        (checkout / ".venv").symlink_to(sys.prefix)
        for script in ("environment.sh", "run.sh"):
            shutil.copy(PEERS / script, tests)
        shutil.copy(PEERS.parent / "python.sh", checkout / "tests")
        shutil.copy(PEERS.parents[1] / "pyproject.toml", checkout)
        (checkout / "constraints.txt").write_text("# No package.\n")
        (tests / "none.txt").write_text("# No package.\n")
        (tests / "test_none.py").write_text("def test_nothing() -> None:\n    pass\n")
    return found


def run(checkout: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PEERS": str(checkout.parent / "environments")}
    return subprocess.run(
        [f"tests/peers/{command[0]}", *command[1:]],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_shared_environment_has_the_packages_of_the_checkout_that_asks(
    checkouts: list[Path],
) -> None:
    """And an environment that cannot be made hides no other."""
    environment = checkouts[0].parent / "environments/none"
    made = []
    for checkout in checkouts:
        result = run(checkout, "environment.sh", "none")
        assert result.returncode == 0, result.stderr
        code = "import numpy; print(numpy.__file__)"
        found = subprocess.check_output([environment / "bin/python", "-c", code], text=True)
        assert Path(found).is_relative_to(checkout / ".venv")
        made.append((environment / "installed.txt").stat().st_mtime_ns)
    assert made[0] == made[1]  # once
    result = run(checkouts[0], "run.sh", "unknown", "none")
    said = result.stdout.splitlines()[-2:]
    assert result.returncode == 1
    assert said[0] == "unknown: not run, as its environment could not be made"
    assert said[1].startswith("none: 1 passed in ")
    assert ", with transformers " in said[1]

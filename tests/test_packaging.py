"""Contents of an installed package; and the commands that messages and pages name for what is not
installed."""

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from offline_packing.cli.verb import cli
from offline_packing.runs.artifacts import library_versions

ROOT = Path(__file__).parent.parent
PACKAGES = ("offline_packing", "task_encoders", "launch")


def test_everything_is_installed(tmp_path: Path) -> None:
    """Templates, launch scripts, their configurations and the markers of typed packages too."""
    options = ["--quiet", "egg_info", "--egg-base", tmp_path, "build_py", "--build-lib"]
    command = [sys.executable, "setup.py", *options, tmp_path / "lib"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    built = {path.relative_to(tmp_path / "lib") for path in (tmp_path / "lib").rglob("*.*")}
    expected = {
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected - built == set()
    assert {Path(package, "py.typed") for package in PACKAGES} <= expected
    information = (tmp_path / "offline_packing.egg-info/PKG-INFO").read_text()
    assert f"\nVersion: {library_versions()['offline-packing']}\n" in information


def test_a_checkout_without_metadata_knows_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """On PYTHONPATH, not installed."""
    installed = metadata.version

    def version(name: str) -> str:
        if name == "offline-packing":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(metadata, "version", version)
    shown = CliRunner().invoke(cli, ["--version"], prog_name="offline-packing").output
    assert shown.split()[-1] == library_versions()["offline-packing"]


#: Not on a package index: only a clone has extras.
FROM_INDEX = re.compile(r"pip install [^\n`]*offline-packing\[")
EXTRA = re.compile(r"pip install [^\n`]*\.\[([a-z,]+)\]")


def texts() -> dict[str, str]:
    folders = ("offline_packing", "task_encoders", "launch", "examples", "docs", "tools")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    read = (path for path in (*found, *ROOT.glob("*.md")) if path.suffix in (".py", ".md", ".yaml"))
    # The halves of a string that goes over two lines belong together.
    return {str(path): re.sub(r'"\n\s+f?"', "", path.read_text("utf-8")) for path in read}


def test_extras_that_are_named_exist() -> None:
    """And no package is taken for published."""
    nodes = ast.walk(ast.parse((ROOT / "setup.py").read_text()))
    (given,) = (n.value for n in nodes if isinstance(n, ast.keyword) and n.arg == "extras_require")
    assert isinstance(given, ast.Dict)
    extras = {str(ast.literal_eval(key)) for key in given.keys if key is not None}
    found = texts()
    named = {
        one for text in found.values() for own in EXTRA.findall(text) for one in own.split(",")
    }
    assert {"train", "video", "ray"} <= named <= extras
    assert {"logging", "trainer", "video", "ray", "remote"} <= extras
    assert [name for name, text in found.items() if FROM_INDEX.search(text)] == []

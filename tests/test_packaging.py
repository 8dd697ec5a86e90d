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
    subprocess.run(
        [sys.executable, "setup.py", *options, tmp_path / "lib"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
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
    own = library_versions()["offline-packing"]
    assert CliRunner().invoke(cli, ["--version"], prog_name="offline-packing").output.endswith(f"version {own}\n")


#: Not on a package index: only a clone has extras.
FROM_INDEX = re.compile(r"pip install [^\n`]*offline-packing\[")
EXTRA = re.compile(r"pip install [^\n`]*\.\[([a-z,]+)\]")


def texts() -> dict[str, str]:
    folders = ("offline_packing", "task_encoders", "launch", "examples", "docs", "tools")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    read = (path for path in (*found, *ROOT.glob("*.md")) if path.suffix in (".py", ".md", ".yaml"))
    # The halves of a string that goes over two lines belong together.
    return {str(path): re.sub(r'"\n\s+f?"', "", path.read_text("utf-8")) for path in read}


def extras() -> set[str]:
    """Names in setup.py."""
    calls = [
        n for n in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(n, ast.Call)
    ]
    (found,) = (k.value for call in calls for k in call.keywords if k.arg == "extras_require")
    assert isinstance(found, ast.Dict)
    return {str(ast.literal_eval(key)) for key in found.keys if key is not None}


def test_no_package_is_taken_for_published() -> None:
    assert [name for name, text in texts().items() if FROM_INDEX.search(text)] == []


def test_extras_that_are_named_exist() -> None:
    named = {
        extra
        for text in texts().values()
        for names in EXTRA.findall(text)
        for extra in names.split(",")
    }
    assert {"train", "video", "ray"} <= named <= extras()


def test_optional_packages_have_an_extra() -> None:
    assert {"logging", "trainer", "video", "ray", "remote"} <= extras()

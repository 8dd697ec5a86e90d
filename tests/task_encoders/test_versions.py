"""Unsupported versions of packages are refused by name, before their code is imported."""

import os
import subprocess
import sys
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from launch.model.config import transformers_classes
from task_encoders.families import build_sample_encoder
from task_encoders.versions import SUPPORTED, UnsupportedVersionError, require_supported

TOO_OLD = {"megatron-core": "0.14.0", "megatron-energon": "7.0.0", "transformers": "4.57.1"}


def install(package: str, version: str, folder: Path) -> Path:
    """A package as pip installs it, without its code."""
    information = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    information.mkdir()
    text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    (information / "METADATA").write_text(text)
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python, with the packages of a folder before all others."""
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


BUILD = "import task_encoders; task_encoders.build_sample_encoder"
#: Accepted of transformers, also of a checkout of its development branch.
INSIDE = ("5.99.0", "5.40.0.dev0")


def refusal(package: str) -> str:
    accepted = SUPPORTED[package]
    return (
        f"{package} {TOO_OLD[package]} is installed, offline-packing needs {accepted}; "
        f"pip install '{package}{accepted}'"
    )


def test_what_is_installed_is_supported() -> None:
    require_supported.cache_clear()
    require_supported(*SUPPORTED)
    for package, accepted in SUPPORTED.items():
        assert metadata.version(package) in SpecifierSet(accepted)


@pytest.mark.parametrize("version", ["8.0.0.dev3", "6.0.0rc1", "5.8", *INSIDE])
def test_versions_inside_and_outside(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "megatron-energon" if version == "8.0.0.dev3" else "transformers"
    monkeypatch.syspath_prepend(install(package, version, tmp_path))
    require_supported.cache_clear()
    refused = f"^{package} {version} is installed, "
    with (
        nullcontext()
        if version in INSIDE
        else pytest.raises(UnsupportedVersionError, match=refused)
    ):
        require_supported(package)


def test_a_family_that_is_newer_than_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install("transformers", "5.12.0", tmp_path))
    for build, what in (
        (lambda: build_sample_encoder("mistral3", str(tmp_path)), "Mistral's tokenizer"),
        (lambda: transformers_classes("gemma4"), "the model of gemma4"),
    ):
        message = f"^transformers 5.12.0 is installed, {what} needs >=5.1\\d; pip install"
        with pytest.raises(UnsupportedVersionError, match=message):
            build()


def test_an_absent_package_is_left_to_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    for package in SUPPORTED:
        with pytest.raises(metadata.PackageNotFoundError):
            metadata.version(package)
    require_supported.cache_clear()
    require_supported(*SUPPORTED)


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        *((package, "-m launch.start -m launch.train none.yaml".split()) for package in TOO_OLD),
        ("transformers", ["-m", "launch.train_transformers", "none", "out"]),
        ("megatron-energon", ["-m", "offline_packing", "demo", "demo"]),
        ("transformers", ["-m", "offline_packing", "demo", "demo"]),
        ("megatron-energon", ["-c", "from task_encoders import PackedTaskEncoder"]),
        ("transformers", ["-c", f"{BUILD}('qwen2_vl', '/checkpoint')"]),
    ],
)
def test_the_last_line_says_so(package: str, arguments: list[str], tmp_path: Path) -> None:
    """Of a command it is the only one, before the demo draws its data."""
    ran = run(install(package, TOO_OLD[package], tmp_path), *arguments)
    assert ran.stderr.endswith(f"rror: {refusal(package)}\n")
    assert ran.returncode == 1
    assert arguments[0] == "-c" or ran.stderr.startswith("error: ")
    assert not (tmp_path / "demo").exists()


def test_measuring_asks_for_no_package_of_training(tmp_path: Path) -> None:
    for package, version in TOO_OLD.items():
        install(package, version, tmp_path)
    ran = run(tmp_path, "-c", f"{BUILD}()")
    assert ran.returncode == 0, ran.stderr
